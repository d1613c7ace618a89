"""A backend that keeps everything in this process: for tests, where fake ranks write and read one after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..compat.host import ShardedObject, is_main_replica, sharded_leaves
from ..errors import IncompleteCheckpointError, Problem, StorageError
from ..sharding.expand import global_box, walk
from ..sharding.layout import Box, Region
from ..sharding.stored import StoredTensor
from ..transfer import to_host


class MemoryBackend:
    """The in-memory member of the backend protocol. Checkpoints live as long as the object."""

    name = "memory"

    def __init__(self) -> None:
        """No checkpoints."""
        self.chunks: dict[Path, dict[str, list[tuple[Box, torch.Tensor]]]] = {}
        """Directory -> key -> (region, data)."""
        self.shapes: dict[Path, dict[str, tuple[int, ...]]] = defaultdict(dict)
        self.objects: dict[Path, dict[str, Any]] = defaultdict(dict)

    def write(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """See `Backend.write`. Fake ranks add to what the ranks before them wrote."""
        chunks = self.chunks.setdefault(checkpoint_dir, {})
        for leaf in sharded_leaves(sharded_state_dict):
            if not is_main_replica(leaf.replica_id):
                continue
            if isinstance(leaf, ShardedObject):
                self.objects[checkpoint_dir][leaf.unique_key] = leaf.data
                continue
            box = global_box(leaf)
            self.shapes[checkpoint_dir][leaf.key] = tuple(leaf.global_shape)
            chunks.setdefault(leaf.key, []).append((box, to_host(leaf.data).reshape(box.shape).clone()))

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """See `Backend.load`."""

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, ShardedObject):
                return self.objects[checkpoint_dir][leaf.unique_key]
            region = Region(leaf.key, global_box(leaf), tuple(leaf.global_shape))
            return self.read(checkpoint_dir, [region])[0].reshape(leaf.local_shape)

        return walk(sharded_state_dict, fill)

    def index(self, checkpoint_dir: Path) -> dict[str, StoredTensor]:
        """See `Backend.index`."""
        return {
            key: StoredTensor(parts[0][1].dtype, self.shapes[checkpoint_dir][key], tuple(box for box, _ in parts))
            for key, parts in self._checkpoint(checkpoint_dir).items()
        }

    def _checkpoint(self, checkpoint_dir: Path) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        if checkpoint_dir not in self.chunks:
            problem = Problem(str(checkpoint_dir), "nothing", "a checkpoint")
            raise IncompleteCheckpointError("there is no checkpoint", [problem])
        return self.chunks[checkpoint_dir]

    def read(self, checkpoint_dir: Path, regions: Sequence[Region]) -> list[torch.Tensor]:
        """See `Backend.read`."""
        return [self._read(checkpoint_dir, region) for region in regions]

    def _read(self, checkpoint_dir: Path, region: Region) -> torch.Tensor:
        parts = self._checkpoint(checkpoint_dir).get(region.key)
        if parts is None:
            raise StorageError(
                "reading from the checkpoint failed", [Problem(region.key, "nothing", "a stored tensor")]
            )
        out = torch.empty(region.box.shape, dtype=parts[0][1].dtype)
        missing = out.numel()
        for box, data in parts:
            common = box.intersect(region.box)
            if common is not None:
                out[_slices(common, region.box)] = data[_slices(common, box)]
                missing -= common.size
        if missing:
            problem = Problem(
                region.key, f"{missing} elements of {region.box} without data", "chunks that cover the region"
            )
            raise StorageError("reading from the checkpoint failed", [problem])
        return out

    def damage(self, checkpoint_dir: Path) -> list[Problem]:
        """See `Backend.damage`. There are no files."""
        return []


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(part.within(whole.offset), part.shape, strict=True))
