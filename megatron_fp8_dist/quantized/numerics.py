"""Quantize, dequantize and requantize in plain torch, on any device, in chunks.

A code is x times the scale, rounded to nearest even and saturated to the largest finite element. How scales are chosen:
scales.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from .elements import decode, encode, encode_non_finite, pack, unpack
from .grid import Grid, union
from .scales import FLOAT32_MAX, MANTISSA_BITS, choose_scales, e8m0_to_float, least_amax
from .scheme import SCALE_DTYPES, DirectionSpec, Edges, GridSpec, Scheme, block_edges

WORKING_SET_BYTES = 64 << 20
"""Most float32 bytes that a chunk of a conversion holds at a time."""

_FLOAT32_BUFFERS = 4

_ONE = {"float32": int(np.float32(1).view(np.int32)), "E8M0": 127, "E4M3": 0x38}
"""Bits of a scale of 1, per scale format."""


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a quantized tensor: codes and the grids that go with them."""

    codes: torch.Tensor
    """uint8; the logical shape, or half of it along the packed axis."""
    scale: Grid
    """scale_inv per block, as stored."""
    amax: Grid | None = None
    """NVFP4's second level."""

    @property
    def grids(self) -> tuple[Grid, ...]:
        """All grids, in the order of the direction's specs."""
        return (self.scale,) if self.amax is None else (self.scale, self.amax)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Direction:
        """All tensors through `fn`."""
        return Direction(fn(self.codes), *(grid.map(fn) for grid in self.grids))


def multipliers(direction: Direction, spec: DirectionSpec, scheme: Scheme) -> Grid:
    """float32 per block: what a decoded code is multiplied by."""
    scale = direction.scale
    if spec.scale.scale_format == "float32":
        return scale
    if spec.scale.scale_format == "E8M0":
        return Grid(e8m0_to_float(scale.values), scale.edges, scale.known)
    assert direction.amax is not None, "E4M3 scales are relative to an amax"
    amax = direction.amax
    for axis, edges in enumerate(scale.edges):
        common = union([edges, amax.edges[axis]])
        scale, amax = scale.refine(axis, common), amax.refine(axis, common)
    constant = torch.tensor(1.0 / (6.0 * scheme.flag("e4m3_max")), dtype=torch.float32)
    block = decode(scale.values, "E4M3")
    product = block * amax.values
    # Transformer Engine's order, but where that overflows on its way to a value that does not.
    factors = torch.where(torch.isinf(product), block * (amax.values * constant), product * constant)
    return Grid(factors, scale.edges, scale.known)


# --- chunks ----------------------------------------------------------------------------------------------------------


Chunk = tuple[slice, ...]
"""A box of elements: one slice per axis."""


def chunks(shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Boxes of a tensor whose float32 working set stays under `WORKING_SET_BYTES`.

    They begin at even indices, so that packed codes are not split; an axis is cut where all after it are whole.
    """
    limit = max(2, WORKING_SET_BYTES // (4 * _FLOAT32_BUFFERS))
    axis = next((a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= limit // 2 ** (a + 1)), len(shape) - 1)
    steps = [2] * axis + [max(2, limit // 2**axis // max(1, math.prod(shape[axis + 1 :])) // 2 * 2)]
    cut = [[slice(o, min(s, o + n)) for o in range(0, s, n)] for s, n in zip(shape, steps, strict=False)]
    whole = [slice(0, s) for s in shape[axis + 1 :]]
    return ((*lead, *whole) for lead in product(*cut))


def _bytes_of(spec: DirectionSpec, chunk: Chunk) -> Chunk:
    """Where the codes of a chunk lie."""
    return tuple(slice(w.start // 2, w.stop // 2) if axis == spec.packed_axis else w for axis, w in enumerate(chunk))


def _codes_in(codes: torch.Tensor, spec: DirectionSpec, chunk: Chunk) -> torch.Tensor:
    """One code per element of the chunk."""
    return unpack(codes[_bytes_of(spec, chunk)], spec.packed_axis)


def _put(out: torch.Tensor, spec: DirectionSpec, chunk: Chunk, codes: torch.Tensor) -> None:
    out[_bytes_of(spec, chunk)] = pack(codes, spec.packed_axis)


def _values_in(direction: Direction, spec: DirectionSpec, scheme: Scheme) -> Callable[[Chunk], torch.Tensor]:
    """float32 values of a chunk."""
    factors = multipliers(direction, spec, scheme)

    def values_in(chunk: Chunk) -> torch.Tensor:
        codes = _codes_in(direction.codes, spec, chunk)
        return decode(codes, scheme.element) * factors.per_element(chunk, codes.device)

    return values_in


def dequantize_into(out: torch.Tensor, direction: Direction, spec: DirectionSpec, scheme: Scheme) -> torch.Tensor:
    """Fill `out` (any float dtype, the logical shape) with code * scale_inv, computed in float32."""
    if direction.codes.is_meta or not out.numel():
        return out
    if not out.dim():
        return out.copy_(decode(direction.codes, scheme.element) * multipliers(direction, spec, scheme).values)
    values_in = _values_in(direction, spec, scheme)
    for chunk in chunks(tuple(out.shape)):
        out[chunk] = values_in(chunk).to(out.dtype)
    return out


# --- blocks ----------------------------------------------------------------------------------------------------------


def _block_index(edges: Edges, coarse: Edges) -> torch.Tensor:
    """For each block of `edges`, the block of `coarse` that it lies in."""
    return torch.from_numpy(np.searchsorted(coarse, edges[:-1], side="right") - 1)


def _element_index(edges: Edges) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))


def _reduce(
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


def _reduce_grid(grid: Grid, edges: tuple[Edges, ...], how: str, start: float) -> torch.Tensor:
    """Reduce a grid's values into the coarser blocks of `edges`, which must hold no edge that the grid has not."""
    index = [_block_index(f, c) for f, c in zip(grid.edges, edges, strict=True)]
    return _reduce(grid.values, index, [len(c) - 1 for c in edges], how, start)


def _reduce_into(grid: Grid, edges: tuple[Edges, ...], how: str, start: float) -> torch.Tensor:
    """Reduce a grid's values into the blocks of `edges`, whatever edges it has."""
    for axis, coarse in enumerate(edges):
        grid = grid.refine(axis, union([grid.edges[axis], coarse]))
    return _reduce_grid(grid, edges, how, start)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Scales as signed integers, of a type that has room for values larger and smaller than those of any scale."""
    return values.contiguous().view(torch.int32) if values.dtype == torch.float32 else values.to(torch.int16)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    bits = _bits(fine.values)
    info = torch.iinfo(bits.dtype)
    low = bits if fine.known is None else torch.where(fine.known, bits, info.max)
    high = bits if fine.known is None else torch.where(fine.known, bits, info.min)
    low = _reduce_grid(Grid(low, fine.edges), edges, "amin", info.max)
    high = _reduce_grid(Grid(high, fine.edges), edges, "amax", info.min)
    empty = low > high
    values = torch.where(empty, _ONE[scale_format], low)
    return (low != high) & ~empty, _from_bits(values, source.values.dtype), empty


def _block_amax(
    values_in: Callable[[Chunk], torch.Tensor],
    shape: tuple[int, ...],
    edges: tuple[Edges, ...],
    device: torch.device,
) -> torch.Tensor:
    """float32 largest magnitude of each block; `values_in` gives the float32 values of a chunk."""
    sizes = [len(e) - 1 for e in edges]
    amax = torch.zeros(sizes, dtype=torch.float32, device=device)
    index = [_element_index(e) for e in edges]
    for chunk in chunks(shape):
        groups = [blocks[window] for blocks, window in zip(index, chunk, strict=True)]
        low = [int(g[0]) for g in groups]
        met = [int(g[-1]) - first + 1 for g, first in zip(groups, low, strict=True)]
        own = [g - first for g, first in zip(groups, low, strict=True)]
        part = _reduce(values_in(chunk).abs(), own, met, "amax", 0.0)
        window = amax[tuple(slice(first, first + n) for first, n in zip(low, met, strict=True))]
        torch.maximum(window, part, out=window)
    return amax


def spread(grid: Grid, edges: tuple[Edges, ...]) -> torch.Tensor:
    """Values of a grid on the finer blocks of `edges`."""
    for axis, fine in enumerate(edges):
        grid = grid.refine(axis, union([grid.edges[axis], fine]))
    return grid.values


def destination_edges(scheme: Scheme, spec: GridSpec, shape: tuple[int, ...]) -> tuple[Edges, ...]:
    """Block edges of a whole quantized shard of `shape`."""
    return tuple(block_edges(s, b) for s, b in zip(shape, scheme.block(spec, len(shape)), strict=True))


# --- quantize and requantize -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a destination keeps of its source's grids."""

    unequal: torch.Tensor
    """Bool per block of scales: to be quantized again."""
    scale: torch.Tensor
    amax_unequal: torch.Tensor | None
    amax: torch.Tensor | None


def _keep(
    source: Direction | None,
    others: Direction,
    spec: DirectionSpec,
    scheme: Scheme,
    shape: tuple[int, ...],
    plain_scales_ok: bool,
) -> _Kept:
    """Compare a source's grids with a destination's; without a source (None) nothing is kept.

    Args:
        source: the source's same direction.
        others: the direction that the values of blocks that are not kept come from.
        spec: the destination's direction.
        scheme: the destination's scheme.
        shape: logical shape.
        plain_scales_ok: whether a scale that is no power of two is kept where the scheme wants powers of two.
    """
    edges = destination_edges(scheme, spec.scale, shape)
    sizes = [len(e) - 1 for e in edges]
    if source is None:
        blank = torch.zeros(sizes, dtype=SCALE_DTYPES[spec.scale.scale_format])
        unequal = torch.ones(sizes, dtype=torch.bool)
        if spec.amax is None:
            return _Kept(unequal, blank, None, None)
        amax = torch.zeros([len(e) - 1 for e in destination_edges(scheme, spec.amax, shape)])
        return _Kept(unequal, blank, torch.ones_like(amax, dtype=torch.bool), amax)
    unequal, values, empty = unequal_blocks(source.scale, edges, spec.scale.scale_format)
    if scheme.flag("power_of_two") and not plain_scales_ok:
        unequal = unequal | (_bits(values) & MANTISSA_BITS != 0)
    if spec.amax is None or source.amax is None:
        return _Kept(unequal, values, None, None)
    amax_edges = destination_edges(scheme, spec.amax, shape)
    amax_unequal, amax, _ = unequal_blocks(source.amax, amax_edges)
    if others is not source and others.amax is not None:
        # An amax that has no room for the values that come in from the other direction cannot be kept either.
        top = _reduce_into(others.amax, amax_edges, "amax", 0.0)
        touched = _reduce_into(Grid(unequal.to(torch.uint8), edges), amax_edges, "amax", 0) > 0
        amax_unequal = amax_unequal | (touched & (top > amax))
    unequal = unequal | (spread(Grid(amax_unequal, amax_edges), edges) & ~empty)
    return _Kept(unequal, values, amax_unequal, amax)


def requantize(
    exact: Direction | None,
    values: tuple[Direction, DirectionSpec, Scheme],
    spec: DirectionSpec,
    scheme: Scheme,
    shape: tuple[int, ...],
) -> tuple[Direction, int]:
    """One direction of a destination: copied where that is exact, quantized again, once, where it is not.

    Args:
        exact: the source's same direction, if its codes mean the same in the destination; None quantizes every block.
        values: where the values of other blocks come from: a direction of the source, its spec and scheme.
        spec: the destination's direction.
        scheme: the destination's scheme.
        shape: logical shape.

    Returns:
        (direction, number of blocks that were quantized again). Where the number is 0, the codes are those of `exact`
        and no value was decoded.
    """
    # The rule says how scales are chosen: what was chosen by the same rule is kept whatever it is.
    plain_scales_ok = bool(values[2].flag("power_of_two"))
    kept = _keep(exact, values[0], spec, scheme, shape, plain_scales_ok)
    edges = destination_edges(scheme, spec.scale, shape)
    amax_edges = destination_edges(scheme, spec.amax, shape) if spec.amax else None
    count = int(kept.unequal.sum())
    codes = exact.codes if exact is not None else None
    if not count or values[0].codes.is_meta:
        if codes is None:
            codes = torch.empty(spec.code_shape(shape), dtype=torch.uint8, device=values[0].codes.device)
        amax = Grid(kept.amax, amax_edges) if kept.amax is not None and amax_edges else None
        return Direction(codes, Grid(kept.scale, edges), amax), count
    return _quantize_again(kept, codes, values, spec, scheme, shape), count


def _quantize_again(
    kept: _Kept,
    codes: torch.Tensor | None,
    source: tuple[Direction, DirectionSpec, Scheme],
    spec: DirectionSpec,
    scheme: Scheme,
    shape: tuple[int, ...],
) -> Direction:
    edges = destination_edges(scheme, spec.scale, shape)
    values_in, device = _values_in(*source), source[0].codes.device

    def finite(chunk: Chunk) -> torch.Tensor:
        values = values_in(chunk)
        return torch.where(torch.isfinite(values), values, torch.zeros_like(values))

    # What is not finite takes no part in choosing a scale, or one NaN would cost a whole block its values.
    block_amax = _block_amax(finite, shape, edges, device)
    amax_grid, spread_amax = None, None
    if spec.amax is not None and kept.amax is not None and kept.amax_unequal is not None:
        amax_edges = destination_edges(scheme, spec.amax, shape)
        found = _reduce_grid(Grid(block_amax, edges), amax_edges, "amax", 0.0)
        found = torch.where(found > 0, found.clamp(min=least_amax(scheme)), found)
        amax_grid = Grid(
            torch.where(kept.amax_unequal.to(device), found, kept.amax.to(device)),
            amax_edges,
        )
        spread_amax = spread(amax_grid, edges)
    stored, factor = choose_scales(block_amax, spec.scale, scheme, spread_amax)
    unequal = kept.unequal.to(device)
    scale = Grid(torch.where(unequal, stored, kept.scale.to(device)), edges)
    factors, chosen = Grid(factor, edges), Grid(unequal, edges)
    out = torch.empty(spec.code_shape(shape), dtype=torch.uint8, device=device)
    for chunk in chunks(shape):
        values = values_in(chunk)
        again = encode(values * factors.per_element(chunk, device), scheme.element)
        again = torch.where(torch.isfinite(values), again, encode_non_finite(values, scheme.element))
        if codes is not None:
            again = torch.where(chosen.per_element(chunk, device), again, _codes_in(codes, spec, chunk))
        _put(out, spec, chunk, again)
    return Direction(out, scale, amax_grid)


def quantize(
    values: torch.Tensor,
    spec: DirectionSpec,
    scheme: Scheme,
    scale: torch.Tensor | None = None,
) -> Direction:
    """Quantize high-precision `values` as one direction of one whole quantized shard.

    Args:
        values: any float dtype.
        spec: the direction.
        scheme: how to quantize.
        scale: float32 scale per block, for float32 scales; None takes each block's own largest magnitude.
    """
    values = values.detach()
    shape = tuple(values.shape)
    edges = destination_edges(scheme, spec.scale, shape)
    amax_grid = None
    if scale is None:
        # In Transformer Engine's block kernels a scale that overflows becomes the largest value of the input's dtype.
        limit = FLOAT32_MAX if spec.scale.block == (None, None) else min(FLOAT32_MAX, torch.finfo(values.dtype).max)
        block_amax = _block_amax(lambda chunk: values[chunk].to(torch.float32), shape, edges, values.device)
        spread_amax = None
        if spec.amax is not None:
            amax_edges = destination_edges(scheme, spec.amax, shape)
            amax_grid = Grid(
                _reduce_grid(Grid(block_amax, edges), amax_edges, "amax", 0.0),
                amax_edges,
            )
            spread_amax = spread(amax_grid, edges)
        stored, factor = choose_scales(block_amax, spec.scale, scheme, spread_amax, limit)
    else:
        factor = scale.to(torch.float32).reshape([len(e) - 1 for e in edges])
        stored = factor.reciprocal()
    factors = Grid(factor, edges)
    codes = torch.empty(spec.code_shape(shape), dtype=torch.uint8, device=values.device)
    for chunk in chunks(shape):
        wide = values[chunk].to(torch.float32)
        _put(codes, spec, chunk, encode(wide * factors.per_element(chunk, values.device), scheme.element))
    return Direction(codes, Grid(stored, edges), amax_grid)
