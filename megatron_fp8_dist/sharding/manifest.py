"""The manifest: what `fp8_manifest.json` says, typed, versioned and validated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from ..errors import ManifestError, Problem
from ..quantized.scheme import GridSpec, Scheme
from .layout import (
    Box,
    EvenGrid,
    Fragment,
    Shape,
    TensorEntry,
    layer_key,
    phase_moduli,
    phases,
    slot_count,
    tiles,
)

FORMAT = "megatron_fp8_dist"
VERSION = 1
FILE_NAME = "fp8_manifest.json"


@dataclass(frozen=True, slots=True)
class MixedStack:
    """A stacked key whose layers do not all have one scheme: each layer is stored under its own key."""

    num_layers: int
    quantized: tuple[int, ...]
    """Layers that are quantized; the others are stored in high precision."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The quantized part of a checkpoint."""

    tensors: Mapping[str, TensorEntry]
    """Logical key as stored (`K`, or `K.layer_<i>` in a mixed stack) -> entry."""
    mixed: Mapping[str, MixedStack] = field(default_factory=dict)
    """Stacked key -> mixed stack."""
    digest: str = ""
    """`digest` of the component keys in the backend's metadata."""
    writer: Mapping[str, str | None] = field(default_factory=dict)
    """Package -> version that wrote the checkpoint."""
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "format": FORMAT,
            "version": self.version,
            "digest": self.digest,
            "writer": dict(self.writer),
            "tensors": {key: _entry_to_json(entry) for key, entry in sorted(self.tensors.items())},
            "mixed_stacks": {
                key: {"num_layers": m.num_layers, "quantized": list(m.quantized)}
                for key, m in sorted(self.mixed.items())
            },
        }

    def dumps(self) -> str:
        """The text of `fp8_manifest.json`."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read the text of `fp8_manifest.json`.

        Raises:
            ManifestError: not JSON, another format, a newer version, or fields that break the schema (all of them).
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise ManifestError(
                f"{FILE_NAME} is damaged", [Problem(FILE_NAME, f"no JSON ({e})", "a JSON document")]
            ) from e
        return _Reader().manifest(document)

    @property
    def layers(self) -> int:
        """Number of quantized tensors, each layer (and expert) of a stack counted."""
        return sum(_count(entry) for entry in self.tensors.values())

    @property
    def codes(self) -> int:
        """Number of quantized elements."""
        return sum(math.prod(entry.global_shape) for entry in self.tensors.values())


def _count(entry: TensorEntry) -> int:
    return math.prod(entry.global_shape[: entry.prepended_axes])


def _entry_to_json(entry: TensorEntry) -> dict[str, Any]:
    out: dict[str, Any] = {
        "scheme": entry.scheme.to_json(),
        "nominal_dtype": entry.nominal_dtype,
        "global_shape": list(entry.global_shape),
        "prepended_axes": entry.prepended_axes,
        "directions": list(entry.directions),
    }
    if entry.grid is None:
        out["fragments"] = [
            {"offset": list(f.box.offset), "shape": list(f.box.shape), "phase": list(f.phase)} for f in entry.uneven
        ]
    else:
        out["fragment_shape"] = list(entry.grid.fragment_shape)
        out["slots"] = {component: list(slots) for component, slots in sorted(entry.grid.slots.items())}
        out["phases"] = [[list(run) for run in runs] for runs in entry.grid.phases]
    return out


class _Reader:
    """Reads a manifest document and collects every problem on the way."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def complain(self, where: str, found: object, expected: str) -> None:
        self.problems.append(Problem(where, repr(found) if not isinstance(found, str) else found, expected))

    def manifest(self, document: Any) -> Manifest:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise ManifestError(f"{FILE_NAME} is not ours", [Problem(FILE_NAME, f"format {found!r}", f"{FORMAT!r}")])
        version = document.get("version")
        if type(version) is not int or version != VERSION:
            remedy = "Install a newer megatron-fp8-dist." if isinstance(version, int) and version > VERSION else ""
            problem = Problem(FILE_NAME, f"format version {version!r}", f"version {VERSION}", remedy)
            raise ManifestError(f"{FILE_NAME} has a version that this package cannot read", [problem])
        self.fields("manifest", document, {"format", "version", "digest", "writer", "tensors", "mixed_stacks"})
        tensors = {key: self.entry(key, value) for key, value in self.table(document, "tensors").items()}
        mixed = {key: self.stack(key, value) for key, value in self.table(document, "mixed_stacks").items()}
        digest, writer = document.get("digest"), self.table(document, "writer")
        if not isinstance(digest, str):
            self.complain("digest", digest, "a string")
        if not all(v is None or isinstance(v, str) for v in writer.values()):
            self.complain("writer", writer, "a version or null for each package")
        for key, stack in mixed.items():
            self.mixed_layers(key, stack, tensors)
        if self.problems:
            raise ManifestError(f"{FILE_NAME} is damaged", self.problems)
        return Manifest(
            {k: e for k, e in tensors.items() if e}, {k: m for k, m in mixed.items() if m}, str(digest), writer
        )

    def table(self, document: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = document.get(name)
        if not isinstance(value, dict):
            self.complain(name, value, "an object")
            return {}
        return value

    def fields(self, where: str, value: Mapping[str, Any], expected: set[str]) -> bool:
        if set(value) != expected:
            self.complain(
                where, f"fields {', '.join(sorted(map(str, value)))}", f"fields {', '.join(sorted(expected))}"
            )
            return False
        return True

    def sizes(self, where: str, value: Any, length: int | None, least: int = 0) -> Shape:
        ok = isinstance(value, list) and all(type(v) is int and v >= least for v in value)
        if not ok or (length is not None and len(value) != length):
            count = "" if length is None else f"{length} "
            self.complain(where, value, f"a list of {count}integers >= {least}")
            return ()
        return tuple(value)

    def entry(self, key: str, value: Any) -> TensorEntry | None:
        before = len(self.problems)
        if not isinstance(value, dict):
            self.complain(key, value, "an object")
            return None
        common = {"scheme", "nominal_dtype", "global_shape", "prepended_axes", "directions"}
        even = "fragments" not in value
        if not self.fields(key, value, common | ({"fragment_shape", "slots", "phases"} if even else {"fragments"})):
            return None
        scheme = self.scheme(key, value["scheme"])
        nominal = getattr(torch, str(value["nominal_dtype"]), None)
        if not isinstance(nominal, torch.dtype) or not nominal.is_floating_point:
            self.complain(f"{key} -> nominal_dtype", value["nominal_dtype"], "the name of a floating-point torch dtype")
        shape = self.sizes(f"{key} -> global_shape", value["global_shape"], None)
        prepended = value["prepended_axes"]
        if type(prepended) is not int or not 0 <= prepended <= len(shape):
            self.complain(f"{key} -> prepended_axes", prepended, f"an integer from 0 to {len(shape)}")
        if scheme is None or len(self.problems) > before:
            return None
        try:
            phases(scheme, (0,) * (len(shape) - prepended))
        except ValueError as e:
            self.complain(f"{key} -> prepended_axes", prepended, f"what fits the scheme: {e}")
            return None
        directions = self.directions(key, value["directions"], scheme)
        grid = self.grid(key, value, scheme, shape) if even else None
        uneven = () if even else self.fragments(key, value["fragments"], shape)
        pieces = [grid.fragment_shape] if grid else [f.box.shape for f in uneven]
        if any(extent != 1 for piece in pieces for extent in piece[:prepended]):
            self.complain(f"{key} -> prepended_axes", prepended, "axes along which every fragment has extent 1")
        if len(self.problems) > before:
            return None
        entry = TensorEntry(scheme, value["nominal_dtype"], shape, prepended, directions, grid, uneven)
        self.phases(key, entry)
        return entry if len(self.problems) == before else None

    def phases(self, key: str, entry: TensorEntry) -> None:
        """Whether phases lie inside a block, and leave a fragment no more blocks than it has slots."""
        axes, grid = entry.prepended_axes, entry.grid
        moduli = (1,) * axes + phase_moduli(entry.scheme, len(entry.global_shape) - axes)
        for axis, modulus in enumerate(moduli):
            found = {p for _, p in grid.phases[axis]} if grid else {f.phase[axis] for f in entry.uneven}
            for phase in sorted(p for p in found if p >= modulus):
                self.complain(f"{key} -> phases -> axis {axis}", phase, f"a phase below {modulus}")
            if grid is None or axis < axes:
                continue
            for spec in (g for d in entry.specs() for g in d.grids):
                block = entry.scheme.block(spec, len(moduli) - axes)[axis - axes]
                size, slots = grid.fragment_shape[axis], grid.slots[spec.component][axis]
                for phase in sorted(p for p in found if block and -(-(p % block + size) // block) > slots):
                    expected = f"a phase with which {size} elements meet {slots} blocks of {block}"
                    self.complain(f"{key} -> phases -> axis {axis}", phase, expected)

    def scheme(self, key: str, value: Any) -> Scheme | None:
        try:
            return Scheme.from_json(value)
        except ValueError as e:
            self.complain(f"{key} -> scheme", str(e), "a scheme of this version")
            return None

    def directions(self, key: str, value: Any, scheme: Scheme) -> tuple[str, ...]:
        known = [spec.name for spec in scheme.directions]
        if not isinstance(value, list) or not value or value != [n for n in known if n in value]:
            self.complain(f"{key} -> directions", value, f"some of {', '.join(known)}, in this order")
            return ()
        return tuple(value)

    def grid(self, key: str, value: Mapping[str, Any], scheme: Scheme, shape: Shape) -> EvenGrid | None:
        fragment = self.sizes(f"{key} -> fragment_shape", value["fragment_shape"], len(shape))
        stored = value["directions"] if isinstance(value["directions"], list) else []
        grids = [grid for spec in scheme.directions if spec.name in stored for grid in spec.grids]
        names = {grid.component for grid in grids}
        slots = value["slots"] if isinstance(value["slots"], dict) else {}
        if set(slots) != names:
            self.complain(f"{key} -> slots", value["slots"], f"an object with {', '.join(sorted(names))}")
        sized = {n: self.sizes(f"{key} -> slots -> {n}", s, len(shape)) for n, s in slots.items()}
        runs = value["phases"]
        if not isinstance(runs, list) or len(runs) != len(shape) or not all(isinstance(r, list) for r in runs):
            self.complain(f"{key} -> phases", runs, f"a list of {len(shape)} lists of runs")
            return None
        phase_runs = tuple(tuple(self.run(f"{key} -> phases", r) for r in axis) for axis in runs)
        if not fragment:
            return None
        for axis, (size, piece, axis_runs) in enumerate(zip(shape, fragment, phase_runs, strict=True)):
            if sum(count for count, _ in axis_runs) * piece != size:
                self.complain(
                    f"{key} -> phases -> axis {axis}", list(axis_runs), f"fragments of {piece} that fill {size}"
                )
        for spec in grids:
            found = sized.get(spec.component, ())
            if found and found not in _slot_choices(scheme, spec, fragment, value["prepended_axes"]):
                self.complain(f"{key} -> slots", list(found), f"slots for fragments of {list(fragment)}")
        return EvenGrid(fragment, sized, phase_runs)

    def run(self, where: str, value: Any) -> tuple[int, int]:
        pair = self.sizes(where, value, 2)
        return (pair[0], pair[1]) if pair else (0, 0)

    def fragments(self, key: str, value: Any, shape: Shape) -> tuple[Fragment, ...]:
        if not isinstance(value, list):
            self.complain(f"{key} -> fragments", value, "a list")
            return ()
        out = []
        for i, item in enumerate(value):
            where = f"{key} -> fragments -> {i}"
            if not isinstance(item, dict):
                self.complain(where, item, "an object")
                continue
            if not self.fields(where, item, {"offset", "shape", "phase"}):
                continue
            offset, size, phase = (
                self.sizes(f"{where} -> {n}", item[n], len(shape)) for n in ("offset", "shape", "phase")
            )
            if any(o + s > g for o, s, g in zip(offset, size, shape, strict=False)):
                self.complain(where, f"offset {offset} and shape {size}", f"a region inside {shape}")
            out.append(Fragment(Box(offset, size), phase))
        boxes = [f.box for f in out if len(f.box.offset) == len(f.box.shape) == len(shape)]
        if len(boxes) == len(value) and not tiles(boxes, shape):
            self.complain(f"{key} -> fragments", f"{len(boxes)} regions", f"regions that fill {shape} without overlap")
        return tuple(out)

    def stack(self, key: str, value: Any) -> MixedStack | None:
        where = f"mixed_stacks -> {key}"
        if not isinstance(value, dict):
            self.complain(where, value, "an object")
            return None
        if not self.fields(where, value, {"num_layers", "quantized"}):
            return None
        layers, quantized = value["num_layers"], self.sizes(f"{where} -> quantized", value["quantized"], None)
        if list(quantized) != sorted(set(quantized)):
            self.complain(f"{where} -> quantized", list(quantized), "indices in order, each once")
            return None
        if type(layers) is not int or any(q >= layers for q in quantized):
            self.complain(where, layers, "a number of layers above every quantized one")
            return None
        return MixedStack(layers, quantized)

    def mixed_layers(self, key: str, stack: MixedStack | None, tensors: Mapping[str, Any]) -> None:
        for layer in stack.quantized if stack else ():
            if layer_key(key, layer) not in tensors:
                self.complain(f"mixed_stacks -> {key}", f"no tensor {layer_key(key, layer)}", "one per quantized layer")


def _slot_choices(scheme: Scheme, spec: GridSpec, fragment: Shape, prepended_axes: int) -> set[Shape]:
    """The slots that fragments of one size can have: built by a factory, or not."""
    own = fragment[prepended_axes:]
    blocks = scheme.block(spec, len(own))
    counts = [
        (slot_count(s, b, cut=False), slot_count(s, b, cut=True, phase=1)) for s, b in zip(own, blocks, strict=True)
    ]
    return {(1,) * prepended_axes + choice for choice in product(*counts)}
