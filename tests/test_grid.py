"""quantized/grid.py against the model in which every element has its own scale."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.quantized import grid as grids
from megatron_fp8_dist.quantized.grid import Grid
from tests.elementwise import Bits, spread, windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from megatron_fp8_dist.quantized.scheme import Edges


pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def axis_edges(draw: st.DrawFn, size: int) -> Edges:
    """Any strictly increasing edges from 0 to `size`."""
    inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    return np.unique(np.array([0, *inner, size], dtype=np.int64))


@st.composite
def grid_over(draw: st.DrawFn, shape: Sequence[int]) -> Grid:
    """A grid over `shape`, with distinct scales, some of them perhaps not known."""
    edges = tuple(draw(axis_edges(size)) for size in shape)
    blocks = [len(e) - 1 for e in edges]
    first = draw(st.integers(1, 10_000))
    count = int(np.prod(blocks))
    values = torch.arange(first, first + count, dtype=torch.float32).reshape(blocks)
    known = None
    if draw(st.booleans()):
        known = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
        known = known.reshape(blocks)
    return Grid(values, edges, known)


shapes = st.lists(st.integers(0, 6), min_size=1, max_size=3)
any_grid = shapes.flatmap(grid_over)


def check(grid: Grid, scale: Bits, known: NDArray[np.bool_]) -> None:
    """The grid is well formed and says `scale` and `known` of its elements."""
    assert grid.shape == scale.shape
    for edges, blocks in zip(grid.edges, grid.values.shape, strict=True):
        assert edges.dtype == np.int64
        assert edges[0] == 0
        assert (np.diff(edges) > 0).all()
        assert blocks == len(edges) - 1
    found_scale, found_known = spread(grid)
    np.testing.assert_array_equal(found_known, known)
    np.testing.assert_array_equal(np.where(known, found_scale, 0), np.where(known, scale, 0))


def axis_slice(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


@given(grid=any_grid, data=st.data())
def test_narrow(grid: Grid, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(grid.shape) - 1))
    start = data.draw(st.integers(0, grid.shape[axis]))
    stop = data.draw(st.integers(start, grid.shape[axis]))
    window = axis_slice(axis, start, stop)
    scale, known = spread(grid)
    cut = grid.narrow(axis, start, stop - start)
    check(cut, scale[window], known[window])
    assert cut.values.untyped_storage().data_ptr() == grid.values.untyped_storage().data_ptr()


@given(grid=any_grid, data=st.data())
def test_refine(grid: Grid, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(grid.shape) - 1))
    more = data.draw(axis_edges(grid.shape[axis]))
    finer = np.union1d(grid.edges[axis], more)
    refined = grid.refine(axis, finer)
    check(refined, *spread(grid))
    np.testing.assert_array_equal(refined.edges[axis], finer)


@given(st.lists(st.sets(st.integers(1, 20)), min_size=1, max_size=4))
def test_union(inner: list[set[int]]) -> None:
    edges = [np.array(sorted({0, *some, 21}), dtype=np.int64) for some in inner]
    assert grids.union(edges).tolist() == sorted({0, 21}.union(*inner))


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[list[Grid], int]:
    """Grids that fit together along an axis."""
    shape = draw(shapes)
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    return [draw(grid_over([*shape[:axis], size, *shape[axis + 1 :]])) for size in sizes], axis


@given(neighbours())
def test_cat(joined: tuple[list[Grid], int]) -> None:
    parts, axis = joined
    scale, known = zip(*(spread(p) for p in parts), strict=True)
    check(grids.cat(parts, axis), np.concatenate(scale, axis), np.concatenate(known, axis))


@given(neighbours())
def test_cat_keeps_every_block(joined: tuple[list[Grid], int]) -> None:
    parts, axis = joined
    whole = grids.cat(parts, axis)
    assert whole.values.shape[axis] == sum(p.values.shape[axis] for p in parts)


@st.composite
def collage(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], Grid]]]:
    """(shape, pieces): grids that cover some regions of it, each once."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=2))
    cuts = [draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set() for size in shape]
    pieces = []
    for window in windows(shape, [sorted(c) for c in cuts]):
        if draw(st.booleans()):
            extent = [w.stop - w.start for w in window]
            pieces.append(([w.start for w in window], draw(grid_over(extent))))
    return shape, draw(st.permutations(pieces))


@given(collage())
def test_paste(drawn: tuple[list[int], list[tuple[list[int], Grid]]]) -> None:
    shape, pieces = drawn
    scale, known = np.zeros(shape, np.uint32), np.zeros(shape, np.bool_)
    for offset, piece in pieces:
        window = tuple(slice(o, o + s) for o, s in zip(offset, piece.shape, strict=True))
        scale[window], known[window] = spread(piece)
    pasted = grids.paste(shape, pieces, torch.float32)
    check(pasted, scale, known)
    assert (pasted.known is None) == bool(known.all())


def test_paste_of_nothing_is_unknown() -> None:
    pasted = grids.paste([2, 3], [], torch.float32)
    assert pasted.known is not None
    assert pasted.known.tolist() == [[False]]
    assert pasted.values.tolist() == [[0.0]]


@given(grid=any_grid, data=st.data())
def test_per_element(grid: Grid, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, s)) for s in grid.shape]
    box = tuple(slice(o, data.draw(st.integers(o, s))) for o, s in zip(starts, grid.shape, strict=True))
    part = grid.per_element(box, torch.device("cpu"))
    scale = np.broadcast_to(part.numpy().view(np.uint32), [w.stop - w.start for w in box])
    np.testing.assert_array_equal(scale, spread(grid)[0][box])


@given(grid=shapes.flatmap(grid_over), data=st.data())
def test_views_that_add_and_drop_unit_axes(grid: Grid, data: st.DataObject) -> None:
    shape = [s for s in grid.shape if s != 1]
    for _ in range(data.draw(st.integers(0, 3))):
        shape.insert(data.draw(st.integers(0, len(shape))), 1)
    view = grid.regrid_units(shape)
    assert view is not None
    scale, known = spread(grid)
    check(view, scale.reshape(shape), known.reshape(shape))


def two_blocks() -> Grid:
    return Grid(torch.tensor([[1.0], [2.0]]), (np.array([0, 2, 4]), np.array([0, 3])))


def test_a_view_that_breaks_blocks_is_none() -> None:
    assert two_blocks().regrid_units([3, 4]) is None


def test_one_scale_takes_any_view() -> None:
    grid = Grid(torch.tensor([[5.0]]), (np.array([0, 4]), np.array([0, 3])))
    view = grid.regrid_units([2, 6])
    assert view is not None
    check(view, np.full((2, 6), np.float32(5).view(np.uint32)), np.ones((2, 6), np.bool_))


def test_map_goes_through_scales_and_known() -> None:
    grid = Grid(two_blocks().values, two_blocks().edges, torch.tensor([[True], [False]]))
    copy = grid.map(torch.clone)
    check(copy, *spread(grid))
    assert copy.known is not None
    assert copy.known is not grid.known
    assert copy.values is not grid.values


def test_the_model_spreads_blocks_as_they_lie() -> None:
    scale, known = spread(two_blocks())
    assert scale.view(np.float32).tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert known.all()
    assert [(a.start, b.stop) for a, b in pairwise(w[0] for w in windows([4], [[1]]))] == [(0, 4)]
