"""sharding/layout.py: where components lie, and which blocks a fragment meets."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.quantized.scheme import Scheme, block_edges
from megatron_fp8_dist.sharding.layout import (
    Box,
    EvenGrid,
    Fragment,
    TensorEntry,
    fragment_edges,
    grid_shape,
    layer_key,
    phases,
    slot_count,
    tiles,
    uneven_key,
)
from tests.elementwise import windows

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("toy_schemes")

BLOCKS = {"per_tensor": (None, None), "toy_block": (4, 4), "toy_flat": (3, 5)}


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def box_of(region: tuple[slice, ...]) -> Box:
    return Box(tuple(r.start for r in region), tuple(r.stop - r.start for r in region))


@st.composite
def any_box(draw: st.DrawFn) -> Box:
    offset = (draw(st.integers(0, 6)), draw(st.integers(0, 6)))
    return Box(offset, (draw(st.integers(0, 6)), draw(st.integers(0, 6))))


@given(any_box(), any_box())
def test_intersection(a: Box, b: Box) -> None:
    painted = np.zeros((12, 12), np.int64)
    painted[window(a)] += 1
    painted[window(b)] += 1
    common = a.intersect(b)
    assert (common is None) == (painted.max() < 2)
    if common is not None:
        assert (painted[window(common)] == 2).all()
        assert common.size == (painted == 2).sum()


@given(st.lists(any_box(), max_size=4), any_box())
def test_tiles_of_any_boxes(boxes: list[Box], last: Box) -> None:
    shape = (4, 5)
    painted = np.zeros((12, 12), np.int64)
    for box in [*boxes, last]:
        painted[window(box)] += 1
    fill = bool((painted[:4, :5] == 1).all() and painted.sum() == 20)
    assert tiles([*boxes, last], shape) == fill


@given(data=st.data())
def test_tiles_of_a_cut_shape(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8)))
    cuts = [sorted(data.draw(st.sets(st.integers(0, s)))) for s in shape]
    boxes = data.draw(st.permutations([box_of(w) for w in windows(shape, cuts)]))
    assert tiles(boxes, shape)
    full = [b for b in boxes if b.size]
    if full:
        assert not tiles(full[1:], shape)
        assert not tiles([*full, full[0]], shape)


# Blocks: an element's block is (phase + offset within the fragment) // block


@given(data=st.data(), name=st.sampled_from(sorted(BLOCKS)))
def test_a_fragment_meets_the_blocks_of_its_shard(data: st.DataObject, name: str) -> None:
    scheme = Scheme(name, "E4M3")
    spec = scheme.directions[0].scale
    start = (data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12)))
    size = (data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12)))
    fragment = Fragment(Box((7, 100, 200), (1, *size)), (0, *phases(scheme, start)))
    edges = fragment_edges(scheme, spec, fragment, 1)
    assert grid_shape(scheme, spec, fragment, 1) == (1, *(len(e) - 1 for e in edges))
    for axis, block in enumerate(BLOCKS[name]):
        index = np.zeros(size[axis], np.int64)
        for i, (low, high) in enumerate(pairwise(edges[axis].tolist())):
            index[low:high] = i
        in_shard = (start[axis] + np.arange(size[axis])) // (block or 10**6)
        np.testing.assert_array_equal(index, in_shard - in_shard[0])


def test_phase_is_common_to_all_directions() -> None:
    # Rows in blocks of 1 and 6, columns in blocks of 4 and 1: a phase must tell the place in each of them.
    scheme = Scheme("toy_pair", "E4M3")
    assert phases(scheme, (20, 10)) == (2, 2)
    assert phases(Scheme("per_tensor", "E4M3"), (20, 10)) == (0, 0)


@pytest.mark.parametrize("factory_built", [False, True])
@given(data=st.data())
def test_slots_hold_every_fragment(factory_built: bool, data: st.DataObject) -> None:
    size, block = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 7))
    # A plain fragment begins its shard; one that a factory cut may begin at any multiple of its size.
    phase = data.draw(st.integers(0, 5)) * size % block if factory_built else 0
    assert len(block_edges(size, block, phase)) - 1 <= slot_count(size, block, factory_built)


def test_slots_are_not_wasted() -> None:
    assert [slot_count(s, 4, False) for s in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [slot_count(s, 4, True) for s in (0, 1, 4, 5, 8)] == [0, 2, 1, 3, 2]
    assert [slot_count(s, None, True) for s in (1, 5, 8)] == [1, 1, 1]


def test_a_finite_block_takes_two_axes() -> None:
    scheme = Scheme("toy_block", "E4M3")
    with pytest.raises(ValueError, match="2-D tensors, not 3-D"):
        scheme.block(scheme.directions[0].scale, 3)


# Stored places

SCALE = "rowwise_scale_inv"


def even_entry() -> TensorEntry:
    """Two layers of three fragments of five rows each."""
    runs = (((2, 0),), ((1, 0), (2, 1)), ((1, 0),))
    grid = EvenGrid((1, 5, 8), {SCALE: (1, 3, 2)}, runs)
    return TensorEntry(Scheme("toy_block", "E4M3"), "bfloat16", (2, 15, 8), 1, ("rowwise",), grid)


def uneven_entry() -> TensorEntry:
    pieces = tuple(Fragment(Box((a, 0), (b - a, 8)), (a % 4, 0)) for a, b in pairwise((0, 5, 8, 15)))
    return TensorEntry(Scheme("toy_block", "E4M3"), "bfloat16", (15, 8), 0, ("rowwise",), None, pieces)


@given(data=st.data())
def test_overlapping_even_fragments(data: st.DataObject) -> None:
    entry = even_entry()
    offset = tuple(data.draw(st.integers(0, s + 2)) for s in entry.global_shape)
    box = Box(offset, tuple(data.draw(st.integers(1, s)) for s in entry.global_shape))
    every = [Fragment(Box((i, 5 * j, 0), (1, 5, 8)), (0, int(j > 0), 0)) for i in range(2) for j in range(3)]
    assert list(entry.overlapping(box)) == [f for f in every if f.box.intersect(box)]


@given(data=st.data())
def test_overlapping_uneven_fragments(data: st.DataObject) -> None:
    entry = uneven_entry()
    box = Box((data.draw(st.integers(0, 16)), 0), (data.draw(st.integers(0, 16)), 8))
    assert list(entry.overlapping(box)) == [f for f in entry.uneven if f.box.intersect(box)]


def test_even_scales_lie_side_by_side() -> None:
    entry = even_entry()
    spec = entry.scheme.directions[0].scale
    whole = Box((0, 0, 0), entry.global_shape)
    regions = [entry.scale_region("w", spec, f) for f in entry.overlapping(whole)]
    assert {r.key for r in regions} == {"w.rowwise_scale_inv"}
    assert {r.global_shape for r in regions} == {(2, 9, 2)}
    assert tiles([r.box for r in regions], (2, 9, 2))
    assert [r.box.offset for r in regions] == [(i, 3 * j, 0) for i in range(2) for j in range(3)]


def test_uneven_scales_have_their_own_keys() -> None:
    entry = uneven_entry()
    spec = entry.scheme.directions[0].scale
    regions = [entry.scale_region("w", spec, f) for f in entry.uneven]
    assert [r.key for r in regions] == [f"w.{SCALE}@{o}_0" for o in (0, 5, 8)]
    # Rows 0-4 meet blocks 0 and 1, rows 5-7 block 1, rows 8-14 blocks 2 and 3.
    assert [r.box for r in regions] == [Box((0, 0), (n, 2)) for n in (2, 1, 2)]


@pytest.mark.parametrize("entry", [even_entry, uneven_entry])
def test_stored_names_every_component_once(entry: object) -> None:
    assert callable(entry)
    stored = list(entry().stored("w"))
    keys = [key for key, _, _ in stored]
    assert len(set(keys)) == len(keys)
    assert stored[0] == ("w.rowwise_data", "rowwise_data", entry().global_shape)
    assert all(math.prod(shape) for _, _, shape in stored)


def test_keys() -> None:
    assert layer_key("a.b", 3) == "a.b.layer_3"
    assert uneven_key("a.b", SCALE, (5, 0)) == f"a.b.{SCALE}@5_0"
