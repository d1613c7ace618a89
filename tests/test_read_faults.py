"""A reader that fails at each item in turn: parameters are wholly old or wholly new, and the new ones are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_fp8_dist import FP8LoadShardedStrategy, Scheme, exact_ops, load, save
from megatron_fp8_dist.backends import torch_dist, torch_files
from megatron_fp8_dist.errors import StorageError
from megatron_fp8_dist.strategies import prefetch
from tests import te_cpu
from tests.parameters import KINDS, SCHEMES, contents, parameter
from tests.te_cpu import Kind

pytestmark = pytest.mark.usefixtures("single")

RESTORED = "(restored before the error)"
ROWS, COLUMNS = 64, 96


@pytest.fixture(autouse=True)
def _current_device() -> Iterator[None]:
    """The stand-in that NVFP4's quantizer needs whenever it is copied."""
    with te_cpu.current_device_stand_in():
        yield


@dataclass(frozen=True, slots=True)
class Case:
    """Parameters of one seed."""

    quantized: dict[str, Any]
    """By the keys of their entries."""
    entries: dict[str, Any]


def whole(key: str, tensor: torch.Tensor, *offsets: tuple[int, int, int]) -> Any:
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets)


def saved(of: Scheme | Kind) -> dict[str, Any]:
    """Entries of a save; `merged` lies in two fragments, which two ranks might have quantized."""
    halves = [parameter(of, 10 + i, (ROWS, COLUMNS)) for i in range(2)]
    case = wanted(of, seed=1)
    del case.entries["merged"]
    return case.entries | {f"merged.{i}": whole("merged", half, (0, i, 2)) for i, half in enumerate(halves)}


def wanted(of: Scheme | Kind, seed: int) -> Case:
    """One parameter of each way into a checkpoint."""
    plain, swiglu, merged, cut = (
        parameter(of, seed + i, (rows, COLUMNS)) for i, rows in enumerate((ROWS, ROWS, 2 * ROWS, ROWS))
    )
    norm = nn.Parameter(torch.full((COLUMNS,), float(seed), dtype=torch.bfloat16))
    with exact_ops():
        above, below = torch.split(cut, [ROWS // 4, ROWS - ROWS // 4])
    return Case(
        {"plain": plain, "swiglu": swiglu, "merged": merged, "above, below": cut},
        {
            "plain": whole("plain", plain),
            "swiglu": apply_swiglu_sharded_factory(whole("swiglu", swiglu), ()),
            "merged": whole("merged", merged),
            "above": whole("above", above),
            "below": whole("below", below),
            "norm": whole("norm", norm),
        },
    )


def bytes_of(case: Case) -> dict[str, Any]:
    return {key: contents(p) for key, p in case.quantized.items()}


@contextmanager
def reader_that_fails_at(number: int) -> Iterator[list[int]]:
    """The read of one item fails, whoever reads it. Gives the number of items that were read."""
    read = [0]

    def failing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def resolve_tensor(planner: Any, item: Any) -> Any:
            if read[0] == number:
                raise OSError(5, "the disk is gone")
            read[0] += 1
            return stock(planner, item)

        return resolve_tensor

    with pytest.MonkeyPatch.context() as patch:
        for planner in (torch_dist._RegionPlanner, DefaultLoadPlanner):
            patch.setattr(planner, "resolve_tensor", failing(planner.resolve_tensor))
        yield read


def restored(error: StorageError) -> set[str]:
    """The keys that an error names as restored."""
    named = [p for p in error.problems if p.key == RESTORED]
    assert all("The model must not be used" in p.remedy for p in named)
    return {key for p in named for key in p.found.split(", ")}


WEIGHTS = [
    *(pytest.param(scheme, id=scheme.name) for scheme in SCHEMES if scheme.name in ("per_tensor", "mxfp8", "nvfp4")),
    *(
        pytest.param(kind, id=f"te-{kind}", marks=pytest.mark.te)
        for kind in KINDS
        if kind.name in ("per_tensor", "blockwise_1d", "mxfp8")
    ),
]
MXFP8 = Scheme("mxfp8", "E4M3")


def read_until_nothing_fails(directory: Path, of: Scheme | Kind, strategy: FP8LoadShardedStrategy) -> set[int]:
    """Let a load fail at each item in turn. The numbers of parameters that were restored by then."""
    save(saved(of), directory)
    reference = wanted(of, seed=50)
    old = bytes_of(reference)
    load(reference.entries, directory)
    new = bytes_of(reference)
    assert all(old[key] != new[key] for key in old)
    numbers = set[int]()
    for number in count():
        case, error = wanted(of, seed=50), None
        with reader_that_fails_at(number) as read:
            try:
                load(case.entries, directory, strategy)
            except StorageError as e:
                error = e
        found = bytes_of(case)
        if error is None:
            assert found == new
            assert read == [number]
            return numbers
        assert "the disk is gone" in str(error)
        assert [key for key in found if found[key] not in (old[key], new[key])] == []
        done = [key for key in found if found[key] != old[key]]
        assert restored(error) == {part for key in done for part in key.split(", ")}
        numbers.add(len(done))
    raise AssertionError("never here")


@pytest.mark.parametrize("of", WEIGHTS)
def test_one_parameter_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Scheme | Kind) -> None:
    monkeypatch.setattr(prefetch, "LEAST_WINDOW", 0)
    # At each number of restored parameters, all but the last, some read fails.
    assert read_until_nothing_fails(tmp_path, of, FP8LoadShardedStrategy()) == set(range(4))


def test_straight_out_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LEAST_WINDOW", 0)
    monkeypatch.setattr(torch_files, "DIRECT_BYTES", 1)
    assert read_until_nothing_fails(tmp_path, MXFP8, FP8LoadShardedStrategy()) == set(range(4))


def test_all_parameters_in_one_window(tmp_path: Path) -> None:
    assert read_until_nothing_fails(tmp_path, MXFP8, FP8LoadShardedStrategy()) == {0}


def test_a_strategy_of_megatron_reads_everything_before_anything_is_restored(tmp_path: Path) -> None:
    strategy = FP8LoadShardedStrategy(inner=TorchDistLoadShardedStrategy())
    assert read_until_nothing_fails(tmp_path, MXFP8, strategy) == {0}
