"""strategies/prefetch.py: windows of reads, each region served from the read that fetched it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.sharding.layout import Box, Region
from megatron_fp8_dist.strategies.prefetch import LEAST_WINDOW, MOST_WINDOW, Prefetch, window_for


def region(number: int, size: int = 10) -> Region:
    return Region(str(number), Box((0,), (size,)), (size,))


class Reads:
    """Reads that are written down; a region's tensor holds its key."""

    def __init__(self) -> None:
        self.batches: list[list[Region]] = []

    def __call__(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        self.batches.append(list(regions))
        return [torch.full(r.box.shape, int(r.key)) for r in regions]


def served(fetch: Prefetch, *wanted: Region) -> list[int]:
    return [int(t[0]) for t in fetch(wanted)]


def test_small_regions_are_read_in_one_window() -> None:
    reads = Reads()
    fetch = Prefetch(reads, [region(i) for i in range(8)], window=40)
    assert [served(fetch, region(i)) for i in range(8)] == [[i] for i in range(8)]
    assert [[int(r.key) for r in batch] for batch in reads.batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_large_region_is_read_alone() -> None:
    reads = Reads()
    fetch = Prefetch(reads, [region(0, 100), region(1), region(2)], window=40)
    assert served(fetch, region(0, 100)) == [0]
    assert reads.batches == [[region(0, 100)]]


def test_a_region_that_was_not_announced_is_read() -> None:
    reads = Reads()
    fetch = Prefetch(reads, [], window=40)
    assert served(fetch, region(3), region(2)) == [3, 2]
    assert len(reads.batches) == 1


@given(data=st.data(), window=st.integers(1, 60))
def test_whatever_is_asked_for_is_served(data: st.DataObject, window: int) -> None:
    announced = data.draw(st.lists(st.integers(0, 9), max_size=12))
    asked = data.draw(st.permutations(announced)) + data.draw(st.lists(st.integers(0, 12), max_size=4))
    reads = Reads()
    fetch = Prefetch(reads, [region(i) for i in announced], window)
    while asked:
        count = data.draw(st.integers(1, len(asked)))
        wanted, asked = list(dict.fromkeys(asked[:count])), asked[count:]
        assert served(fetch, *map(region, wanted)) == wanted
    assert all(len(set(batch)) == len(batch) for batch in reads.batches)


@given(count=st.integers(0, 12), window=st.integers(1, 60), data=st.data())
def test_in_the_announced_order_each_region_is_read_once(count: int, window: int, data: st.DataObject) -> None:
    announced = [region(i, data.draw(st.integers(1, 30))) for i in range(count)]
    reads = Reads()
    fetch = Prefetch(reads, announced, window)
    for i, wanted in enumerate(announced):
        assert served(fetch, wanted) == [i]
    assert [r for batch in reads.batches for r in batch] == announced
    # No more than a window, or what was asked for alone.
    assert all(len(batch) == 1 or sum(r.box.size for r in batch) <= window for batch in reads.batches)


def test_what_was_served_early_is_not_read_again() -> None:
    reads = Reads()
    fetch = Prefetch(reads, [region(i) for i in range(6)], window=30)
    assert [served(fetch, region(i)) for i in (4, 0, 1, 2, 3, 5)] == [[4], [0], [1], [2], [3], [5]]
    assert sorted(int(r.key) for batch in reads.batches for r in batch) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("total", "window"),
    [(0, LEAST_WINDOW), (1000, LEAST_WINDOW), (1 << 27, (1 << 27) // 20), (1 << 40, MOST_WINDOW)],
)
def test_a_window_is_a_twentieth_within_bounds(total: int, window: int) -> None:
    assert window_for(total) == window
