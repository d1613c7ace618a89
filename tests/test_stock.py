"""Stock Megatron in this harness: its checkpoints round-trip in the pytest process and on the pool's ranks.

When this fails, the harness or the host is at fault, not the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import no_cuda
from tests.rankpool import RankPool


def round_trip(directory: str) -> None:
    """Save a tensor sharded over all ranks, load it into zeros, and compare bytes."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6) + 24 * rank

    def state_dict(local: torch.Tensor) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", local, (0, rank, size))}

    with no_cuda.stand_ins():
        dist_checkpointing.save(state_dict(data), directory)
    loaded = dist_checkpointing.load(state_dict(torch.zeros_like(data)), directory)
    assert torch.equal(loaded["w"], data)


@pytest.mark.usefixtures("single")
def test_one_process(tmp_path: Path) -> None:
    round_trip(str(tmp_path))


def test_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(f"{__name__}:round_trip", str(tmp_path))
