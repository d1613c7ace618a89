"""Megatron-core's names, in one place, and the few calls whose form differs between its versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from .probe import host_version

HOST_VERSION = host_version()

from megatron.core import dist_checkpointing  # noqa: E402 - after the version check, whose error is the clearer one
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as torch_dist  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag  # noqa: E402

from . import mcore_0_16, mcore_0_19  # noqa: E402

host_range = mcore_0_16 if Version("0.19") > HOST_VERSION else mcore_0_19
"""The module of this Megatron's range."""

TorchDistSaveShardedStrategy = torch_dist.TorchDistSaveShardedStrategy
TorchDistLoadShardedStrategy = torch_dist.TorchDistLoadShardedStrategy

CHECKPOINT_ERRORS: tuple[type[BaseException], ...] = (Exception, CheckpointException)
"""What a save or load of the host can raise: torch's CheckpointException is no Exception."""

__all__ = [
    "CHECKPOINT_ERRORS",
    "HOST_VERSION",
    "CheckpointException",
    "CheckpointingException",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "dist_checkpointing",
    "host_range",
    "is_main_replica",
    "load_torch_dist",
    "save_torch_dist",
    "sharded_leaves",
    "tolerates_missing",
]


def tolerates_missing(strict: Any) -> bool:
    """Whether a `strict=` of `dist_checkpointing.load` lets it go on where the checkpoint does not hold a key."""
    if strict is None:
        return False
    refusing = (
        StrictHandling.ASSUME_OK_UNEXPECTED,
        StrictHandling.RAISE_UNEXPECTED,
        StrictHandling.RAISE_ALL,
    )
    return parse_strict_flag(strict) not in refusing


def sharded_leaves(sharded_state_dict: Any) -> Iterator[Any]:
    """All values of a nested state dict."""
    return iter(nested_values(sharded_state_dict))


class _HostCopyPlanner(torch_dist.MCoreSavePlanner):
    """Megatron's save planner, with the copy from device to host in our hands, item by item."""

    def __init__(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._to_host = to_host

    def resolve_data(self, write_item: Any) -> Any:
        """The bytes or the host tensor of one item."""
        data = super().resolve_data(write_item)
        # Contiguous: what is transposed in memory would be stored with its strides.
        return self._to_host(data).contiguous() if isinstance(data, torch.Tensor) else data


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which writes the directory into `.metadata` as text, as Megatron's does, not as a Path."""

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return str(self.path)


def save_torch_dist(
    sharded_state_dict: Any,
    checkpoint_dir: Path,
    *,
    thread_count: int,
    keep_only_main_replica: bool,
    to_host: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Write Megatron's torch_dist format with torch's own writer. Collective.

    Megatron's writer calls torch.cuda whatever the tensors are; this one runs where there is no GPU. Files and names
    are the same.
    """
    by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica)
    with warnings.catch_warnings():
        # An older checkpoint in the directory is no surprise here: its commit marker is gone by now.
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=_Writer(checkpoint_dir, thread_count=thread_count),
            planner=_HostCopyPlanner(to_host),
        )


def load_torch_dist(sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
    """Read what `sharded_state_dict` names with Megatron's own load strategy. Collective before 0.19."""
    return host_range.load(TorchDistLoadShardedStrategy(), sharded_state_dict, checkpoint_dir)
