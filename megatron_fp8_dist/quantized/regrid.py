"""From one grid of blocks to another: which scales a destination's blocks meet, and whether they are one."""

from __future__ import annotations

import numpy as np
import torch

from .grid import Grid, union
from .scheme import Edges, GridSpec, Scheme, block_edges

_ONE = {"float32": int(np.float32(1).view(np.int32)), "E8M0": 127, "E4M3": 0x38}
"""Bits of a scale of 1, per scale format."""


def block_index(edges: Edges, coarse: Edges) -> torch.Tensor:
    """For each block of `edges`, the block of `coarse` that it lies in."""
    return torch.from_numpy(np.searchsorted(coarse, edges[:-1], side="right") - 1)


def element_index(edges: Edges) -> torch.Tensor:
    """For each element, the block that it lies in."""
    return torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))


def reduce_groups(
    values: torch.Tensor,
    index: list[torch.Tensor],
    sizes: list[int],
    how: str,
    start: float,
) -> torch.Tensor:
    """Reduce `values` axis by axis into groups; `index[a]` gives the group of each position on axis a."""
    for axis, (group, size) in enumerate(zip(index, sizes, strict=True)):
        shape = list(values.shape)
        shape[axis] = size
        out = torch.full(shape, start, dtype=values.dtype, device=values.device)
        along = [-1 if a == axis else 1 for a in range(values.dim())]
        where = group.to(values.device).view(along).expand(values.shape)
        values = out.scatter_reduce_(axis, where, values, how)
    return values


def reduce_grid(grid: Grid, edges: tuple[Edges, ...], how: str, start: float) -> torch.Tensor:
    """Reduce a grid's values into the coarser blocks of `edges`, which must hold no edge that the grid has not."""
    index = [block_index(f, c) for f, c in zip(grid.edges, edges, strict=True)]
    return reduce_groups(grid.values, index, [len(c) - 1 for c in edges], how, start)


def reduce_into(grid: Grid, edges: tuple[Edges, ...], how: str, start: float) -> torch.Tensor:
    """Reduce a grid's values into the blocks of `edges`, whatever edges it has."""
    for axis, coarse in enumerate(edges):
        grid = grid.refine(axis, union([grid.edges[axis], coarse]))
    return reduce_grid(grid, edges, how, start)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Scales as signed integers, of a type that has room for values larger and smaller than those of any scale."""
    return values.contiguous().view(torch.int32) if values.dtype == torch.float32 else values.to(torch.int16)


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `bits_of`: scales of `dtype`."""
    return bits.view(torch.float32) if dtype == torch.float32 else bits.to(dtype)


def unequal_blocks(
    source: Grid, edges: tuple[Edges, ...], scale_format: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which blocks of a destination meet source blocks of different scale.

    Args:
        source: scales of the source.
        edges: block edges of the destination, over the same elements.
        scale_format: format of the scales.

    Returns:
        (unequal, values, empty) per destination block. Where `unequal` is False, `values` is the one scale of all
        source blocks that the block meets, bit for bit; `empty` blocks have no known source, and scale 1.
    """
    if source.known is None and all(np.array_equal(a, b) for a, b in zip(source.edges, edges, strict=True)):
        none = torch.zeros_like(source.values, dtype=torch.bool)
        return none, source.values, none
    fine = source
    for axis, coarse in enumerate(edges):
        fine = fine.refine(axis, union([fine.edges[axis], coarse]))
    # Scales are not negative, so they order like their bits; equality must be of bits.
    bits = bits_of(fine.values)
    info = torch.iinfo(bits.dtype)
    low = bits if fine.known is None else torch.where(fine.known, bits, info.max)
    high = bits if fine.known is None else torch.where(fine.known, bits, info.min)
    low = reduce_grid(Grid(low, fine.edges), edges, "amin", info.max)
    high = reduce_grid(Grid(high, fine.edges), edges, "amax", info.min)
    empty = low > high
    values = torch.where(empty, _ONE[scale_format], low)
    return (low != high) & ~empty, from_bits(values, source.values.dtype), empty


def spread(grid: Grid, edges: tuple[Edges, ...]) -> torch.Tensor:
    """Values of a grid on the finer blocks of `edges`."""
    for axis, fine in enumerate(edges):
        grid = grid.refine(axis, union([grid.edges[axis], fine]))
    return grid.values


def destination_edges(scheme: Scheme, spec: GridSpec, shape: tuple[int, ...]) -> tuple[Edges, ...]:
    """Block edges of a whole quantized shard of `shape`."""
    return tuple(block_edges(s, b) for s, b in zip(shape, scheme.block(spec, len(shape)), strict=True))
