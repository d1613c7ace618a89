"""Schemes: how a tensor is quantized, as frozen data.

The table `SCHEMES` has one row per scheme. A row says which components a quantized tensor of that scheme consists of
and how their scales lie over it; everything else (cutting, saving, loading, resharding) reads the row. Adding a scheme
means adding a row here and, for a new Transformer Engine class, an adapter in `te/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Edges = NDArray[np.int64]
"""Block edges along one axis, in elements: edges[i] is the first element of block i, edges[-1] the exclusive end."""

ELEMENT_DTYPES: dict[str, torch.dtype] = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
}
"""Eight-bit element formats by name. Never by Transformer Engine's enum value, which changed between its releases."""

E2M1 = "E2M1"
"""The four-bit element format; two elements share a byte, the even one in the low nibble."""

SCALE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "E8M0": torch.uint8,
    "E4M3": torch.uint8,
}
"""Scale formats: the dtype in which a scale of that format is stored."""

Block = tuple[int | None, int | None]
"""Elements along (rows, columns) that share one value. None: the whole quantized shard."""


@dataclass(frozen=True, slots=True)
class GridSpec:
    """One grid of values that go with the codes of a direction."""

    component: str
    """Component name, e.g. "rowwise_scale_inv"."""
    scale_format: str
    """A key of `SCALE_DTYPES`."""
    block: Block


@dataclass(frozen=True, slots=True)
class DirectionSpec:
    """One direction (rowwise or columnwise) of a quantized tensor: its codes and the grids that go with them."""

    name: str
    """"rowwise" or "columnwise"."""
    scale: GridSpec
    """What a code is multiplied by to dequantize it (NVFP4: times amax and a constant)."""
    amax: GridSpec | None = None
    """NVFP4's second level: the largest magnitude that the block scales are relative to."""
    packed_axis: int | None = None
    """Axis along which two codes share a byte; None where a code is a byte."""

    @property
    def data(self) -> str:
        """Component name of the codes."""
        return f"{self.name}_data"

    @property
    def grids(self) -> tuple[GridSpec, ...]:
        """All grids."""
        return (self.scale,) if self.amax is None else (self.scale, self.amax)

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the code bytes of a tensor (or offset of the bytes of an element) of logical `shape`.

        Raises:
            ValueError: an odd number along the packed axis.
        """
        if self.packed_axis is None:
            return shape
        axis = self.packed_axis - 2 + len(shape)
        if shape[axis] % 2:
            raise ValueError(f"{shape[axis]} is odd: packed {E2M1} codes are cut in pairs along axis {axis}")
        return (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])

    def logical_shape(self, code_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `code_shape`."""
        if self.packed_axis is None:
            return code_shape
        axis = self.packed_axis - 2 + len(code_shape)
        return (*code_shape[:axis], 2 * code_shape[axis], *code_shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """One row of the table: what all quantized tensors of one scheme have in common."""

    elements: tuple[str, ...]
    """Element formats that the scheme allows."""
    directions: tuple[DirectionSpec, ...]
    """What is stored. A direction that is derivable from another one is not listed."""
    flags: tuple[tuple[str, int], ...] = ()
    """Flags that the scheme has, with their defaults."""


def _rowwise(scale_format: str, block: Block, amax: Block | None = None, packed: bool = False) -> DirectionSpec:
    return DirectionSpec(
        name="rowwise",
        scale=GridSpec("rowwise_scale_inv", scale_format, block),
        amax=None if amax is None else GridSpec("amax_rowwise", "float32", amax),
        packed_axis=1 if packed else None,
    )


def _columnwise(scale_format: str, block: Block, amax: Block | None = None, packed: bool = False) -> DirectionSpec:
    return DirectionSpec(
        name="columnwise",
        scale=GridSpec("columnwise_scale_inv", scale_format, block),
        amax=None if amax is None else GridSpec("amax_columnwise", "float32", amax),
        packed_axis=0 if packed else None,
    )


_WHOLE: Block = (None, None)
_FP8 = ("E4M3", "E5M2")
_POWER_OF_TWO = (("power_of_two", 1),)
_NVFP4_FLAGS = (("e4m3_max", 448), ("use_4over6", 0))
_FLAG_VALUES = {"power_of_two": (0, 1), "e4m3_max": (256, 448), "use_4over6": (0, 1)}
"""Values that flags can have."""

SCHEMES: dict[str, SchemeRow] = {
    "per_tensor": SchemeRow(_FP8, (_rowwise("float32", _WHOLE),)),
    "blockwise_2d": SchemeRow(_FP8, (_rowwise("float32", (128, 128)),), _POWER_OF_TWO),
    "blockwise_1d": SchemeRow(
        _FP8,
        (_rowwise("float32", (1, 128)), _columnwise("float32", (128, 1))),
        _POWER_OF_TWO,
    ),
    "mxfp8": SchemeRow(_FP8, (_rowwise("E8M0", (1, 32)), _columnwise("E8M0", (32, 1)))),
    "mxfp8_2d": SchemeRow(_FP8, (_rowwise("E8M0", (32, 32)),)),
    "nvfp4": SchemeRow(
        (E2M1,),
        (
            _rowwise("E4M3", (1, 16), _WHOLE, packed=True),
            _columnwise("E4M3", (16, 1), _WHOLE, packed=True),
        ),
        _NVFP4_FLAGS,
    ),
    "nvfp4_2d": SchemeRow((E2M1,), (_rowwise("E4M3", (16, 16), _WHOLE, packed=True),), _NVFP4_FLAGS),
    "nvfp4_row_scaled": SchemeRow((E2M1,), (_rowwise("E4M3", (1, 16), (1, None), packed=True),), _NVFP4_FLAGS),
}


def component_names() -> frozenset[str]:
    """Every component name that some scheme uses."""
    return frozenset(
        name
        for row in SCHEMES.values()
        for spec in row.directions
        for name in (spec.data, *(grid.component for grid in spec.grids))
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one tensor is quantized.

    Raises:
        ValueError: the name, the element format or a flag is not known.
    """

    name: str
    """A key of `SCHEMES`."""
    element: str
    """Element format: "E4M3", "E5M2" or "E2M1"."""
    flags: tuple[tuple[str, int], ...] = ()
    """Values of the scheme's flags that are not the default, sorted."""

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise ValueError(f"scheme {self.name!r}: known schemes are {', '.join(sorted(SCHEMES))}")
        if self.element not in self.row.elements:
            raise ValueError(
                f"scheme {self.name}: element {self.element!r} is not one of {', '.join(self.row.elements)}"
            )
        known = dict(self.row.flags)
        unknown = [name for name, _ in self.flags if name not in known]
        if unknown:
            raise ValueError(f"scheme {self.name}: flags {', '.join(unknown)} are not among {', '.join(known)}")
        bad = [f"{name}={value}" for name, value in self.flags if value not in _FLAG_VALUES.get(name, (value,))]
        if bad:
            raise ValueError(f"scheme {self.name}: flags {', '.join(bad)} have values that they cannot have")
        if [f for f in self.flags if known[f[0]] == f[1]] or list(self.flags) != sorted(set(self.flags)):
            raise ValueError(f"scheme {self.name}: flags {self.flags} are not sorted, or hold a default")

    @classmethod
    def of(cls, name: str, element: str, **flags: int) -> Scheme:
        """A scheme from all its flags, defaults too."""
        defaults = dict(SCHEMES[name].flags) if name in SCHEMES else {}
        return cls(
            name,
            element,
            tuple(sorted((k, int(v)) for k, v in flags.items() if int(v) != defaults.get(k))),
        )

    @property
    def row(self) -> SchemeRow:
        """The table row of this scheme."""
        return SCHEMES[self.name]

    @property
    def directions(self) -> tuple[DirectionSpec, ...]:
        """What can be stored, direction by direction; the first is what values are taken from."""
        return self.row.directions

    def flag(self, name: str) -> int:
        """Value of a flag; 0 where the scheme does not have it."""
        return {**dict(self.row.flags), **dict(self.flags)}.get(name, 0)

    def decodes_like(self, other: Scheme) -> bool:
        """Whether the same codes and scales mean the same values in both, block for block."""
        a, b = self.directions[0], other.directions[0]
        same = (self.element, a.scale.scale_format) == (
            other.element,
            b.scale.scale_format,
        )
        return same and (a.amax is None) == (b.amax is None) and self.flag("e4m3_max") == other.flag("e4m3_max")

    def block(self, spec: GridSpec, ndim: int) -> tuple[int | None, ...]:
        """Block sizes of `spec` along each of `ndim` axes; None is the whole quantized shard.

        Raises:
            ValueError: a scheme with finite blocks meets a tensor that is not 2-D.
        """
        if spec.block == (None, None):
            return (None,) * ndim
        if ndim != 2:
            raise ValueError(f"scheme {self.name} quantizes 2-D tensors, not {ndim}-D ones")
        return spec.block

    def to_json(self) -> dict[str, Any]:
        """JSON form; the blocks are written out so that a reader needs no table."""
        return {
            "name": self.name,
            "element": self.element,
            "flags": {name: self.flag(name) for name, _ in self.row.flags},
            "grids": {
                grid.component: {"format": grid.scale_format, "block": list(grid.block)}
                for direction in self.directions
                for grid in direction.grids
            },
        }

    @classmethod
    def from_json(cls, value: object) -> Scheme:
        """The scheme that `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown, or at odds with the table of this version.
        """
        if not isinstance(value, Mapping) or set(value) != {
            "name",
            "element",
            "flags",
            "grids",
        }:
            raise ValueError(f"a scheme has the fields name, element, flags and grids, found {value!r}")
        flags = value["flags"]
        if not isinstance(flags, Mapping) or not all(type(v) is int for v in flags.values()):
            raise ValueError(f"a scheme's flags are integers by name, found {flags!r}")
        name = str(value["name"])
        defaults = dict(SCHEMES[name].flags) if name in SCHEMES else {}
        changed = sorted((str(k), v) for k, v in flags.items() if v != defaults.get(str(k)))
        scheme = cls(name, str(value["element"]), tuple(changed))
        # As text: 1.0 and true equal 1, and are not what is written.
        if json.dumps(scheme.to_json(), sort_keys=True) != json.dumps(dict(value), sort_keys=True):
            raise ValueError(f"scheme {scheme.name} of this version is {scheme.to_json()!r}, found {dict(value)!r}")
        return scheme


def block_edges(size: int, block: int | None, phase: int = 0) -> Edges:
    """Edges, in elements of a fragment, of the blocks that the fragment meets.

    Args:
        size: elements of the fragment along this axis.
        block: block size, or None for one block over everything.
        phase: the fragment's first element's index modulo the block, within its quantized shard.
    """
    if block is None or size == 0:
        return np.array([0, size] if size else [0], dtype=np.int64)
    inner = np.arange(block - phase, size, block, dtype=np.int64)
    return np.concatenate([np.array([0], dtype=np.int64), inner, np.array([size], dtype=np.int64)])
