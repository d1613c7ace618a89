"""backends/torch_files.py: parts of stored tensors read straight from DCP's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from megatron_fp8_dist.backends import torch_files
from megatron_fp8_dist.backends.torch_dist import TorchDistBackend
from megatron_fp8_dist.errors import StorageError
from megatron_fp8_dist.sharding.layout import Box, Region
from tests.elementwise import raw

STORED = {
    "codes": torch.randint(0, 256, (3, 20, 14), generator=torch.Generator().manual_seed(1), dtype=torch.uint8),
    "scales": torch.rand(7, 9, generator=torch.Generator().manual_seed(2)),
    "bf16": torch.rand(5, 3, 2, 4, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "row": torch.arange(50, dtype=torch.float32),
    "offset": torch.arange(60, dtype=torch.int32).view(10, 6)[3:9],
    "transposed": torch.arange(77, dtype=torch.uint8).view(7, 11).t(),
}


class Left:
    """What was left to DCP's own reader."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        original = dcp.FileSystemReader.read_data

        def read_data(reader: Any, plan: LoadPlan, planner: LoadPlanner) -> Any:
            self.keys += [item.storage_index.fqn for item in plan.items]
            return original(reader, plan, planner)

        monkeypatch.setattr(dcp.FileSystemReader, "read_data", read_data)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save(dict(STORED), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Left:
    """Every chunk counts as large."""
    monkeypatch.setattr(torch_files, "DIRECT_BYTES", 1)
    return Left(monkeypatch)


@given(data=st.data(), key=st.sampled_from(sorted(STORED)))
def test_any_box_is_the_slice(data: st.DataObject, key: str, directory: Path) -> None:
    shape = tuple(STORED[key].shape)
    starts = tuple(data.draw(st.integers(0, s - 1)) for s in shape)
    lengths = tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, starts, strict=True))
    expected = STORED[key][tuple(slice(o, o + n) for o, n in zip(starts, lengths, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_files, "DIRECT_BYTES", 1)
        (found,) = TorchDistBackend().read(directory, [Region(key, Box(starts, lengths), shape)])
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(raw(found), raw(expected))


@pytest.mark.parametrize("key", sorted(STORED))
def test_what_lies_in_order_is_read_directly(key: str, directory: Path, direct: Left) -> None:
    shape = tuple(STORED[key].shape)
    (found,) = TorchDistBackend().read(directory, [Region(key, Box((0,) * len(shape), shape), shape)])
    np.testing.assert_array_equal(raw(found), raw(STORED[key]))
    assert direct.keys == (["transposed"] if key == "transposed" else [])


def test_small_chunks_are_read_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left(monkeypatch)
    monkeypatch.delattr(torch_files, "_read_box")
    (found,) = TorchDistBackend().read(directory, [Region("row", Box((10,), (30,)), (50,))])
    np.testing.assert_array_equal(raw(found), raw(STORED["row"][10:40]))
    assert left.keys == []


@pytest.mark.usefixtures("direct")
def test_a_file_that_is_too_short(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data if file.name == ".metadata" else data[: len(data) // 2])
    regions = [Region(k, Box((0,) * t.dim(), tuple(t.shape)), tuple(t.shape)) for k, t in STORED.items()]
    with pytest.raises(StorageError, match="reading failed"):
        TorchDistBackend().read(tmp_path, regions)
