"""Joining and leaving the default process group, in a rank of the pool and in the pytest process alike."""

from __future__ import annotations

import sys

import torch.distributed as dist


def join(store: dist.Store, rank: int, world_size: int) -> None:
    """Make a gloo default group of `world_size` ranks. Collective: all of them call it with the same store."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def leave() -> None:
    """Drop every process group, and Megatron's notes about them, so that the next user starts with none.

    Local: call it when no rank is in a collective any more.
    """
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
