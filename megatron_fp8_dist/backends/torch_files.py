"""Tensors out of the files that torch.distributed.checkpoint wrote, each compared with what the metadata says of it.

DCP casts and cuts what differs. It also reads the whole of a stored chunk, whatever part of it is wanted, and copies
that part out of it: of a large chunk the part alone is read here, into the memory that it is wanted in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from ..errors import Problem, StorageError

DIRECT_BYTES = 16 << 20
"""A stored chunk of at least so many bytes is read directly. To find its place in the file takes some milliseconds."""


class DirectReader(dcp.FileSystemReader):
    """DCP's reader with tensors read here. A checkpoint's metadata is read once."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self.directory = checkpoint_dir
        self._kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Fill the tensors of `planner`; what cannot be read here is left to DCP.

        Raises:
            StorageError: a stored tensor cannot be read, or is not what the metadata says.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        left = []
        for name, items in by_file.items():
            with (self.directory / name).open("rb") as file:
                left += [item for item in items if not self._read_item(file, item, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _read_item(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> bool:
        try:
            return self._read(file, item, planner)
        except StorageError:
            raise
        except Exception as e:  # a damaged file can raise anything
            problem = Problem(_name(item), f"{type(e).__name__}: {e}", f"a readable tensor in {Path(file.name).name}")
            raise StorageError("reading failed", [problem]) from e

    def _read(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> bool:
        stored = self.storage_data[item.storage_index]
        if stored.transform_descriptors:
            return False
        direct = stored.length >= DIRECT_BYTES
        # Under this mode torch.load reads no data, and notes where it lies in what it was given.
        with FakeTensorMode() if direct else nullcontext():
            whole = torch.load(self._slice_file(file, stored), map_location="cpu", weights_only=True)
        self._check(item, whole)
        target = planner.resolve_tensor(item).detach()
        if direct:
            start = getattr(whole.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not whole.is_contiguous():
                return False
            start += stored.offset + whole.storage_offset() * whole.itemsize
            _read_box(file, start, tuple(whole.shape), item.storage_offsets, target)
        else:
            box = (slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            target.copy_(whole[tuple(box)])
        planner.commit_tensor(item, target)
        return True

    def _check(self, item: ReadItem, whole: Any) -> None:
        """Refuse a tensor that the metadata does not describe: DCP would cut it, and cast it."""
        index = item.storage_index
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata), "only tensors are planned"
        assert index.index is not None
        expected = entry.properties.dtype, tuple(entry.chunks[index.index].sizes)
        if not isinstance(whole, torch.Tensor) or (whole.dtype, tuple(whole.shape)) != expected:
            plain = isinstance(whole, torch.Tensor)
            found = f"{whole.dtype} of shape {list(whole.shape)}" if plain else f"a {type(whole).__name__}"
            problem = Problem(_name(item), found, f"{expected[0]} of shape {list(expected[1])}")
            raise StorageError("reading failed", [problem])


def _name(item: ReadItem) -> str:
    """A stored tensor in an error."""
    return f"{item.storage_index.fqn}{list(item.storage_index.offset or ())}"


def _read_box(
    file: IO[bytes], start: int, shape: tuple[int, ...], offset: tuple[int, ...], target: torch.Tensor
) -> None:
    """Read the box of `target`'s shape at `offset` of a contiguous array of `shape` that begins at byte `start`."""
    lengths = tuple(target.shape)
    # All axes after the first one that is not whole are one run of bytes.
    axis = next((a for a in reversed(range(len(shape))) if lengths[a] != shape[a]), 0)
    if target.is_contiguous() and all(n == 1 for n in lengths[:axis]):
        inner = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
        file.seek(start + target.itemsize * sum(o * n for o, n in zip(offset, inner, strict=True)))
        data = target.reshape(-1).view(torch.uint8).numpy()
        if file.readinto(data) != data.nbytes:  # type: ignore[attr-defined]
            raise EOFError(f"{file.name} ends inside of a tensor")
        return
    mapped = np.memmap(file, np.uint8, "r", start, (*shape[:-1], shape[-1] * target.itemsize))
    box = tuple(slice(o, o + n) for o, n in zip(offset[:-1], lengths[:-1], strict=True))
    last = slice(offset[-1] * target.itemsize, (offset[-1] + lengths[-1]) * target.itemsize)
    np.copyto(target.view(torch.uint8).numpy(), mapped[(*box, last)])
