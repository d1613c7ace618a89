"""A dumb model of any scheme's quantized tensor: every element has its own code, scale and amax, per direction.

What a destination must hold is computed from it with the reference rules of formats.py. No edges, phases or slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_fp8_dist import BlockScaledTensor, Scheme
from tests import formats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.formats import Block, Bytes, Floats

Window: TypeAlias = Any
"""What indexes an array of elements."""


def rule_of(scheme: Scheme) -> formats.Rule:
    """The reference rule of a scheme, for a requantization of float32 values."""
    power, top = bool(scheme.flag("power_of_two")), scheme.flag("e4m3_max") or 448
    return formats.rule(scheme.name, scheme.element, power_of_two=power, e4m3_max=top)


@dataclass(frozen=True)
class Side:
    """One direction, element by element."""

    codes: Bytes
    scale: NDArray[Any]
    """float32 or uint8, as stored."""
    amax: Floats
    """1 where the scheme has none."""

    def __getitem__(self, window: Window) -> Side:
        """The elements of a window."""
        return Side(self.codes[window], self.scale[window], self.amax[window])

    def unit(self, how: formats.Rule) -> Floats:
        """What a decoded code is multiplied by."""
        if how.amax:
            scale: Floats = formats.decode(self.scale, "E4M3") * self.amax * np.float32(1 / (6 * how.e4m3_max))
            return scale
        if how.scale_dtype is np.uint8:
            return np.ldexp(np.float32(1), self.scale.astype(np.int32) - 127).astype(np.float32)
        return self.scale

    def values(self, how: formats.Rule) -> Floats:
        """What the codes mean."""
        product: Floats = formats.decode(self.codes, how.element) * self.unit(how)
        return product


Sides: TypeAlias = dict[str, Side]
"""Direction -> its elements."""


def starts(size: int, block: int) -> NDArray[np.int64]:
    """First elements of the blocks."""
    return np.arange(0, size, block)


def spread(grid: NDArray[Any], block: Block, shape: tuple[int, ...]) -> NDArray[Any]:
    """One value per element."""
    return grid.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def amax_block(scheme: Scheme, shape: tuple[int, ...]) -> Block:
    """Elements that share an amax."""
    return (1, shape[1]) if scheme.name == "nvfp4_row_scaled" else (shape[0], shape[1])


def random_sides(
    scheme: Scheme,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    directions: Iterable[str],
    *,
    choices: int,
    amax: float | None = None,
) -> Sides:
    """One whole quantized shard: random finite codes, and scales of which only so many `choices` exist."""
    how, out = rule_of(scheme), {}
    for direction in directions:
        block = how.blocks[direction]
        codes = rng.integers(0, 16 if how.element == "E2M1" else 256, shape, dtype=np.uint8)
        if how.element != "E2M1":
            codes = np.where(codes & 0x7F >= 0x7B, codes & 0x83, codes)
        draws = rng.integers(0, choices, formats.grid_of((shape[0], shape[1]), block))
        groups = amax_block(scheme, shape)
        largest = rng.choice([0.5, 0.75, 1.25], formats.grid_of((shape[0], shape[1]), groups)).astype(np.float32)
        if amax is not None:
            largest[...] = amax
        everywhere = spread(largest, groups, shape) if how.amax else np.ones(shape, np.float32)
        out[direction] = Side(codes, spread(scale_choices(scheme)[draws], block, shape), everywhere)
    return out


def scale_choices(scheme: Scheme) -> NDArray[Any]:
    """Scales to choose from, the first ones near each other."""
    how = rule_of(scheme)
    if how.amax:
        return np.array([0x38, 0x39, 0x30, 0x48, 0x7E, 0x08, 0x01, 0x22], np.uint8)
    if how.scale_dtype is np.uint8:
        return np.array([127, 126, 129, 120, 100, 140, 0x10, 0x01], np.uint8)
    powers = np.array([1.0, 2.0, 0.5, 2.0**-7, 2.0**9, 2.0**-20, 2.0**-30, 4.0], np.float32)
    return powers if scheme.flag("power_of_two") else powers * np.linspace(1, 1.9, 8, dtype=np.float32)


def sides_of(tensor: torch.Tensor) -> Sides:
    """The elements of a whole quantized shard."""
    assert isinstance(tensor, BlockScaledTensor), f"a {type(tensor).__name__}"
    how, shape, out = rule_of(tensor.scheme), tuple(tensor.shape), {}
    components = {n: c.contiguous().numpy() for n, c in tensor.components().items()}
    for direction in tensor.directions:
        data, axis = components[f"{direction}_data"], how.packed_axis(direction)
        scale = spread(components[f"{direction}_scale_inv"], how.blocks[direction], shape)
        amax = np.ones(shape, np.float32)
        if how.amax:
            amax = spread(components[f"amax_{direction}"], amax_block(tensor.scheme, shape), shape)
        out[direction] = Side(data if axis is None else formats.unpack(data, axis), scale, amax)
    return out


def tensor_of(sides: Sides, scheme: Scheme) -> BlockScaledTensor:
    """The whole quantized shard with these elements."""
    how, components = rule_of(scheme), {}
    for direction, side in sides.items():
        axis, shape = how.packed_axis(direction), side.codes.shape
        components[f"{direction}_data"] = side.codes.copy() if axis is None else formats.pack(side.codes, axis)
        components[f"{direction}_scale_inv"] = sampled(side.scale, how.blocks[direction])
        if how.amax:
            components[f"amax_{direction}"] = sampled(side.amax, amax_block(scheme, shape))
    return BlockScaledTensor.from_components(scheme, {n: torch.from_numpy(c) for n, c in components.items()})


def sampled(values: NDArray[Any], block: Block) -> NDArray[Any]:
    """One value per block."""
    return values[np.ix_(*(starts(s, b) for s, b in zip(values.shape, block, strict=True)))].copy()


def same(values: NDArray[Any], block: Block) -> NDArray[np.bool_]:
    """Whether all elements of a block are equal, per block."""
    rows, columns = (starts(s, b) for s, b in zip(values.shape, block, strict=True))
    bits = values.view(np.uint32) if values.dtype == np.float32 else values
    low = np.minimum.reduceat(np.minimum.reduceat(bits, rows, 0), columns, 1)
    high = np.maximum.reduceat(np.maximum.reduceat(bits, rows, 0), columns, 1)
    equal: NDArray[np.bool_] = low == high
    return equal


def joined(sides: Sequence[Side]) -> Side:
    """Rows of elements below each other."""
    return Side(*(np.concatenate([getattr(s, n) for s in sides]) for n in ("codes", "scale", "amax")))


@dataclass(frozen=True)
class Answer:
    """What a destination must hold."""

    sides: Sides
    again: dict[str, NDArray[np.bool_]]
    """Direction -> whether an element is in a block that was quantized again."""
    blocks: int
    """Number of those blocks."""
    old: Floats
    """Values before."""


def conform(source: Sides, scheme: Scheme, stored: list[str], wanted: list[str]) -> Answer:
    """What a destination of one shard holds after a load from `source`, which may join several shards.

    Args:
        source: the elements of the wanted region.
        scheme: of source and destination.
        stored: directions that were saved.
        wanted: directions of the destination.
    """
    how = rule_of(scheme)
    read = [d for d in stored if d in wanted]
    if not read or set(wanted) - set(read):
        read = [d for d in stored if d in read or d == stored[0]]
    old = source[read[0]].values(how)
    sides, again, count = Sides(), dict[str, NDArray[np.bool_]](), 0
    for direction in wanted:
        block, groups = how.blocks[direction], amax_block(scheme, old.shape)
        # Where a direction was not saved, its elements are those of the other one, all to be quantized again.
        side, lost = source[direction if direction in stored else read[0]], direction not in stored
        amax_kept = same(side.amax, groups) & (not lost)
        kept = same(side.scale, block) & sampled(spread(amax_kept, groups, old.shape), block) & (not lost)
        if direction != read[0]:
            # Values come in from the other direction: an amax without room for them is not kept.
            touched = _amax(spread(~kept, block, old.shape).astype(np.float32), groups) > 0
            amax_kept &= ~(touched & (_amax(source[read[0]].amax, groups) > sampled(side.amax, groups)))
            kept &= sampled(spread(amax_kept, groups, old.shape), block)
        amax = np.where(amax_kept, sampled(side.amax, groups), _amax(old, groups))
        amax = amax if how.amax else np.ones_like(amax)
        scale, factor = sampled(side.scale, block).astype(how.scale_dtype), np.ones(kept.shape, np.float32)
        per_block = sampled(spread(amax, groups, old.shape), block)
        largest = _amax(old, block)
        for index in np.argwhere(~kept):
            at = tuple(index)
            scale[at], factor[at] = how.scale(largest[at], per_block[at])
        codes = formats.encode(old * spread(factor, block, old.shape), how.element)
        changed = spread(~kept, block, old.shape)
        codes = np.where(changed, codes, side.codes)
        sides[direction] = Side(codes, spread(scale, block, old.shape), spread(amax, groups, old.shape))
        again[direction] = changed
        count += int((~kept).sum())
    return Answer(sides, again, count, old)


def _amax(values: Floats, block: Block) -> Floats:
    rows, columns = (starts(s, b) for s, b in zip(values.shape, block, strict=True))
    out: Floats = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), rows, 0), columns, 1)
    return out


def error_in_bound(old: Floats, new: Side, how: formats.Rule) -> bool:
    """design.md's bound: half a step of the element format, and of the scale's where that is coarse."""
    unit, wide, values = (v.astype(np.float64) for v in (new.unit(how), new.values(how), old))
    allowed = 0.5 * formats.spacing(new.codes, how.element) * unit + np.abs(values) * 2.0**-22
    if how.amax:
        # The scale was rounded by up to half a step of E4M3, which the largest element sees 6 times.
        step = formats.spacing(new.scale, "E4M3") * new.amax.astype(np.float64) / (6 * how.e4m3_max)
        allowed += 0.5 * step * 6
    return bool((np.abs(wide - values) <= allowed).all())
