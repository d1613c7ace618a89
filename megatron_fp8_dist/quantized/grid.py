"""Grid: the scales of a tensor, with the blocks that they belong to.

A rectilinear grid: one strictly increasing row of block edges per axis, and one scale per block. It is closed under
cutting and joining: narrowing cuts edges, joining keeps every scale, and neither touches a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .scheme import Edges


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and their blocks."""

    values: torch.Tensor
    """One scale per block; as many axes as the tensor, values.shape[a] == len(edges[a]) - 1."""
    edges: tuple[Edges, ...]
    """Block edges per axis, in elements, from 0 to the tensor's size."""
    known: torch.Tensor | None = None
    """Bool, shape of `values`: False for a block that no saved element lies in. None: all are known."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the grid lies over, in elements."""
        return tuple(int(e[-1]) for e in self.edges)

    @property
    def single(self) -> bool:
        """Whether one scale holds for all elements."""
        return self.values.numel() == 1

    def _each(self, fn: Callable[[torch.Tensor], torch.Tensor], edges: tuple[Edges, ...] | None = None) -> Grid:
        known = None if self.known is None else fn(self.known)
        return Grid(fn(self.values), self.edges if edges is None else edges, known)

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Grid:
        """The grid with `fn` applied to its tensors (clone, move to a device)."""
        return self._each(fn)

    def _with_edges(self, axis: int, edges: Edges) -> tuple[Edges, ...]:
        return (*self.edges[:axis], edges, *self.edges[axis + 1 :])

    def narrow(self, axis: int, start: int, length: int) -> Grid:
        """The grid over elements [start, start + length) of `axis`; values are views."""
        old = self.edges[axis]
        low = int(np.searchsorted(old, start, side="right")) - 1 if length else 0
        high = int(np.searchsorted(old, start + length, side="left")) if length else 0
        cut = np.clip(old[low : high + 1], start, start + length) - start if length else old[:1]
        return self._each(lambda v: v.narrow(axis, low, high - low), self._with_edges(axis, cut))

    def every(self, axis: int, step: int) -> Grid:
        """The grid over every `step`-th element of `axis`."""
        block = np.repeat(np.arange(len(self.edges[axis]) - 1), np.diff(self.edges[axis]))[::step]
        first = np.flatnonzero(np.diff(block, prepend=-1))
        edges = np.append(first, len(block)).astype(np.int64)
        index = torch.from_numpy(block[first])
        return self._each(lambda v: v.index_select(axis, index.to(v.device)), self._with_edges(axis, edges))

    def refine(self, axis: int, edges: Edges) -> Grid:
        """The same scales over finer blocks: `edges` must hold every edge of this grid on `axis`."""
        if np.array_equal(edges, self.edges[axis]):
            return self
        index = torch.from_numpy(np.searchsorted(self.edges[axis], edges[:-1], side="right") - 1)
        return self._each(lambda v: v.index_select(axis, index.to(v.device)), self._with_edges(axis, edges))

    def regrid_units(self, shape: Sequence[int]) -> Grid | None:
        """The grid over a tensor viewed as `shape`, or None where a view does not keep the blocks.

        A view keeps them where it only adds or drops axes of size 1, or where one scale holds for everything.
        """
        if self.single:
            edges = tuple(np.array([0, s], dtype=np.int64) for s in shape)
        else:
            if [s for s in shape if s != 1] != [s for s in self.shape if s != 1]:
                return None
            wide = iter([e for e, s in zip(self.edges, self.shape, strict=True) if s != 1])
            edges = tuple(next(wide) if s != 1 else np.array([0, 1], dtype=np.int64) for s in shape)
        return self._each(lambda v: v.reshape([len(e) - 1 for e in edges]), edges)

    def per_element(self, box: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        """Scales of the elements in `box`, broadcastable against them: an axis with one block stays 1."""
        part = self
        for axis, window in enumerate(box):
            part = part.narrow(axis, window.start, window.stop - window.start)
        out = part.values.to(device)
        for axis, edges in enumerate(part.edges):
            if len(edges) > 2:
                lengths = torch.from_numpy(np.diff(edges)).to(device)
                out = out.repeat_interleave(lengths, dim=axis, output_size=int(edges[-1]))
        return out


def union(edges: Sequence[Edges]) -> Edges:
    """All edges of all arguments, each once, in order."""
    first = edges[0]
    if all(np.array_equal(first, e) for e in edges[1:]):
        return first
    return np.unique(np.concatenate(list(edges)))


def cat(grids: Sequence[Grid], axis: int) -> Grid:
    """The grid over tensors joined along `axis`; every scale is kept, other axes are refined to common edges."""
    aligned = list(grids)
    for other in range(len(grids[0].edges)):
        if other != axis:
            common = union([g.edges[other] for g in aligned])
            aligned = [g.refine(other, common) for g in aligned]
    offsets = np.cumsum([0, *(g.shape[axis] for g in aligned)])
    joined = np.concatenate(
        [aligned[0].edges[axis][:1], *(g.edges[axis][1:] + o for g, o in zip(aligned, offsets, strict=False))]
    )
    known = None
    if any(g.known is not None for g in aligned):
        known = torch.cat([_known(g) for g in aligned], axis)
    return replace(
        aligned[0],
        values=torch.cat([g.values for g in aligned], axis),
        edges=aligned[0]._with_edges(axis, joined),
        known=known,
    )


def _known(grid: Grid) -> torch.Tensor:
    return grid.known if grid.known is not None else torch.ones_like(grid.values, dtype=torch.bool)


def paste(shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Grid]], dtype: torch.dtype) -> Grid:
    """The grid over a tensor of `shape` made of `pieces`, each at an offset in elements.

    Blocks where no piece lies have value 0 and are not known.
    """
    axes = range(len(shape))
    edges = tuple(
        union(
            [*(g.edges[a] + o[a] for o, g in pieces if g.shape[a]), np.unique(np.array([0, shape[a]], dtype=np.int64))]
        )
        for a in axes
    )
    device = pieces[0][1].values.device if pieces else torch.device("cpu")
    values = torch.zeros([len(e) - 1 for e in edges], dtype=dtype, device=device)
    known = torch.zeros_like(values, dtype=torch.bool)
    for offset, grid in pieces:
        window = [_window(edges[a], offset[a], grid.shape[a]) for a in axes]
        fine = grid
        for a in axes:
            fine = fine.refine(a, edges[a][window[a].start : window[a].stop + 1] - offset[a])
        values[tuple(window)] = fine.values.to(device)
        known[tuple(window)] = _known(fine).to(device)
    return Grid(values, edges, None if bool(known.all()) else known)


def _window(edges: Edges, offset: int, size: int) -> slice:
    low, high = np.searchsorted(edges, [offset, offset + size], side="left")
    return slice(int(low), int(high))
