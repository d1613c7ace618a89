"""Ranks that die amid a save, by SIGKILL at one of its file operations: the folder is refused or complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import interrupted_jobs
from tests.interrupted_jobs import Aftermath, Point
from tests.rankpool import RankPool

JOBS = interrupted_jobs.__name__
MARKER = "metadata.json"
VICTIMS = ("the rank", "the other rank", "all ranks")
"""Who is killed, seen from the rank that is at the point."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankPool, str]]:
    """A process that forks ranks, and its folder with the earlier checkpoint."""
    folder = str(tmp_path_factory.mktemp("saves"))
    with RankPool(tmp_path_factory.mktemp("nursery"), size=1) as pool:
        pool.run(f"{JOBS}:prepare", folder)
        yield pool, folder


def killed(point: Point, who: str) -> tuple[int, ...]:
    """The ranks that die."""
    everyone = range(interrupted_jobs.LAYOUT.size)
    return tuple(r for r in everyone if who == "all ranks" or (r == point.rank) == (who == "the rank"))


def expected(point: Point, who: str, found: str) -> tuple[list[str], str, str, str]:
    """The summary of a save after which the folder is `found`."""
    ends = ["killed" if rank in killed(point, who) else "error" for rank in range(interrupted_jobs.LAYOUT.size)]
    return ends, "old", found, "new"


def summary(left: Aftermath) -> tuple[list[str], str, str, str]:
    """(ends, earlier checkpoint, this folder, this folder after one more save): versions, errors or "refused"."""
    ends = [end if end in ("killed", "returned", "no answer") else "error" for end in left.ends]
    found = left.found
    if found.startswith("IncompleteCheckpointError") and "The save was interrupted" in found:
        found = "refused"
    if found == "old" and not left.untouched:
        found = "old bytes in a folder that was written to"
    return ends, left.earlier, found, left.again


def outcome(point: Point, who: str, first: bool) -> str:
    """What a folder is after ranks were killed at a point, which may be the first one of a save over a checkpoint."""
    goes_on = who == "the other rank"
    if first and not goes_on:
        return "old"
    what, _, file = point.operation.partition(" ")
    # Once the manifest is there, rank 0 needs nobody to write the marker.
    complete = file == MARKER and (what == "close" or (goes_on and what != "unlink"))
    return "new" if complete else "refused"


CASES = {
    "amid its data": (False, Point(0, "write __0_0.distcp", 100), "the rank", "refused"),
    "amid the data of another rank": (False, Point(1, "write __1_0.distcp", 100), "all ranks", "refused"),
    "before the first change": (True, Point(0, "unlink metadata.json"), "all ranks", "old"),
    "after the first change": (True, Point(0, "unlink fp8_manifest.json"), "the rank", "refused"),
    "before .metadata": (True, Point(0, "rename .metadata.tmp"), "all ranks", "refused"),
    "before the manifest": (True, Point(0, "replace .fp8_manifest.json.partial"), "the other rank", "refused"),
    "before the marker": (False, Point(0, "open metadata.json"), "the other rank", "new"),
    "amid the marker": (True, Point(0, "write metadata.json", 4), "the rank", "refused"),
    "after the marker": (True, Point(0, "close metadata.json"), "all ranks", "new"),
}


@pytest.mark.parametrize(("over", "point", "who", "found"), CASES.values(), ids=CASES.keys())
def test_a_killed_save_is_refused_or_complete(
    nursery: tuple[RankPool, str], over: bool, point: Point, who: str, found: str
) -> None:
    pool, folder = nursery
    (left,) = pool.run(f"{JOBS}:interrupt", folder, over, point, killed(point, who))
    assert summary(left) == expected(point, who, found)


@pytest.mark.long
@pytest.mark.parametrize("who", VICTIMS)
@pytest.mark.parametrize("over", [False, True], ids=["fresh folder", "older checkpoint"])
def test_at_every_point_of_a_save(nursery: tuple[RankPool, str], over: bool, who: str) -> None:
    pool, folder = nursery
    (points,) = pool.run(f"{JOBS}:points", folder, over)
    assert len(points) >= 20
    found, right = {}, {}
    for point in points:
        (left,) = pool.run(f"{JOBS}:interrupt", folder, over, point, killed(point, who))
        found[str(point)] = summary(left)
        right[str(point)] = expected(point, who, outcome(point, who, over and point == points[0]))
    assert found == right
