"""What a backend says that it holds, and whether a manifest fits it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from ..errors import Problem
from .layout import Box, Shape, TensorEntry, component_key, layer_key, logical_key
from .manifest import FILE_NAME, Manifest

MAX_MISSING_LAYERS = 10
"""A mixed stack is reported with at most so many missing layers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a backend's own metadata says of one stored tensor."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Box, ...]


def metadata_digest(index: Mapping[str, StoredTensor]) -> str:
    """Digest of the component keys, shapes and chunk lists of a backend's metadata."""
    rows = [
        [key, str(t.dtype), list(t.shape), sorted([list(c.offset), list(c.shape)] for c in t.chunks)]
        for key, t in sorted(index.items())
        if logical_key(key) is not None
    ]
    return "sha256:" + hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def check_against_index(manifest: Manifest, index: Mapping[str, StoredTensor]) -> list[Problem]:
    """Everything in which a manifest and the metadata of the files beside it disagree."""
    problems = []
    expected: set[str] = set()
    for key, entry in manifest.tensors.items():
        for stored, component, shape in entry.stored(key):
            expected.add(stored)
            problems += _check_component(stored, component, shape, entry, index.get(stored))
        if key in index:
            problems.append(Problem(key, f"a plain tensor beside {component_key(key, '...')}", "one or the other"))
        problems += _check_chunks(key, entry, index)
    for key, stack in manifest.mixed.items():
        plain = (layer_key(key, i) for i in range(stack.num_layers) if i not in stack.quantized)
        missing = islice((name for name in plain if name not in index), MAX_MISSING_LAYERS)
        problems += [Problem(n, "nothing", "a high-precision layer of a mixed stack") for n in missing]
        if key in index:
            problems.append(
                Problem(key, f"a plain tensor beside its layers {layer_key(key, 0)}, ...", "one or the other")
            )
    for key in index:
        if logical_key(key) is not None and key not in expected:
            problems.append(Problem(key, "a stored component", "nothing: no manifest knows it"))
    if manifest.tensors and not problems and metadata_digest(index) != manifest.digest:
        problems.append(
            Problem(FILE_NAME, f"digest {manifest.digest}", f"{metadata_digest(index)}, as the files' metadata has it")
        )
    return problems


def _check_chunks(key: str, entry: TensorEntry, index: Mapping[str, StoredTensor]) -> list[Problem]:
    """Whether the stored chunks of codes are the fragments, each once."""
    problems = []
    for spec in entry.specs():
        codes = index.get(component_key(key, spec.data))
        if codes is None:
            continue
        boxes = {Box(spec.logical_shape(c.offset), spec.logical_shape(c.shape)) for c in codes.chunks}
        if not len(codes.chunks) == len(boxes) == entry.num_fragments or not all(map(entry.is_fragment, boxes)):
            found = f"{len(codes.chunks)} stored chunks"
            problems.append(Problem(key, found, f"the {entry.num_fragments} fragments of the manifest"))
    return problems


def _check_component(
    stored: str, component: str, shape: Shape, entry: TensorEntry, found: StoredTensor | None
) -> list[Problem]:
    dtype = entry.dtype(component)
    expected = f"{dtype} of shape {list(shape)}"
    if found is None:
        return [Problem(stored, "nothing", expected, "A component is missing: restore the files, or use another save.")]
    if (found.dtype, found.shape) != (dtype, shape):
        return [Problem(stored, f"{found.dtype} of shape {list(found.shape)}", expected)]
    return []
