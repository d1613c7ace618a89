"""A dumb model of a block-scaled tensor: every element has its own scale. No blocks, edges or phases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from tests import float8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fp8_dist.quantized.grid import Grid

Bytes: TypeAlias = NDArray[np.uint8]
Bits: TypeAlias = NDArray[np.uint32]
Blocks: TypeAlias = tuple[int | None, ...]


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a plain tensor, element after element in its last axis."""
    # A copy, because what is contiguous already can have any stride along an axis of size 1.
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.reshape(*plain.shape, 1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, np.uint8)


def float_bits(tensor: torch.Tensor) -> Bits:
    """The bits of a float32 tensor."""
    return tensor.detach().contiguous().numpy().view(np.uint32)


def scaled(tensor: object) -> BlockScaledTensor:
    """The tensor, which must be a BlockScaledTensor."""
    assert isinstance(tensor, BlockScaledTensor), f"a {type(tensor).__name__}"
    return tensor


def component_bytes(tensor: torch.Tensor) -> dict[str, bytes]:
    """Every byte of a parameter of either kind."""
    parts = tensor.components() if isinstance(tensor, BlockScaledTensor) else {"": tensor}
    return {name: raw(part).tobytes() for name, part in parts.items()}


@dataclass(frozen=True)
class Elements:
    """Codes, and for each of them the bits of its scale and whether a saved element is there."""

    codes: Bytes
    scale: Bits
    known: NDArray[np.bool_]

    def __getitem__(self, window: tuple[slice, ...]) -> Elements:
        """The elements of a window."""
        return Elements(self.codes[window], self.scale[window], self.known[window])

    def values(self, element: str) -> NDArray[np.float32]:
        """What the codes mean, in float32."""
        return float8.FORMATS[element].table.astype(np.float32)[self.codes] * self.scale.view(np.float32)


def spread(grid: Grid) -> tuple[Bits, NDArray[np.bool_]]:
    """(bits of the scale, known) of every element, block by block."""
    scale, known = np.zeros(grid.shape, np.uint32), np.ones(grid.shape, np.bool_)
    values = float_bits(grid.values)
    blocks = [list(pairwise(edges.tolist())) for edges in grid.edges]
    for index in np.ndindex(values.shape):
        window = tuple(slice(*axis[i]) for axis, i in zip(blocks, index, strict=True))
        scale[window] = values[index]
        if grid.known is not None:
            known[window] = bool(grid.known[index])
    return scale, known


def elements_of(tensor: torch.Tensor, direction: str = "rowwise") -> Elements:
    """The elements of one direction of a tensor."""
    part = scaled(tensor).directions[direction]
    return Elements(part.codes.contiguous().numpy(), *spread(part.scale))


def joined(parts: Sequence[Elements], axis: int) -> Elements:
    """Elements next to each other."""
    return Elements(
        np.concatenate([p.codes for p in parts], axis),
        np.concatenate([p.scale for p in parts], axis),
        np.concatenate([p.known for p in parts], axis),
    )


def same(a: Elements, b: Elements) -> bool:
    """Whether both are the same bytes; the scale of an unknown element says nothing."""
    return (
        np.array_equal(a.codes, b.codes)
        and np.array_equal(a.known, b.known)
        and np.array_equal(np.where(a.known, a.scale, 0), np.where(b.known, b.scale, 0))
    )


def starts(size: int, block: int | None) -> list[int]:
    """First elements of the blocks of a whole quantized shard."""
    return list(range(0, size, block or max(size, 1)))


def conform(source: Elements, element: str, target: str, blocks: Blocks) -> tuple[Bytes, Bits, int]:
    """What a destination of these blocks holds: (codes, scales, blocks that were quantized again)."""
    axes = [starts(s, b) for s, b in zip(source.codes.shape, blocks, strict=True)]
    codes, scales, count = source.codes.copy(), np.zeros([len(a) for a in axes], np.uint32), 0
    for index in np.ndindex(scales.shape):
        first = [axis[i] for axis, i in zip(axes, index, strict=True)]
        window = tuple(slice(f, None if b is None else f + b) for f, b in zip(first, blocks, strict=True))
        block = source[window]
        found = np.unique(block.scale[block.known])
        if element == target and len(found) <= 1:
            scales[index] = found[0] if len(found) else np.float32(1).view(np.uint32)
        else:
            codes[window], scales[index] = requantized(block, element, target)
            count += 1
    return codes, scales, count


def requantized(block: Elements, element: str, target: str) -> tuple[Bytes, np.uint32]:
    """One block, quantized again from its known elements' largest magnitude."""
    values = np.where(block.known, block.values(element), np.float32(0))
    amax = np.abs(values).max() if values.size else np.float32(0)
    scale = float8.scale_from_amax(amax, target)
    # An unknown element is +0, whatever the scale.
    codes = np.where(block.known, float8.FORMATS[target].encode(values * scale), 0).astype(np.uint8)
    return codes, (np.float32(1) / scale).view(np.uint32)


def error_in_bound(old: NDArray[np.float32], codes: Bytes, scale: NDArray[np.float32], element: str) -> bool:
    """Whether |new - old| <= 0.5 * spacing * new scale_inv, up to the float32 roundings of scale and product."""
    form = float8.FORMATS[element]
    wide = scale.astype(np.float64)
    error = np.abs(form.table[codes] * wide - old.astype(np.float64))
    return bool((error <= 0.5 * form.spacing(codes) * wide + np.abs(old.astype(np.float64)) * 2.0**-22).all())


def windows(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[tuple[slice, ...]]:
    """The regions that `cuts` (inner edges per axis) divide a shape into."""
    axes = [list(pairwise([0, *sorted(c), s])) for s, c in zip(shape, cuts, strict=True)]
    return [tuple(slice(*edge) for edge in edges) for edges in product(*axes)]
