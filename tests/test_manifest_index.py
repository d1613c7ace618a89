"""sharding/manifest.py against the metadata of the files beside the manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp8_dist.sharding.layout import Box, logical_key
from megatron_fp8_dist.sharding.manifest import Manifest
from megatron_fp8_dist.sharding.stored import MAX_MISSING_LAYERS, StoredTensor, check_against_index, metadata_digest
from tests.manifests import SCALE, manifest

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")


def index_of(described: Manifest) -> dict[str, StoredTensor]:
    """The index of the files that a manifest describes."""
    found = {}
    for key, entry in described.tensors.items():
        for stored, component, shape in entry.stored(key):
            dtype = torch.float32 if component == SCALE else torch.uint8
            whole = Box((0,) * len(shape), shape)
            chunks = (whole,) if component == SCALE else tuple(f.box for f in entry.overlapping(whole))
            found[stored] = StoredTensor(dtype, shape, chunks)
    for layer in (0, 2):
        found[f"mixed.layer_{layer}"] = StoredTensor(torch.bfloat16, (8, 6), (Box((0, 0), (8, 6)),))
    found["norm"] = StoredTensor(torch.float32, (6,), (Box((0,), (6,)),))
    return found


def matched() -> tuple[Manifest, dict[str, StoredTensor]]:
    """A manifest and an index that fit together."""
    index = index_of(manifest())
    return replace(manifest(), digest=metadata_digest(index)), index


def test_a_manifest_and_its_files_agree() -> None:
    assert check_against_index(*matched()) == []


def test_every_component_is_looked_for() -> None:
    found, index = matched()
    components = [key for key in index if logical_key(key) is not None]
    assert len(components) == 2 + 2 + 4 + 2
    assert [p.key for p in check_against_index(found, {})][: len(components)] == components


IndexEdit = Callable[[dict[str, StoredTensor]], Any]


def changed(key: str, **fields: Any) -> IndexEdit:
    return lambda index: index.update({key: replace(index[key], **fields)})


MISMATCHES: dict[str, tuple[IndexEdit, str, str]] = {
    "missing codes": (lambda i: i.pop("even.rowwise_data"), "even.rowwise_data", "nothing"),
    "missing scales": (lambda i: i.pop(f"blocks.{SCALE}"), f"blocks.{SCALE}", "nothing"),
    "missing scales of a fragment": (lambda i: i.pop(f"uneven.{SCALE}@5_0"), f"uneven.{SCALE}@5_0", "nothing"),
    "codes of another dtype": (changed("even.rowwise_data", dtype=torch.int8), "even.rowwise_data", "torch.int8"),
    "scales of another dtype": (changed(f"even.{SCALE}", dtype=torch.float64), f"even.{SCALE}", "torch.float64"),
    "codes of another shape": (changed("even.rowwise_data", shape=(6, 8)), "even.rowwise_data", "[6, 8]"),
    "scales of another shape": (changed(f"even.{SCALE}", shape=(2, 2)), f"even.{SCALE}", "[2, 2]"),
    "plain key beside components": (lambda i: i.update(even=i["norm"]), "even", "a plain tensor"),
    "plain key beside a layer": (lambda i: i.update({"mixed.layer_1": i["norm"]}), "mixed.layer_1", "a plain tensor"),
    "plain key beside layers": (lambda i: i.update(mixed=i["norm"]), "mixed", "a plain tensor"),
    "missing high-precision layer": (lambda i: i.pop("mixed.layer_2"), "mixed.layer_2", "nothing"),
    "unknown component": (lambda i: i.update({f"x.{SCALE}": i["norm"]}), f"x.{SCALE}", "a stored component"),
    "unknown fragment": (lambda i: i.update({f"uneven.{SCALE}@6_0": i["norm"]}), f"uneven.{SCALE}@6_0", "a stored"),
    "a chunk of codes missing": (changed("even.rowwise_data", chunks=(Box((0, 0), (4, 6)),)), "even", "1 stored"),
    "a chunk of codes twice": (changed("even.rowwise_data", chunks=(Box((0, 0), (4, 6)),) * 2), "even", "2 stored"),
    "chunks across fragments": (
        changed("even.rowwise_data", chunks=(Box((0, 0), (3, 6)), Box((3, 0), (5, 6)))),
        "even",
        "2 stored",
    ),
    "chunks across uneven fragments": (
        changed("uneven.rowwise_data", chunks=tuple(Box((a, 0), (b - a, 4)) for a, b in ((0, 4), (4, 8), (8, 16)))),
        "uneven",
        "3 stored",
    ),
    "other chunks of codes": (changed("even.rowwise_data", chunks=(Box((0, 0), (8, 6)),)), "even", "1 stored chunks"),
    "other chunks of scales": (changed("even.rowwise_scale_inv", chunks=()), "fp8_manifest.json", "digest"),
}


@pytest.mark.parametrize(("edit", "key", "found"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_what_does_not_fit_is_named(edit: IndexEdit, key: str, found: str) -> None:
    described, index = matched()
    edit(index)
    problems = check_against_index(described, index)
    assert [p.key for p in problems] == [key]
    assert found in problems[0].found


def test_an_older_digest_is_refused() -> None:
    described, index = matched()
    problems = check_against_index(replace(described, digest="sha256:0"), index)
    assert [p.key for p in problems] == ["fp8_manifest.json"]
    assert "sha256:0" in problems[0].found


def test_all_mismatches_at_once() -> None:
    described, index = matched()
    del index["even.rowwise_data"]
    del index[f"uneven.{SCALE}@5_0"]
    index[f"x.{SCALE}"] = index["norm"]
    assert {p.key for p in check_against_index(described, index)} == {
        "even.rowwise_data",
        f"uneven.{SCALE}@5_0",
        f"x.{SCALE}",
    }


def test_components_that_no_manifest_knows() -> None:
    problems = check_against_index(Manifest(tensors={}), index_of(manifest()))
    assert {p.key for p in problems} == {key for key in index_of(manifest()) if logical_key(key) is not None}


def test_layers_beyond_all_memory() -> None:
    described, index = matched()
    stacks = {"mixed": replace(described.mixed["mixed"], num_layers=10**12)}
    keys = [p.key for p in check_against_index(replace(described, mixed=stacks), index)]
    assert keys == [f"mixed.layer_{layer}" for layer in range(3, 3 + MAX_MISSING_LAYERS)]


def test_digest_does_not_depend_on_order() -> None:
    index = index_of(manifest())
    turned = {k: replace(t, chunks=tuple(reversed(t.chunks))) for k, t in reversed(index.items())}
    assert metadata_digest(turned) == metadata_digest(index)


DIGEST_EDITS: dict[str, IndexEdit] = {
    "key": lambda i: i.update({"other.rowwise_data": i.pop("even.rowwise_data")}),
    "one key less": lambda i: i.pop("even.rowwise_data"),
    "dtype": changed("even.rowwise_data", dtype=torch.int8),
    "shape": changed("even.rowwise_data", shape=(8, 7)),
    "chunk": changed("even.rowwise_data", chunks=(Box((0, 0), (8, 6)),)),
    "chunk offset": changed(f"even.{SCALE}", chunks=(Box((1, 0), (1, 1)), Box((1, 0), (1, 1)))),
}


@pytest.mark.parametrize("edit", DIGEST_EDITS.values(), ids=DIGEST_EDITS.keys())
def test_digest_changes_with_any_component(edit: IndexEdit) -> None:
    index = index_of(manifest())
    before = metadata_digest(index)
    edit(index)
    assert metadata_digest(index) != before


def test_digest_leaves_other_tensors_alone() -> None:
    index = index_of(manifest())
    before = metadata_digest(index)
    del index["norm"]
    assert metadata_digest(index) == before
