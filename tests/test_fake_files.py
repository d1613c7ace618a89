"""Fake ranks through files: all of them in one state dict of one process, with the public calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import megatron_fp8_dist
from megatron_fp8_dist.backends.torch_dist import TorchDistBackend
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from megatron_fp8_dist.report import LoadReport, SaveReport
from megatron_fp8_dist.sharding.load_task import Outcome
from tests.elementwise import elements_of
from tests.fakemodel import E4M3, E5M2, Layout, Model, make_model
from tests.fakeranks import Rank, build, check, padded, uneven, whole_of
from tests.shards import random_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fp8_dist.sharding.layout import Region

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")


def together(ranks: Sequence[Rank]) -> dict[str, Any]:
    """All ranks' entries in one state dict of one process.

    Megatron does not take a plain tensor twice under one key from one process, so replicas of those are left out.
    """
    return {
        f"{number}.{name}": value
        for number, rank in enumerate(ranks)
        for name, value in rank.state_dict.items()
        if rank.place.tp == 0 or not name.startswith("norm")
    }


def spread_over(ranks: Sequence[Rank], loaded: dict[str, torch.Tensor]) -> None:
    """Give every rank what was loaded for it; replicas of plain tensors get the first rank's."""
    for number, rank in enumerate(ranks):
        twin = next(n for n, r in enumerate(ranks) if r.place.pp == rank.place.pp)
        rank.loaded = {n: loaded.get(f"{number}.{n}", loaded.get(f"{twin}.{n}")) for n in rank.state_dict}  # type: ignore[misc]


# Megatron 0.16 builds these where one process holds several shards of a key.
torch_sharded_tensors = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

FILES: dict[str, tuple[Model, Layout, Layout]] = {
    "merge": (make_model(E4M3, E4M3), Layout(2, 2), Layout(1, 2)),
    "split": (make_model(E4M3, E4M3, stacked=False), Layout(2), Layout(4)),
    "unequal": (make_model(E4M3, E4M3, shards=4, finite=True), Layout(4), Layout(2)),
    "mixed": (make_model(None, E4M3, E4M3, None), Layout(2, 2), Layout(1, 4)),
    "two schemes": (make_model(E5M2, E4M3), Layout(1, 2), Layout(2)),
    "experts": (make_model(E4M3, E4M3, experts=4), Layout(1, 1, 4), Layout(2, 1, 2)),
    "replicas": (make_model(E4M3, stacked=False), Layout(1), Layout(2)),
}


@torch_sharded_tensors
@pytest.mark.parametrize(("model", "source", "target"), FILES.values(), ids=FILES.keys())
@pytest.mark.usefixtures("single")
def test_through_files(model: Model, source: Layout, target: Layout, tmp_path: Path) -> None:
    megatron_fp8_dist.save(together(build(model, source)), tmp_path)
    report = megatron_fp8_dist.last_report()
    assert isinstance(report, SaveReport)
    quantized = [w for w in model.weights if w.cut != "norm"]
    layers = [i for w in quantized for i in np.ndindex(*w.stack) if w.schemes[i[0]] is not None]
    assert report.tensors == len(layers)
    ranks = build(model, target, empty=True)
    loaded = megatron_fp8_dist.load(together(ranks), tmp_path)
    spread_over(ranks, loaded)
    report = megatron_fp8_dist.last_report()
    assert isinstance(report, LoadReport)
    unequal = len(report.requantized_blocks) > 0
    count = sum(isinstance(t, BlockScaledTensor) for rank in ranks for t in rank.tensors.values())
    assert (report.exact, report.requantized) == ((0, count) if unequal else (count, 0))
    for rank in ranks:
        kind = Outcome("requantized", 1) if unequal else Outcome("exact")
        rank.outcomes = {n: kind for n, t in rank.tensors.items() if isinstance(t, BlockScaledTensor)}
    check(model, ranks)


@pytest.mark.usefixtures("single")
def test_uneven_fragments_through_files(tmp_path: Path) -> None:
    parts = [random_shard((s, 8), i, 0.5) for i, s in enumerate((5, 3, 8))]
    entries = {str(i): uneven("w", p, o, 16) for i, (p, o) in enumerate(zip(parts, (0, 5, 8), strict=True))}
    megatron_fp8_dist.save(entries, tmp_path)
    shards = [random_shard((s, 8), 9, 9.0) for s in (10, 6)]
    wanted = {str(i): uneven("w", t, o, 16) for i, (t, o) in enumerate(zip(shards, (0, 10), strict=True))}
    megatron_fp8_dist.load(wanted, tmp_path, options=LoadOptions(strict_bitwise=True))
    whole = whole_of(parts)
    np.testing.assert_array_equal(np.concatenate([elements_of(s).codes for s in shards]), whole.codes)
    np.testing.assert_array_equal(np.concatenate([elements_of(s).scale for s in shards]), whole.scale)


@pytest.mark.usefixtures("single")
def test_rows_outside_through_files(tmp_path: Path) -> None:
    source = padded((6, 6), 0, 0.5)
    megatron_fp8_dist.save({str(i): r.state_dict["w"] for i, r in enumerate(source)}, tmp_path)
    ranks = padded((4, 4, 4, 4), 50, 9.0)
    megatron_fp8_dist.load({str(i): r.state_dict["w"] for i, r in enumerate(ranks)}, tmp_path)
    found = whole_of([r.tensors["w"] for r in ranks])
    expected = whole_of([r.tensors["w"] for r in source])
    np.testing.assert_array_equal(found.codes[:12], expected.codes)
    np.testing.assert_array_equal(found.codes[12:], 0)
    assert (found.scale[12:] == np.float32(1).view(np.uint32)).all()


@pytest.mark.usefixtures("single")
def test_strict_bitwise_through_files_reads_no_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(E4M3, E4M3, shards=2, finite=True)
    megatron_fp8_dist.save(together(build(model, Layout(2))), tmp_path)
    ranks = build(model, Layout(1), empty=True)
    read: list[str] = []
    stock = TorchDistBackend.read

    def note(backend: TorchDistBackend, directory: Path, regions: Sequence[Region]) -> list[torch.Tensor]:
        read.extend(region.key for region in regions)
        return stock(backend, directory, regions)

    monkeypatch.setattr(TorchDistBackend, "read", note)
    with pytest.raises(PlanningError, match=r"layers\.swiglu\.weight"):
        megatron_fp8_dist.load(together(ranks), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert read
    assert all(key.endswith("scale_inv") for key in read)
