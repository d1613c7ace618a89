"""Quantize, dequantize and requantize in plain torch, on any device, in chunks.

A code is x times the scale, rounded to nearest even and saturated to the largest finite element. How scales are chosen:
scales.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from .elements import decode, encode, encode_non_finite, pack, unpack
from .grid import Grid, union
from .regrid import (
    bits_of,
    destination_edges,
    element_index,
    reduce_grid,
    reduce_groups,
    reduce_into,
    spread,
    unequal_blocks,
)
from .scales import FLOAT32_MAX, MANTISSA_BITS, choose_scales, e8m0_to_float, least_amax
from .scheme import SCALE_DTYPES, DirectionSpec, Edges, Scheme

WORKING_SET_BYTES = 64 << 20
"""Most float32 bytes that a chunk of a conversion holds at a time."""

_FLOAT32_BUFFERS = 4


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


def _block_amax(
    values_in: Callable[[Chunk], torch.Tensor],
    shape: tuple[int, ...],
    edges: tuple[Edges, ...],
    device: torch.device,
) -> torch.Tensor:
    """float32 largest magnitude of each block; `values_in` gives the float32 values of a chunk."""
    sizes = [len(e) - 1 for e in edges]
    amax = torch.zeros(sizes, dtype=torch.float32, device=device)
    if not math.prod(shape):
        return amax
    index = [element_index(e) for e in edges]
    for chunk in chunks(shape):
        groups = [blocks[window] for blocks, window in zip(index, chunk, strict=True)]
        low = [int(g[0]) for g in groups]
        met = [int(g[-1]) - first + 1 for g, first in zip(groups, low, strict=True)]
        own = [g - first for g, first in zip(groups, low, strict=True)]
        part = reduce_groups(values_in(chunk).abs(), own, met, "amax", 0.0)
        window = amax[tuple(slice(first, first + n) for first, n in zip(low, met, strict=True))]
        torch.maximum(window, part, out=window)
    return amax


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
        unequal = unequal | (bits_of(values) & MANTISSA_BITS != 0)
    if spec.amax is None or source.amax is None:
        return _Kept(unequal, values, None, None)
    amax_edges = destination_edges(scheme, spec.amax, shape)
    amax_unequal, amax, _ = unequal_blocks(source.amax, amax_edges)
    if others is not source and others.amax is not None:
        # An amax that has no room for the values that come in from the other direction cannot be kept either.
        top = reduce_into(others.amax, amax_edges, "amax", 0.0)
        touched = reduce_into(Grid(unequal.to(torch.uint8), edges), amax_edges, "amax", 0) > 0
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
        found = reduce_grid(Grid(block_amax, edges), amax_edges, "amax", 0.0)
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
                reduce_grid(Grid(block_amax, edges), amax_edges, "amax", 0.0),
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
