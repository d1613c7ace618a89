"""Megatron's torch_dist format: torch.distributed.checkpoint files, written and read without a GPU."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..compat import host
from ..errors import IncompleteCheckpointError, Problem, StorageError
from ..sharding.layout import Box, Region
from ..sharding.stored import StoredTensor
from ..transfer import to_host
from .torch_files import DirectReader

_METADATA = ".metadata"
_REMEDY = f"{_METADATA} is damaged: restore it, or use another save."

T = TypeVar("T")


class TorchDistBackend:
    """The torch_dist member of the backend protocol."""

    name = "torch_dist"

    def __init__(self, thread_count: int = 1, keep_only_main_replica: bool = True) -> None:
        """Settings of a write, as Megatron's save strategy has them. An object reads a checkpoint's metadata once.

        Args:
            thread_count: files per rank.
            keep_only_main_replica: leave out replicas by their replica_id.
        """
        self.thread_count = thread_count
        self.keep_only_main_replica = keep_only_main_replica
        self._reader: DirectReader | None = None

    def write(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """See `Backend.write`. The files are synced before `.metadata` is put in place."""
        self._reader = None
        try:
            host.save_torch_dist(
                sharded_state_dict,
                checkpoint_dir,
                thread_count=self.thread_count,
                keep_only_main_replica=self.keep_only_main_replica,
                to_host=to_host,
            )
        except host.CheckpointException as e:
            raise StorageError(
                "writing the checkpoint failed", _failures(e, checkpoint_dir, "a write that succeeds")
            ) from e

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """See `Backend.load`. Megatron's own load strategy reads."""
        try:
            return host.load_torch_dist(sharded_state_dict, checkpoint_dir)
        except host.CheckpointException as e:
            raise StorageError(
                "reading the checkpoint failed", _failures(e, checkpoint_dir, "a read that succeeds")
            ) from e

    def index(self, checkpoint_dir: Path) -> dict[str, StoredTensor]:
        """See `Backend.index`."""
        return self._from_metadata(checkpoint_dir, _index)

    def read(self, checkpoint_dir: Path, regions: Sequence[Region]) -> list[torch.Tensor]:
        """See `Backend.read`. Of a small stored chunk all is read, whatever part of it is wanted."""
        if not regions:
            return []
        planner = _RegionPlanner(regions)
        try:
            with warnings.catch_warnings():
                # Reading alone is meant: every rank reads what it needs.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({}, storage_reader=self._reader_of(checkpoint_dir), planner=planner, no_dist=True)
        except host.CheckpointException as e:
            # Without collectives DCP knows one rank, and calls it 0: the caller knows better.
            own = [p for cause, _ in e.failures.values() if isinstance(cause, StorageError) for p in cause.problems]
            problems = own or [p.at(()) for p in _failures(e, checkpoint_dir, "readable regions")]
            raise StorageError("reading failed", problems) from e
        except StorageError:
            raise
        except Exception as e:  # a damaged file can raise anything
            problem = Problem(str(checkpoint_dir), f"{type(e).__name__}: {e}", "readable regions")
            raise StorageError("reading failed", [problem]) from e
        return planner.tensors

    def _reader_of(self, checkpoint_dir: Path) -> DirectReader:
        if self._reader is None or self._reader.directory != checkpoint_dir:
            self._reader = DirectReader(checkpoint_dir)
        return self._reader

    def _from_metadata(self, checkpoint_dir: Path, read: Callable[[Metadata], T]) -> T:
        if not (checkpoint_dir / _METADATA).is_file():
            problem = Problem(str(checkpoint_dir), f"no {_METADATA}", "the metadata file of a torch_dist checkpoint")
            raise IncompleteCheckpointError("the checkpoint is not complete", [problem])
        try:
            return read(self._reader_of(checkpoint_dir).read_metadata())
        except Exception as e:  # a damaged pickle can raise anything, and hold anything
            problem = Problem(_METADATA, f"{type(e).__name__}: {e}", "readable metadata")
            raise StorageError("the checkpoint's metadata cannot be read", [problem]) from e

    def damage(self, checkpoint_dir: Path) -> list[Problem]:
        """See `Backend.damage`."""
        ends, problems = self._from_metadata(checkpoint_dir, lambda m: (_ends(m), [*_misplaced(m), *_overlapping(m)]))
        for name, end in ends.items():
            path = checkpoint_dir / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < end:
                found = "no such file" if size is None else f"{size} bytes"
                problems.append(
                    Problem(
                        name, found, f"a file of at least {end} bytes", "Files were lost or cut short: restore them."
                    )
                )
        return problems


def _index(metadata: Metadata) -> dict[str, StoredTensor]:
    return {
        key: StoredTensor(
            dtype=entry.properties.dtype,
            shape=tuple(entry.size),
            chunks=tuple(Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks),
        )
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _ends(metadata: Metadata) -> dict[str, int]:
    """File -> how long it must be."""
    ends: dict[str, int] = defaultdict(int)
    for item in (metadata.storage_data or {}).values():
        ends[item.relative_path] = max(ends[item.relative_path], item.offset + item.length)
    return dict(sorted(ends.items()))


def _misplaced(metadata: Metadata) -> Iterator[Problem]:
    """Chunks of tensors that have no place in a file, or one that is too small."""
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = (metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
            least = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if place is None:
                yield Problem(f"{key}{list(chunk.offsets)}", "no place in any file", "one for every chunk", _REMEDY)
            elif not place.transform_descriptors and (place.offset < 0 or place.length < least):
                found = f"{place.length} bytes at {place.offset} of {place.relative_path}"
                yield Problem(f"{key}{list(chunk.offsets)}", found, f"at least {least} bytes", _REMEDY)


def _overlapping(metadata: Metadata) -> Iterator[Problem]:
    """Things that share bytes of a file with the one before them."""
    places = sorted((metadata.storage_data or {}).items(), key=lambda p: (p[1].relative_path, p[1].offset))
    for (_, before), (index, place) in pairwise(places):
        end = before.offset + before.length
        if before.relative_path == place.relative_path and end > place.offset:
            found = f"byte {place.offset} of {place.relative_path}, inside of another one's"
            yield Problem(f"{index.fqn}{list(index.offset or ())}", found, f"byte {end} or a later one", _REMEDY)


def _failures(error: Any, checkpoint_dir: Path, expected: str) -> list[Problem]:
    return [
        Problem(str(checkpoint_dir), f"{type(cause).__name__}: {cause}", expected).at([rank])
        for rank, (cause, _) in error.failures.items()
    ]


class _RegionPlanner(LoadPlanner):
    """Reads regions of stored tensors into tensors of its own."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = regions
        self.tensors: list[torch.Tensor] = []
        self._by_key: dict[str, list[int]] = defaultdict(list)
        for i, region in enumerate(regions):
            self._by_key[region.key].append(i)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Allocate the tensors."""
        assert metadata is not None
        self.metadata = metadata
        for region in self.regions:
            stored = metadata.state_dict_metadata.get(region.key)
            if not isinstance(stored, TensorStorageMetadata):
                raise StorageError("reading failed", [Problem(region.key, "nothing", "a stored tensor")])
            ends = tuple(o + s for o, s in zip(region.box.offset, region.box.shape, strict=True))
            if any(e > s for e, s in zip(ends, stored.size, strict=True)):
                problem = Problem(
                    region.key, f"a stored tensor of {tuple(stored.size)}", f"one that holds {region.box}"
                )
                raise StorageError("reading failed", [problem])
            self.tensors.append(torch.empty(region.box.shape, dtype=stored.properties.dtype))

    def create_local_plan(self) -> LoadPlan:
        """One read per region and stored chunk that it meets."""
        items: list[ReadItem] = []
        for key, numbers in self._by_key.items():
            boxes = [self.regions[n].box for n in numbers]
            chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]
            found = create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], chunks)  # type: ignore[arg-type]
            if sum(math.prod(i.lengths) for i in found) != sum(b.size for b in boxes):
                raise StorageError("reading failed", [Problem(key, "regions without data", "chunks that cover them")])
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks plan alone."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to do."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: only tensors are planned."""
        raise AssertionError(f"{read_item} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a tensor that one read fills."""
        index = read_item.dest_index.index
        assert index is not None
        tensor = self.tensors[self._by_key[read_item.dest_index.fqn][index]]
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor was filled in place."""
