"""Checkpoint folders in torch's own terms: to look at what lies in them, and to damage them, past the package."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

MANIFEST = "fp8_manifest.json"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a checkpoint stores: a chunk of a tensor, or an object."""

    key: str
    file: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Its bytes: what torch.save wrote."""
        return self.file.read_bytes()[self.offset : self.offset + self.length]


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def metadata(directory: Path) -> Metadata:
    """What `.metadata` says."""
    found = pickle.loads((directory / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def put_metadata(directory: Path, changed: Metadata) -> None:
    """Write `.metadata`."""
    (directory / ".metadata").write_bytes(pickle.dumps(changed))


def items(directory: Path) -> Iterator[Item]:
    """Everything that is stored."""
    for index, info in metadata(directory).storage_data.items():
        yield Item(index.fqn, directory / info.relative_path, info.offset, info.length)


def stored_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Key -> what `.metadata` says of that tensor."""
    found = metadata(directory).state_dict_metadata
    return {key: entry for key, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def rewrite(
    directory: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor], at: tuple[int, ...] | None = None
) -> None:
    """Replace the data of a stored tensor, or of its chunk `at` an offset; the new data lies behind the old."""
    changed = metadata(directory)
    for index, info in changed.storage_data.items():
        if index.fqn != key or (at is not None and tuple(index.offset or ()) != at):
            continue
        item = Item(key, directory / info.relative_path, info.offset, info.length)
        buffer = io.BytesIO()
        torch.save(change(torch.load(io.BytesIO(item.read()), weights_only=True)), buffer)
        end = item.file.stat().st_size
        with item.file.open("ab") as f:
            f.write(buffer.getvalue())
        changed.storage_data[index] = replace(info, offset=end, length=len(buffer.getvalue()))
    put_metadata(directory, changed)


def drop(directory: Path, key: str) -> None:
    """Lose a stored tensor."""
    changed = metadata(directory)
    del changed.state_dict_metadata[key]
    changed.storage_data = {i: s for i, s in changed.storage_data.items() if i.fqn != key}
    put_metadata(directory, changed)


def replace_places(
    directory: Path, key: str, change: Callable[[Any], Any | None], at: tuple[int, ...] | None = None
) -> None:
    """Let `.metadata` say another place of a stored tensor, or of its chunk `at` an offset; None loses it."""
    changed = metadata(directory)
    for index, info in list(changed.storage_data.items()):
        if index.fqn == key and at in (None, tuple(index.offset or ())):
            del changed.storage_data[index]
            new = change(info)
            if new is not None:
                changed.storage_data[index] = new
    put_metadata(directory, changed)


def exchange_places(directory: Path, key: str, *at: tuple[int, ...]) -> None:
    """Let `.metadata` say of two chunks of a stored tensor that each lies where the other one does."""
    changed = metadata(directory)
    a, b = (i for i in changed.storage_data if i.fqn == key and tuple(i.offset) in at)
    places = changed.storage_data
    places[a], places[b] = places[b], places[a]
    put_metadata(directory, changed)


def flip(data: bytes, bit: int) -> bytes:
    """The data with one bit flipped."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def declare(
    directory: Path, key: str, *, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None
) -> None:
    """Let `.metadata` say another dtype or shape of a stored tensor, or say that there is one."""
    changed = metadata(directory)
    old = changed.state_dict_metadata.get(key) or next(iter(stored_tensors(directory).values()))
    assert isinstance(old, TensorStorageMetadata)
    properties = TensorProperties(dtype=dtype or old.properties.dtype)
    changed.state_dict_metadata[key] = replace(old, properties=properties, size=torch.Size(shape or old.size))
    put_metadata(directory, changed)


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's document in place."""
    path = directory / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def cut(path: Path, keep: float) -> None:
    """Truncate a file to a part of its length."""
    path.write_bytes(path.read_bytes()[: math.floor(path.stat().st_size * keep)])


def data_file(directory: Path) -> Path:
    """A file with stored data."""
    return next(directory.glob("*.distcp"))
