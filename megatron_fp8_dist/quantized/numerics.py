"""Quantize, dequantize and requantize in plain torch, on any device, in chunks.

Rounding rules are Transformer Engine's (common/recipe/recipe_common.cuh for the scale, cvt.rn.satfinite for the cast):
scale = element_max / amax in IEEE float32, 1 where amax is 0, infinite or NaN; scale_inv = 1 / scale; a code is
x * scale rounded to nearest even, saturated to the largest finite element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from .grid import Grid, union
from .scheme import ELEMENT_DTYPES, SCALE_DTYPES, DirectionSpec, Edges, Scheme, block_edges

WORKING_SET_BYTES = 64 << 20
"""Most float32 bytes that a chunk of a conversion holds at a time."""

_FLOAT32_BUFFERS = 4
_FLOAT32_MAX = torch.finfo(torch.float32).max


def decode(codes: torch.Tensor, element: str) -> torch.Tensor:
    """uint8 codes -> their float32 values, without scale."""
    return codes.view(ELEMENT_DTYPES[element]).to(torch.float32)


def encode(values: torch.Tensor, element: str) -> torch.Tensor:
    """float32 values -> uint8 codes: round to nearest even, saturate (infinity too), keep NaN and the sign of zero."""
    dtype = ELEMENT_DTYPES[element]
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype).view(torch.uint8)


def scale_from_amax(amax: torch.Tensor, element: str) -> torch.Tensor:
    """float32 scale (what a value is multiplied by to quantize it) for a largest magnitude of `amax`."""
    amax = amax.to(torch.float32)
    # A tensor over a tensor: a number over a tensor is computed as reciprocal and product, which rounds twice.
    scale = (torch.full_like(amax, torch.finfo(ELEMENT_DTYPES[element]).max) / amax).clamp(max=_FLOAT32_MAX)
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def invalid_scales(values: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Bool, per scale: NaN, infinite or negative, which no quantizer writes."""
    if values.dtype != SCALE_DTYPES[scale_format]:
        raise TypeError(f"{scale_format} scales are stored as {SCALE_DTYPES[scale_format]}, found {values.dtype}")
    return ~torch.isfinite(values) | (values < 0)


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of axis 0 whose float32 working set stays under `WORKING_SET_BYTES` (at least one row each)."""
    rows = shape[0] if shape else 1
    row_bytes = 4 * _FLOAT32_BUFFERS * max(1, int(np.prod(shape[1:], dtype=np.int64)))
    step = max(1, WORKING_SET_BYTES // row_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def dequantize_into(out: torch.Tensor, codes: torch.Tensor, scale: Grid, element: str) -> torch.Tensor:
    """Fill `out` (any float dtype, shape of `codes`) with code * scale_inv, computed in float32."""
    if codes.is_meta or not codes.numel():
        return out
    for rows in row_chunks(tuple(codes.shape)):
        out[rows] = (decode(codes[rows], element) * scale.per_element(rows, codes.device)).to(out.dtype)
    return out


def _block_index(edges: Edges, coarse: Edges) -> torch.Tensor:
    """For each block of `edges`, the block of `coarse` that it lies in."""
    return torch.from_numpy(np.searchsorted(coarse, edges[:-1], side="right") - 1)


def _reduce(values: torch.Tensor, index: list[torch.Tensor], sizes: list[int], how: str, start: float) -> torch.Tensor:
    """Reduce `values` axis by axis into groups; `index[a]` gives the group of each position on axis a."""
    for axis, (group, size) in enumerate(zip(index, sizes, strict=True)):
        shape = list(values.shape)
        shape[axis] = size
        out = torch.full(shape, start, dtype=values.dtype, device=values.device)
        along = [-1 if a == axis else 1 for a in range(values.dim())]
        where = group.to(values.device).view(along).expand(values.shape)
        values = out.scatter_reduce_(axis, where, values, how)
    return values


def unequal_blocks(source: Grid, edges: tuple[Edges, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks of a destination meet source blocks of different scale.

    Args:
        source: scales of the source.
        edges: block edges of the destination, over the same elements.

    Returns:
        (unequal, values): bool and scale per destination block. Where `unequal` is False, `values` is the one scale of
        all source blocks that the block meets, bit for bit; a block without a known source has scale 1.
    """
    fine = source
    for axis, coarse in enumerate(edges):
        fine = fine.refine(axis, union([fine.edges[axis], coarse]))
    index = [_block_index(f, c) for f, c in zip(fine.edges, edges, strict=True)]
    sizes = [len(c) - 1 for c in edges]
    # Non-negative floats order like their bits, and equality must be of bits, so the comparison is on integers.
    bits = fine.values.contiguous().view(torch.int32).to(torch.int64)
    info = torch.iinfo(torch.int64)
    low = bits if fine.known is None else torch.where(fine.known, bits, info.max)
    high = bits if fine.known is None else torch.where(fine.known, bits, info.min)
    low = _reduce(low, index, sizes, "amin", info.max)
    high = _reduce(high, index, sizes, "amax", info.min)
    one = int(np.float32(1).view(np.int32))
    empty = low > high
    values = torch.where(empty, one, low).to(torch.int32).view(torch.float32)
    return (low != high) & ~empty, values


def _block_amax(
    rows_of: Callable[[slice], torch.Tensor], shape: tuple[int, ...], edges: tuple[Edges, ...], device: torch.device
) -> torch.Tensor:
    """float32 largest magnitude of each block; `rows_of` gives the float32 values of a slice of axis 0."""
    sizes = [len(e) - 1 for e in edges]
    amax = torch.zeros(sizes, dtype=torch.float32, device=device)
    first, *others = [_element_index(e) for e in edges]
    for rows in row_chunks(shape):
        groups = first[rows]
        low = int(groups[0])
        part_sizes = [int(groups[-1]) - low + 1, *sizes[1:]]
        part = _reduce(rows_of(rows).abs(), [groups - low, *others], part_sizes, "amax", 0.0)
        window = amax[low : low + part_sizes[0]]
        torch.maximum(window, part, out=window)
    return amax


def _element_index(edges: Edges) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))


def destination_edges(scheme: Scheme, spec: DirectionSpec, shape: tuple[int, ...]) -> tuple[Edges, ...]:
    """Block edges of a whole quantized shard of `shape`."""
    return tuple(block_edges(s, b) for s, b in zip(shape, scheme.block(spec.scale, len(shape)), strict=True))


def requantize(
    codes: torch.Tensor, source: Grid, element: str, target: str, edges: tuple[Edges, ...]
) -> tuple[torch.Tensor, Grid, int]:
    """Codes and scales on a destination's grid: copied where that is exact, quantized again, once, where it is not.

    Args:
        codes: uint8 codes of the source.
        source: their scales.
        element: element format of the source.
        target: element format of the destination; where it differs, every block is quantized again.
        edges: block edges of the destination.

    Returns:
        (codes, grid, number of blocks that were quantized again). Where the number is 0, `codes` is the argument
        itself and no value was decoded.
    """
    unequal, values = unequal_blocks(source, edges)
    if element != target:
        unequal = torch.ones_like(unequal)
    count = int(unequal.sum())
    if not count or codes.is_meta:
        return codes, Grid(values, edges), count

    def values_of(rows: slice) -> torch.Tensor:
        return decode(codes[rows], element) * source.per_element(rows, codes.device)

    def finite(rows: slice) -> torch.Tensor:
        values = values_of(rows)
        return torch.where(torch.isfinite(values), values, torch.zeros_like(values))

    # What is not finite takes no part in choosing a scale, or one NaN would cost a whole block its values.
    scale = scale_from_amax(_block_amax(finite, tuple(codes.shape), edges, codes.device), target)
    unequal = unequal.to(codes.device)
    grid = Grid(torch.where(unequal, scale.reciprocal(), values.to(codes.device)), edges)
    multiply, chosen = Grid(scale, edges), Grid(unequal, edges)
    out = torch.empty_like(codes)
    for rows in row_chunks(tuple(codes.shape)):
        values32 = values_of(rows)
        again = encode(values32 * multiply.per_element(rows, codes.device), target)
        again = torch.where(torch.isfinite(values32), again, values32.to(ELEMENT_DTYPES[target]).view(torch.uint8))
        out[rows] = torch.where(chosen.per_element(rows, codes.device), again, codes[rows])
    return out, grid, count


def quantize(
    values: torch.Tensor, element: str, edges: tuple[Edges, ...], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Grid]:
    """Quantize high-precision `values` on the blocks of `edges`.

    Args:
        values: any float dtype.
        element: element format.
        edges: block edges per axis.
        scale: float32 scale per block; None takes each block's own largest magnitude (current scaling).

    Returns:
        (uint8 codes, grid of scale_inv).
    """
    values = values.detach()
    if scale is None:
        shape = tuple(values.shape)
        amax = _block_amax(lambda rows: values[rows].to(torch.float32), shape, edges, values.device)
        scale = scale_from_amax(amax, element)
    multiply = Grid(scale.to(torch.float32), edges)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for rows in row_chunks(tuple(values.shape)):
        codes[rows] = encode(values[rows].to(torch.float32) * multiply.per_element(rows, values.device), element)
    return codes, Grid(multiply.values.reciprocal(), edges)
