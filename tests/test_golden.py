"""Golden checkpoints: written once per format version, read by every later version, byte for byte.

A change here that needs a new golden checkpoint is a change of the format: see "Versions" in docs/format.md.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, last_report, load, read_manifest
from megatron_fp8_dist.options import BACKENDS
from megatron_fp8_dist.quantized.scheme import SCHEMES
from megatron_fp8_dist.report import LoadReport
from megatron_fp8_dist.sharding.manifest import VERSION
from scripts import golden
from tests import damage, goldens
from tests.elementwise import component_bytes, raw

pytest_plugins = ["tests.pure"]
pytestmark = [
    pytest.mark.usefixtures("single", "one_thread"),
    # Megatron 0.16 builds these where one process holds several shards of a key.
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
]

FOLDERS = sorted(goldens.GOLDEN.glob("v*/*/*"))
each_golden = pytest.mark.parametrize("folder", FOLDERS, ids=["-".join(f.parts[-3:]) for f in FOLDERS])

Chunks: TypeAlias = dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...], bytes]]
"""(key, offset) -> dtype, shape and bytes of a stored tensor."""


def test_there_is_one_for_each_version_backend_and_scheme() -> None:
    found = {folder.relative_to(goldens.GOLDEN).parts for folder in FOLDERS}
    assert found == {(f"v{v}", b, s) for v in range(1, VERSION + 1) for b in BACKENDS for s in SCHEMES}
    # Among them both element formats of eight bits, and flags other than the default.
    schemes = {e.scheme for folder in FOLDERS for e in read_manifest(folder).tensors.values()}
    assert schemes == {*goldens.FIRST.values(), *goldens.OTHER.values()}


@each_golden
@pytest.mark.parametrize("layout", goldens.LAYOUTS)
def test_it_is_read(folder: Path, layout: str) -> None:
    before = damage.snapshot(folder)
    pieces = list(goldens.pieces(folder.name, layout, empty=True))
    entries = {piece.name: piece.entry for piece in pieces}
    assert all(component_bytes(p.entry.data) != component_bytes(p.right) for p in pieces)
    loaded = load({"model": entries}, folder, options=LoadOptions(strict_bitwise=True))
    quantized = [p for p in pieces if isinstance(p.right, BlockScaledTensor)]
    for piece in pieces:
        assert component_bytes(loaded["model"][piece.name]) == component_bytes(piece.right), piece.name
    for piece in quantized:
        assert component_bytes(piece.entry.data) == component_bytes(piece.right), piece.name
    assert {key: loaded[key] for key in goldens.COMMON} == goldens.COMMON
    report = last_report()
    assert isinstance(report, LoadReport)
    assert report.exact == len(quantized)
    assert damage.snapshot(folder) == before


def stored(directory: Path) -> Chunks:
    """Every tensor of a checkpoint, as torch alone reads it."""
    found: Chunks = {}
    for index, place in damage.metadata(directory).storage_data.items():
        if index.offset is None:
            continue
        item = damage.Item(index.fqn, directory / place.relative_path, place.offset, place.length)
        data = torch.load(io.BytesIO(item.read()), weights_only=True)
        found[index.fqn, tuple(index.offset)] = data.dtype, tuple(data.shape), raw(data).tobytes()
    return found


def document(directory: Path) -> dict[str, Any]:
    """The manifest, but for the versions of its writer."""
    found: dict[str, Any] = json.loads((directory / damage.MANIFEST).read_text())
    assert set(found.pop("writer")) == {"megatron-core", "megatron-fp8-dist", "torch", "transformer-engine"}
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_written_today_is_the_same(name: str, tmp_path: Path) -> None:
    goldens.write(name, tmp_path)
    assert document(tmp_path) == document(goldens.folder(name))
    today, then = stored(tmp_path), stored(goldens.folder(name))
    assert today.keys() == then.keys()
    assert [k for k in today if today[k] != then[k]] == []
    assert {p.name for p in tmp_path.glob("*.distcp")} == {"__0_0.distcp", "__0_1.distcp"}


def test_an_altered_byte_would_be_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "altered"
    shutil.copytree(goldens.folder("mxfp8"), directory)
    damage.rewrite(directory, f"{goldens.OUTPUT}.columnwise_data", lambda codes: codes ^ 1, at=(32, 0))
    then = stored(goldens.folder("mxfp8"))
    changed = [key for key, chunk in stored(directory).items() if chunk != then[key]]
    assert changed == [(f"{goldens.OUTPUT}.columnwise_data", (32, 0))]


def test_the_script_does_not_write_over_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goldens, "GOLDEN", tmp_path)
    written = golden.write("mxfp8_2d", replace=False)
    assert document(written) == document(goldens.folder("mxfp8_2d"))
    (written / "metadata.json").unlink()
    before = damage.snapshot(written)
    with pytest.raises(FileExistsError, match="mxfp8_2d exists: pass --replace to lose it"):
        golden.write("mxfp8_2d", replace=False)
    assert damage.snapshot(written) == before
    golden.write("mxfp8_2d", replace=True)
    assert (written / "metadata.json").exists()


def test_they_are_small() -> None:
    assert sum(len(blob) for folder in FOLDERS for blob in damage.snapshot(folder).values()) < 1_000_000
