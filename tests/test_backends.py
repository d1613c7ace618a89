"""The backends through the conformance suite, and what is particular to each."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fp8_dist.backends.memory import MemoryBackend
from megatron_fp8_dist.backends.torch_dist import TorchDistBackend
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import IncompleteCheckpointError, StorageError
from megatron_fp8_dist.sharding.layout import Region
from tests.backend_suite import QUARTERS, BackendSuite, Tensors, all_of, chunk, distinct, same_bytes, wanted, window

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_fp8_dist.backends.base import Backend

pytest_plugins = ["tests.pure"]


class TestMemory(BackendSuite):
    def make(self) -> Backend:
        return MemoryBackend()

    def stored(self, backend: Backend, directory: Path) -> Tensors:
        memory = cast(MemoryBackend, backend)
        found = {}
        for key, parts in memory.chunks[directory].items():
            found[key] = torch.empty(memory.shapes[directory][key], dtype=parts[0][1].dtype)
            for box, data in parts:
                found[key][window(box)] = data
        return found

    def test_fake_ranks_write_one_after_another(self, tmp_path: Path) -> None:
        backend, whole = MemoryBackend(), distinct((4, 2))
        for rank in range(2):
            backend.write({"w": ShardedTensor.from_rank_offsets("w", whole.chunk(2)[rank], (0, rank, 2))}, tmp_path)
        same_bytes(self.stored(backend, tmp_path)["w"], whole)

    def test_a_hole_is_an_error(self, tmp_path: Path) -> None:
        backend, whole = MemoryBackend(), distinct((4, 2))
        backend.write({"w": ShardedTensor.from_rank_offsets("w", whole[:2], (0, 0, 2))}, tmp_path)
        with pytest.raises(StorageError, match="w: found 4 elements"):
            backend.read(tmp_path, [Region("w", all_of(whole), (4, 2))])


# What torch's own reader warns of is not about the package; Megatron 0.16 builds torch's deprecated sharded tensors.
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.usefixtures("single")
class TestTorchDist(BackendSuite):
    def make(self) -> Backend:
        return TorchDistBackend()

    def stored(self, backend: Backend, directory: Path) -> Tensors:
        metadata = FileSystemReader(directory).read_metadata()
        found = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        for index, place in metadata.storage_data.items():
            if index.fqn in found:
                content = (directory / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
                data = torch.load(io.BytesIO(content), weights_only=True)
                offset = index.offset or torch.Size([0] * data.dim())
                found[index.fqn][tuple(slice(o, o + s) for o, s in zip(offset, data.shape, strict=True))] = data
        return found

    def test_files_are_those_of_torch(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        assert {p.name for p in tmp_path.iterdir()} == {".metadata", "__0_0.distcp"}

    def test_thread_count_is_files_per_rank(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        leaves = {n: chunk(n, whole, all_of(whole)) for n in "abcd"}
        TorchDistBackend(thread_count=2).write(leaves, tmp_path)
        assert len(list(tmp_path.glob("*.distcp"))) == 2

    def test_a_second_write_to_the_same_directory_is_seen(self, tmp_path: Path) -> None:
        backend, first, second = TorchDistBackend(), distinct((2, 2)), distinct((3, 2), start=50)
        for whole in (first, second):
            backend.write({"w": chunk("w", whole, all_of(whole))}, tmp_path)
            assert backend.index(tmp_path)["w"].shape == tuple(whole.shape)
            same_bytes(backend.read(tmp_path, [Region("w", all_of(whole), tuple(whole.shape))])[0], whole)

    def test_every_file_that_is_missing_or_short_is_damage(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        TorchDistBackend(thread_count=3).write({n: chunk(n, whole, all_of(whole)) for n in "abc"}, tmp_path)
        missing, short, good = sorted(tmp_path.glob("*.distcp"))
        missing.unlink()
        short.write_bytes(short.read_bytes()[:-1])
        problems = TorchDistBackend().damage(tmp_path)
        assert [p.key for p in problems] == [missing.name, short.name]
        assert problems[0].found == "no such file"
        assert problems[1].found == f"{short.stat().st_size} bytes"
        assert problems[1].expected == f"a file of at least {short.stat().st_size + 1} bytes"
        assert good.name not in str(problems)

    def test_a_longer_file_is_no_damage(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        with (tmp_path / "__0_0.distcp").open("ab") as file:
            file.write(b"more")
        assert backend.damage(tmp_path) == []

    @pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04]q\x00."], ids=["empty", "text", "a list"])
    def test_damaged_metadata_is_an_error_of_ours(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / ".metadata").write_bytes(content)
        for call in (TorchDistBackend().index, TorchDistBackend().damage):
            with pytest.raises(StorageError, match=r"\.metadata"):
                call(tmp_path)

    def test_a_truncated_metadata_file_is_an_error_of_ours(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        path = tmp_path / ".metadata"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(StorageError, match=r"\.metadata"):
            TorchDistBackend().index(tmp_path)

    def test_a_chunk_that_the_metadata_lacks_is_an_error(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        self.written(tmp_path, **{str(i): chunk("w", whole, box) for i, box in enumerate(QUARTERS)})
        metadata = FileSystemReader(tmp_path).read_metadata()
        entry = metadata.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.pop()
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(StorageError, match="w: found regions without data"):
            TorchDistBackend().read(tmp_path, [Region("w", all_of(whole), (8, 6))])

    def test_lost_metadata_is_an_incomplete_checkpoint(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        (tmp_path / ".metadata").unlink()
        with pytest.raises(IncompleteCheckpointError, match=r"no \.metadata"):
            TorchDistBackend().index(tmp_path)

    def test_a_lost_file_is_an_error_of_ours(self, tmp_path: Path) -> None:
        whole = distinct((8, 6))
        backend = self.written(tmp_path, w=chunk("w", whole, all_of(whole)))
        (tmp_path / "__0_0.distcp").unlink()
        calls = (
            lambda: backend.read(tmp_path, [Region("w", all_of(whole), (8, 6))]),
            lambda: backend.load({"w": wanted("w", whole, all_of(whole))}, tmp_path),
        )
        for call in calls:
            with pytest.raises(StorageError, match=r"FileNotFoundError: .*__0_0\.distcp") as caught:
                call()
            assert "Traceback" not in str(caught.value)
