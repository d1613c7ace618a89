"""The backend protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import Problem
from ..sharding.layout import Region
from ..sharding.stored import StoredTensor


@runtime_checkable
class Backend(Protocol):
    """What writes and reads the bytes of a checkpoint.

    Leaves are ShardedTensors with plain tensors, and ShardedObjects. `write` and `load` are called on all ranks, each
    with its own leaves; the other three are local.
    """

    name: str
    """The name that `SaveOptions.backend` takes."""

    def write(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Write the main replicas of all leaves. Returns when every rank's bytes are on storage."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Read the region that each leaf names; the same structure, with tensors and objects for leaves."""

    def index(self, checkpoint_dir: Path) -> dict[str, StoredTensor]:
        """What tensors the checkpoint holds.

        Raises:
            IncompleteCheckpointError: the backend's own metadata is missing.
            StorageError: it cannot be read.
        """

    def read(self, checkpoint_dir: Path, regions: Sequence[Region]) -> list[torch.Tensor]:
        """Read regions of stored tensors into host memory, in the order of `regions`.

        Raises:
            StorageError: a region cannot be read.
        """

    def damage(self, checkpoint_dir: Path) -> list[Problem]:
        """Files that are missing, or shorter than what the metadata says they hold."""
