"""Schemes: how a tensor is quantized, as frozen data.

The table `SCHEMES` has one row per scheme. A row says which components a quantized tensor of that scheme consists of
and how their scales lie over it; everything else (cutting, saving, loading, resharding) reads the row. Adding a scheme
means adding a row here and, for a new Transformer Engine class, an adapter in `te/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Edges = NDArray[np.int64]
"""Block edges along one axis, in elements: edges[i] is the first element of block i, edges[-1] the exclusive end."""

ELEMENT_DTYPES: dict[str, torch.dtype] = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
"""Element formats by name. Never by Transformer Engine's enum value, which changed between its releases."""

SCALE_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32}
"""Scale formats: the dtype in which a scale of that format is stored."""


@dataclass(frozen=True, slots=True)
class GridSpec:
    """One grid of scales of a quantized tensor."""

    component: str
    """Component name, e.g. "rowwise_scale_inv"."""
    scale_format: str
    """A key of `SCALE_DTYPES`."""
    block: tuple[int | None, int | None]
    """Elements that share one scale, along (rows, columns). None: the whole quantized shard."""


@dataclass(frozen=True, slots=True)
class DirectionSpec:
    """One direction (rowwise or columnwise) of a quantized tensor: its codes and the scales that go with them."""

    data: str
    """Component name of the codes, e.g. "rowwise_data"."""
    scale: GridSpec
    """The grid of what a code is multiplied by to dequantize it."""


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """One row of the table: what all quantized tensors of one scheme have in common."""

    elements: tuple[str, ...]
    """Element formats that the scheme allows."""
    directions: tuple[DirectionSpec, ...]
    """What is stored. A direction that is derivable from another one is not listed."""


SCHEMES: dict[str, SchemeRow] = {
    "per_tensor": SchemeRow(
        elements=("E4M3", "E5M2"),
        directions=(
            DirectionSpec(
                data="rowwise_data",
                scale=GridSpec(component="rowwise_scale_inv", scale_format="float32", block=(None, None)),
            ),
        ),
    ),
}


def component_names() -> frozenset[str]:
    """Every component name that some scheme uses."""
    return frozenset(
        name for row in SCHEMES.values() for spec in row.directions for name in (spec.data, spec.scale.component)
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one tensor is quantized.

    Raises:
        ValueError: the name or the element format is not known.
    """

    name: str
    """A key of `SCHEMES`."""
    element: str
    """Element format: "E4M3" or "E5M2"."""

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise ValueError(f"scheme {self.name!r}: known schemes are {', '.join(sorted(SCHEMES))}")
        if self.element not in self.row.elements:
            raise ValueError(
                f"scheme {self.name}: element {self.element!r} is not one of {', '.join(self.row.elements)}"
            )

    @property
    def row(self) -> SchemeRow:
        """The table row of this scheme."""
        return SCHEMES[self.name]

    @property
    def directions(self) -> tuple[DirectionSpec, ...]:
        """What is stored, direction by direction."""
        return self.row.directions

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
            "grids": {
                d.scale.component: {"format": d.scale.scale_format, "block": list(d.scale.block)}
                for d in self.directions
            },
        }

    @classmethod
    def from_json(cls, value: object) -> Scheme:
        """The scheme that `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown, or at odds with the table of this version.
        """
        if not isinstance(value, Mapping) or set(value) != {"name", "element", "grids"}:
            raise ValueError(f"a scheme has the fields name, element and grids, found {value!r}")
        scheme = cls(name=str(value["name"]), element=str(value["element"]))
        if scheme.to_json() != dict(value):
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
