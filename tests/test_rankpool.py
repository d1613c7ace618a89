"""The rank pool itself: what it returns, and that no failure of a rank is lost or hangs the suite."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.rankpool import ROOT, RankError, RankPool


def rank_and_sum(offset: int) -> tuple[int, int, int]:
    """This rank, the size of its group, and the sum of rank + offset over the group."""
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), int(value)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("layers.3.weight")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_values_come_back_in_rank_order(ranks: RankPool) -> None:
    assert ranks.run(f"{__name__}:rank_and_sum", 10) == [(r, 4, 46) for r in range(4)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_default_group_has_the_size_asked_for(ranks: RankPool, n: int) -> None:
    assert ranks.run(f"{__name__}:rank_and_sum", 0, n=n) == [(r, n, sum(range(n))) for r in range(n)]


def test_more_ranks_than_there_are(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="n is 5, and the pool has 4 ranks"):
        ranks.run(f"{__name__}:rank_and_sum", 0, n=5)


def test_an_error_names_its_rank_and_shows_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(f"{__name__}:fail_on", 2)
    text = str(caught.value)
    assert "rank 2: KeyError: 'layers.3.weight'" in text
    assert 'raise KeyError("layers.3.weight")' in text
    assert "rank 0, 1, 3: returned" in text


def test_unchecked_errors_are_data(ranks: RankPool) -> None:
    results = ranks.run(f"{__name__}:fail_on", 1, n=2, check=False)
    assert [(r.error_type_name, r.error_text) for r in results] == [("", ""), ("KeyError", "'layers.3.weight'")]


def test_a_hang_is_reported_with_stacks_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(f"{__name__}:hang_on", 1, n=2, timeout=2)
    text = str(caught.value)
    assert "after 2 s not every rank has come back" in text
    assert text.count("in hang_on") == 2
    assert ranks.run(f"{__name__}:rank_and_sum", 0, n=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_dead_rank_is_reported_at_once_and_the_next_call_works(tmp_path: Path) -> None:
    with RankPool(tmp_path, size=1) as pool:
        with pytest.raises(RankError, match="rank 0: died, exit status 7"):
            pool.run(f"{__name__}:die_on", 0)
        assert pool.run(f"{__name__}:rank_and_sum", 0) == [(0, 1, 0)]


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from tests.rankpool import RankPool\n"
        "pool = RankPool(pathlib.Path(sys.argv[1]), size=1)\n"
        "print(*pool.run('os:getpid'), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    rank = int(done.stdout)
    deadline = time.monotonic() + 10
    while _runs(rank):
        assert time.monotonic() < deadline, f"process {rank} outlived its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process still executes; in a container that nobody reaps, a dead one stays as a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
