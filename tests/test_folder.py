"""What lies in a checkpoint folder: plain tensors that anyone can read, and no more files than stock."""

from __future__ import annotations

import io
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject

from megatron_fp8_dist import FP8CheckpointError, last_report, load, read_manifest, save
from tests import damage, no_cuda, toy_model

pytestmark = pytest.mark.usefixtures("single")

KINDS = ["block_scaled", pytest.param("float8", marks=pytest.mark.te)]
PLACE = toy_model.Layout().place(0)
EVERY_LAYER = range(toy_model.NUM_LAYERS)
FOREIGN = ("transformer_engine", "megatron_fp8_dist")

READ_EVERYTHING = """
import io, pickle, sys
for name in ("transformer_engine", "transformer_engine_torch", "megatron_fp8_dist", "megatron"):
    sys.modules[name] = None
import torch
folder = sys.argv[1]
metadata = pickle.load(open(f"{folder}/.metadata", "rb"))
for index, info in metadata.storage_data.items():
    with open(f"{folder}/{info.relative_path}", "rb") as f:
        f.seek(info.offset)
        value = torch.load(io.BytesIO(f.read(info.length)), weights_only=True)
    if type(value) is torch.Tensor:
        print(index.fqn, value.dtype)
"""


def save_with_object(kind: str, directory: Path) -> None:
    """The toy beside an object and common state."""
    entries = toy_model.Toy(kind, PLACE).sharded_state_dict()
    extra = {"extra": ShardedObject("decoder.extra", {"step": torch.ones(2)}, (1,), (0,)), "iteration": 7}
    save(entries | extra, directory)


def pickles(blob: bytes) -> Iterator[bytes]:
    """The pickle stream of `.metadata`, or those in what torch.save wrote."""
    if not zipfile.is_zipfile(io.BytesIO(blob)):
        yield blob
        return
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        yield from (archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))


def texts(stream: bytes) -> list[str]:
    """Every string in a pickle stream, the names of its classes among them."""
    return [argument for _, argument, _ in pickletools.genops(stream) if isinstance(argument, str)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pickle_names_the_package_or_transformer_engine(tmp_path: Path, kind: str) -> None:
    save_with_object(kind, tmp_path)
    blobs = [(item.key, item.read()) for item in damage.items(tmp_path)]
    others = {".metadata", "common.pt"}
    blobs += [(path.name, path.read_bytes()) for path in tmp_path.iterdir() if path.name in others]
    found = [(name, [t for stream in pickles(blob) for t in texts(stream)]) for name, blob in blobs]
    assert "torch.distributed.checkpoint.metadata" in dict(found)[".metadata"]
    assert all(strings for _, strings in found)
    assert [(name, t) for name, strings in found for t in strings if any(f in t for f in FOREIGN)] == []


def test_a_pickled_tensor_of_the_package_would_be_noticed() -> None:
    buffer = io.BytesIO()
    torch.save({"x": toy_model.scheme()}, buffer)
    found = [t for stream in pickles(buffer.getvalue()) for t in texts(stream)]
    assert any(f in t for f in FOREIGN for t in found)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_readable_with_torch_alone(tmp_path: Path, kind: str) -> None:
    save_with_object(kind, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ_EVERYTHING, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    read = dict(line.split() for line in done.stdout.splitlines())
    keys = [f"decoder.layers.{w.name}.weight" for w in toy_model.QUANTIZED]
    right = {f"{k}.rowwise_data": "torch.uint8" for k in keys} | {
        f"{k}.rowwise_scale_inv": "torch.float32" for k in keys
    }
    assert read == right | {"decoder.layers.norm.weight": "torch.bfloat16"}


def test_no_more_files_than_stock(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    ours.mkdir()
    stock.mkdir()
    save_with_object("block_scaled", ours)
    entries = toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER).sharded_state_dict()
    with no_cuda.stand_ins():
        dist_checkpointing.save(entries, str(stock))
    # Stock may spread its data over more files.
    assert set(damage.snapshot(ours)) <= set(damage.snapshot(stock)) | {damage.MANIFEST}
    marker = "metadata.json"
    assert (ours / marker).read_bytes() == (stock / marker).read_bytes()


def test_nothing_quantized_is_a_stock_checkpoint(tmp_path: Path) -> None:
    saved = toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER)
    save(saved.sharded_state_dict(), tmp_path)
    assert not (tmp_path / damage.MANIFEST).exists()
    with pytest.raises(FP8CheckpointError, match="holds no quantized tensors"):
        read_manifest(tmp_path)
    right = {name: toy_model.raw(p) for name, p in saved.named_parameters()}
    for by in (dist_checkpointing.load, load):
        model = toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)
        model.load_state_dict(by(model.sharded_state_dict(), str(tmp_path)))
        assert {name: toy_model.raw(p) for name, p in model.named_parameters()} == right
    report = last_report()
    assert report is not None
    assert [report.to_dict()[k] for k in ("exact", "requantized", "dequantized", "quantized", "codes")] == [0] * 5
