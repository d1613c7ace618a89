"""Where the components of a quantized tensor lie on disk: keys, shapes and slots. docs/format.md in code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from ..quantized.scheme import SCALE_DTYPES, DirectionSpec, Edges, GridSpec, Scheme, block_edges, component_names

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A region: first element and extent per axis."""

    offset: Shape
    shape: Shape

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for o, h in zip(low, high, strict=True))
        return Box(low, shape) if all(s > 0 for s in shape) else None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, origin: Sequence[int]) -> Shape:
        """Offset relative to `origin`."""
        return tuple(o - p for o, p in zip(self.offset, origin, strict=True))

    def drop(self, axes: int) -> Box:
        """The box without its first `axes` axes."""
        return Box(self.offset[axes:], self.shape[axes:])


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one rank saved of a tensor. Axes are those of the global tensor, prepended ones included."""

    box: Box
    phase: Shape
    """First element's index modulo the block, within its quantized shard, per axis; 0 where no block is finite."""


@dataclass(frozen=True, slots=True)
class EvenGrid:
    """Fragments of one size, laid out regularly."""

    fragment_shape: Shape
    slots: Mapping[str, Shape]
    """Scale component -> slots per fragment and axis."""
    phases: tuple[tuple[tuple[int, int], ...], ...]
    """Per axis, runs of (number of fragments, phase)."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of one stored component."""

    key: str
    box: Box
    global_shape: Shape

    def empty(self) -> Region:
        """No element at the same place: names the key, reads nothing."""
        return replace(self, box=Box(self.box.offset, (0,) * len(self.box.shape)))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One quantized tensor of a checkpoint: what the manifest says of it."""

    scheme: Scheme
    nominal_dtype: str
    """Name of a torch dtype, e.g. "bfloat16"."""
    global_shape: Shape
    prepended_axes: int
    """Leading axes that stack parameters (layers, experts); a fragment has extent 1 there."""
    directions: tuple[str, ...]
    """Names of the stored directions, in the scheme's order."""
    grid: EvenGrid | None
    """Where fragments are even."""
    uneven: tuple[Fragment, ...] = ()
    """Where they are not: every fragment."""

    def specs(self) -> tuple[DirectionSpec, ...]:
        """The stored directions."""
        return tuple(spec for spec in self.scheme.directions if spec.name in self.directions)

    def overlapping(self, box: Box) -> Iterator[Fragment]:
        """The saved fragments that meet `box`, in order of their offsets."""
        if self.grid is None:
            yield from (f for f in self.uneven if f.box.intersect(box))
            return
        shape, runs = self.grid.fragment_shape, self.grid.phases
        ranges = [
            range(max(0, o // f), min(_count(r), -(-(o + s) // f))) if f else range(0)
            for o, s, f, r in zip(box.offset, box.shape, shape, runs, strict=True)
        ]
        for index in product(*ranges):
            offset = tuple(i * f for i, f in zip(index, shape, strict=True))
            phase = tuple(_phase_at(r, i) for r, i in zip(runs, index, strict=True))
            yield Fragment(Box(offset, shape), phase)

    def scale_region(self, key: str, spec: GridSpec, fragment: Fragment) -> Region:
        """Where all values of one grid of `fragment` are stored."""
        if self.grid is None:
            shape = grid_shape(self.scheme, spec, fragment, self.prepended_axes)
            return Region(uneven_key(key, spec.component, fragment.box.offset), Box((0,) * len(shape), shape), shape)
        slots = self.grid.slots[spec.component]
        index = [o // f if f else 0 for o, f in zip(fragment.box.offset, fragment.box.shape, strict=True)]
        box = Box(tuple(i * n for i, n in zip(index, slots, strict=True)), slots)
        return Region(component_key(key, spec.component), box, self._slots_in_all(spec))

    def _slots_in_all(self, spec: GridSpec) -> Shape:
        assert self.grid is not None, "uneven fragments have grids of their own"
        return tuple(_count(r) * n for r, n in zip(self.grid.phases, self.grid.slots[spec.component], strict=True))

    def stored(self, key: str) -> Iterator[tuple[str, str, Shape]]:
        """(component key, component name, global shape) of everything that is stored for this tensor."""
        for direction in self.specs():
            yield component_key(key, direction.data), direction.data, direction.code_shape(self.global_shape)
            for grid in direction.grids:
                if self.grid is not None:
                    yield component_key(key, grid.component), grid.component, self._slots_in_all(grid)
                for fragment in self.uneven:
                    region = self.scale_region(key, grid, fragment)
                    yield region.key, grid.component, region.global_shape

    def is_fragment(self, box: Box) -> bool:
        """Whether `box` is one of the saved fragments."""
        if self.grid is None:
            return any(f.box == box for f in self.uneven)
        shape = self.grid.fragment_shape
        return box.shape == shape and all(f == 0 or o % f == 0 for o, f in zip(box.offset, shape, strict=True))

    @property
    def num_fragments(self) -> int:
        """Number of saved fragments."""
        return len(self.uneven) if self.grid is None else math.prod(_count(r) for r in self.grid.phases)

    def dtype(self, component: str) -> torch.dtype:
        """Stored dtype of a component."""
        formats = {g.component: SCALE_DTYPES[g.scale_format] for d in self.scheme.directions for g in d.grids}
        return formats.get(component, torch.uint8)


def _count(runs: Sequence[tuple[int, int]]) -> int:
    return sum(count for count, _ in runs)


def _phase_at(runs: Sequence[tuple[int, int]], index: int) -> int:
    for count, phase in runs:
        if index < count:
            return phase
        index -= count
    raise IndexError("a fragment beyond the last run")


def component_key(key: str, component: str) -> str:
    """Key of a component of the tensor with logical key `key`."""
    return f"{key}.{component}"


def uneven_key(key: str, component: str, offset: Sequence[int]) -> str:
    """Key of the scales of one uneven fragment."""
    return f"{component_key(key, component)}@{'_'.join(map(str, offset))}"


def layer_key(key: str, layer: int) -> str:
    """Logical key of one layer of a mixed stack."""
    return f"{key}.layer_{layer}"


def logical_key(stored: str) -> tuple[str, str] | None:
    """(logical key, component name) of a component key, or None for any other key."""
    base, _, tail = stored.rpartition(".")
    component = tail.partition("@")[0]
    return (base, component) if base and component in component_names() else None


def tiles(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether `boxes` fill `shape` without hole and overlap."""
    full = [b for b in boxes if b.size]
    if sum(b.size for b in full) != math.prod(shape):
        return False
    low = np.array([b.offset for b in full], dtype=np.int64).reshape(len(full), len(shape))
    high = low + np.array([b.shape for b in full], dtype=np.int64).reshape(low.shape)
    if (low < 0).any() or (high > np.array(shape)).any():
        return False
    return all(not ((low[i + 1 :] < high[i]) & (low[i] < high[i + 1 :])).all(axis=1).any() for i in range(len(full)))


def phases(scheme: Scheme, origin: Sequence[int]) -> Shape:
    """Phase per axis of a fragment whose first element has index `origin` within its quantized shard."""
    return tuple(o % m for o, m in zip(origin, phase_moduli(scheme, len(origin)), strict=True))


def phase_moduli(scheme: Scheme, ndim: int) -> Shape:
    """What phases are taken modulo, per axis of a quantized shard of `ndim` axes; 1 where no block is finite."""
    blocks = [scheme.block(grid, ndim) for d in scheme.directions for grid in d.grids]
    return tuple(math.lcm(*(b for b in axis if b is not None), 1) for axis in zip(*blocks, strict=True))


def slot_count(size: int, block: int | None, cut: bool, phase: int = 0) -> int:
    """Slots that an even fragment has along an axis.

    Args:
        size: its elements.
        block: block size; None is the whole quantized shard.
        cut: whether it was cut from its shard, so that it can start inside a block.
        phase: of the fragment.
    """
    if block is None:
        return 1
    return -(-size // block) + int(cut and (size % block != 0 or phase % block != 0))


def grid_shape(scheme: Scheme, spec: GridSpec, fragment: Fragment, prepended_axes: int) -> Shape:
    """Number of blocks that `fragment` meets, per axis; 1 on prepended axes."""
    return (1,) * prepended_axes + tuple(len(e) - 1 for e in fragment_edges(scheme, spec, fragment, prepended_axes))


def fragment_edges(scheme: Scheme, spec: GridSpec, fragment: Fragment, prepended_axes: int) -> tuple[Edges, ...]:
    """Block edges of `fragment` along its own axes (prepended ones left out)."""
    size, phase = fragment.box.shape[prepended_axes:], fragment.phase[prepended_axes:]
    blocks = scheme.block(spec, len(size))
    return tuple(block_edges(s, b, 0 if b is None else p % b) for s, b, p in zip(size, blocks, phase, strict=True))
