"""Stock Megatron and the package together: stock calls with our strategies, our calls with stock strategies."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fp8_dist import (
    FP8LoadShardedStrategy,
    FP8SaveShardedStrategy,
    expand_quantized,
    last_report,
    load,
    read_manifest,
    save,
)
from megatron_fp8_dist.compat.host import HOST_VERSION
from megatron_fp8_dist.errors import IncompleteCheckpointError, PlanningError
from tests import damage, no_cuda, toy_model
from tests.rankpool import RankPool

KINDS = ["block_scaled", pytest.param("float8", marks=pytest.mark.te)]
ONE = toy_model.Layout()
PLACE = ONE.place(0)
EVERY_LAYER = range(toy_model.NUM_LAYERS)
QUANTIZED = {f"decoder.layers.{w.name}.weight" for w in toy_model.QUANTIZED}
COMPONENTS = {f"{key}.{c}" for key in QUANTIZED for c in ("rowwise_data", "rowwise_scale_inv")}
NUM_QUANTIZED = len(toy_model.QUANTIZED) * toy_model.NUM_LAYERS


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def high_precision_model() -> toy_model.Toy:
    return toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_stock_save_uses_our_strategy(tmp_path: Path, kind: str) -> None:
    model = toy_model.Toy(kind, PLACE)
    strategy = FP8SaveShardedStrategy()
    dist_checkpointing.save(expand_quantized(model.sharded_state_dict(), model=model), str(tmp_path), strategy)

    assert set(read_manifest(tmp_path).tensors) == QUANTIZED
    stored = set(dist_checkpointing.load_tensors_metadata(str(tmp_path)))
    assert stored == COMPONENTS | {"decoder.layers.norm.weight"}
    assert strategy.report is not None
    assert strategy.report.tensors == NUM_QUANTIZED
    assert strategy.report is last_report()


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_stock_save_without_expansion_is_refused_before_a_tensor_is_written(tmp_path: Path, kind: str) -> None:
    state_dict = toy_model.Toy(kind, PLACE).sharded_state_dict()
    with pytest.raises(PlanningError, match=r"was not expanded.*expand_quantized") as caught:
        dist_checkpointing.save(state_dict, str(tmp_path), FP8SaveShardedStrategy())
    assert {p.key for p in caught.value.problems} == QUANTIZED
    assert names(tmp_path) <= {"common.pt"}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.parametrize("lost", ["dropped", "detached"])
def test_a_parameter_that_no_entry_carries_is_named(tmp_path: Path, direction: str, lost: str) -> None:
    model = toy_model.Toy("block_scaled", PLACE)
    save(model.sharded_state_dict(), tmp_path)
    entries = model.sharded_state_dict()
    if lost == "dropped":
        del entries["layers.2.fc1"]
    else:
        entries["layers.2.fc1"].data = entries["layers.2.fc1"].data.detach()
    checkpoint_dir = tmp_path if direction == "load" else None
    with pytest.raises(PlanningError, match="keep_vars=True") as caught:
        expand_quantized(entries, model=model, checkpoint_dir=checkpoint_dir)
    assert [p.key for p in caught.value.problems] == ["layers.2.fc1"]
    with pytest.raises(PlanningError) as caught:
        expand_quantized(entries, model=[high_precision_model(), model], checkpoint_dir=checkpoint_dir)
    assert [p.key for p in caught.value.problems] == ["chunk 1: layers.2.fc1"]


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_stock_load_into_a_high_precision_model_fails(tmp_path: Path, strict: str) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    model = high_precision_model()
    with pytest.raises((CheckpointException, CheckpointingException), match=r"decoder\.layers\.\w+\.weight"):
        dist_checkpointing.load(model.sharded_state_dict(), str(tmp_path), strict=strict)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("strict", ["log_unexpected", "log_all", "ignore_all", "return_unexpected", "return_all"])
def test_lenient_stock_load_returns_none_of_the_weights(tmp_path: Path, strict: str) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    model = high_precision_model()
    # Megatron cannot leave out the key of a factory: it fails when it merges.
    entries = {k: v for k, v in model.sharded_state_dict().items() if not isinstance(v, ShardedTensorFactory)}
    result = dist_checkpointing.load(entries, str(tmp_path), strict=strict)
    loaded = result[0] if isinstance(result, tuple) else result
    assert {k for k in loaded if k.startswith("layers.")} == {f"layers.{i}.norm" for i in EVERY_LAYER}
    untouched = dict(high_precision_model().named_parameters())
    for name, parameter in model.named_parameters():
        if not name.endswith("norm"):
            assert toy_model.raw(parameter) == toy_model.raw(untouched[name])


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_our_load_into_a_high_precision_model_dequantizes(tmp_path: Path, kind: str) -> None:
    save(toy_model.Toy(kind, PLACE).sharded_state_dict(), tmp_path)
    model = high_precision_model()
    model.load_state_dict(load(model.sharded_state_dict(), tmp_path))
    for layer in EVERY_LAYER:
        for weight in toy_model.QUANTIZED:
            codes = weight.codes(layer).view(torch.float8_e4m3fn)
            right = (codes.float() * torch.tensor(weight.scale_inv(layer))).bfloat16()
            assert toy_model.raw(model.parameter(weight, layer)) == toy_model.raw(right)
    assert_report(dequantized=NUM_QUANTIZED)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_our_load_of_a_stock_checkpoint_returns_high_precision(tmp_path: Path, kind: str) -> None:
    saved = toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER)
    with no_cuda.stand_ins():
        dist_checkpointing.save(saved.sharded_state_dict(), str(tmp_path))
    model = toy_model.Toy(kind, PLACE, blank=True)
    before = {name: toy_model.content(p) for name, p in model.named_parameters() if not name.endswith("norm")}
    loaded = load(model.sharded_state_dict(), tmp_path)
    assert {n: toy_model.raw(loaded[n]) for n, _ in saved.named_parameters()} == {
        n: toy_model.raw(p) for n, p in saved.named_parameters()
    }
    after = {name: toy_model.content(p) for name, p in model.named_parameters() if name in before}
    assert after == before
    assert_report(quantized=NUM_QUANTIZED)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("strict", ["log_unexpected", "return_unexpected", "return_all", "ignore_all"])
def test_our_lenient_load_leaves_out_what_the_checkpoint_does_not_hold(tmp_path: Path, strict: str) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    model = toy_model.Toy("block_scaled", PLACE, blank=True)
    extra = toy_model.quantized("block_scaled", torch.zeros(4, 4, dtype=torch.uint8), 1.0)
    before = toy_model.content(extra)
    entries = model.sharded_state_dict() | {"extra": ShardedTensor.from_rank_offsets("student.weight", extra)}
    result = load(entries, tmp_path, strict=strict)
    loaded, missing, unexpected = result if isinstance(result, tuple) else (result, set(), set())
    assert "extra" not in loaded
    assert toy_model.content(extra) == before
    assert missing == set()
    assert unexpected == ({"student.weight"} if strict.startswith("return") else set())
    model.load_state_dict(loaded)
    assert model.wrong() == []


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode(tmp_path: Path, kind: str) -> None:
    saved, loaded = toy_model.Toy(kind, PLACE), toy_model.Toy(kind, PLACE, blank=True)
    with torch.inference_mode():
        save(saved.sharded_state_dict(), tmp_path)
        load(loaded.sharded_state_dict(), tmp_path)
    assert loaded.wrong() == []


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_made_in_inference_mode(tmp_path: Path, kind: str) -> None:
    with torch.inference_mode():
        saved, loaded = toy_model.Toy(kind, PLACE), toy_model.Toy(kind, PLACE, blank=True)
        save(saved.sharded_state_dict(), tmp_path)
        loaded.load_state_dict(load(loaded.sharded_state_dict(), tmp_path))
    assert loaded.wrong() == []


@pytest.mark.usefixtures("single")
def test_the_wrappers_of_the_caller_stay_as_they_are(tmp_path: Path) -> None:
    writer, reader = TorchDistSaveShardedStrategy("torch_dist", 1), TorchDistLoadShardedStrategy()
    saving = FullyParallelSaveStrategyWrapper(writer)
    loading = FullyParallelLoadStrategyWrapper(reader, exchange_algo="gather_object")
    for _ in range(2):
        save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path, saving)
        with no_cuda.stand_ins():
            load(toy_model.Toy("block_scaled", PLACE, blank=True).sharded_state_dict(), tmp_path, loading)
        assert (saving.base_strategy, loading.base_strategy) == (writer, reader)


NO_STRATEGIES: dict[str, Callable[[], Any]] = {
    "backend and version": lambda: ("zarr", 1),
    "name": lambda: "torch_dist",
    "object": object,
    "number": lambda: 3,
}
NO_SAVE_STRATEGIES = NO_STRATEGIES | {"load": TorchDistLoadShardedStrategy, "our load": FP8LoadShardedStrategy}
NO_LOAD_STRATEGIES = NO_STRATEGIES | {
    "save": lambda: TorchDistSaveShardedStrategy("torch_dist", 1),
    "our save": FP8SaveShardedStrategy,
}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("make", NO_SAVE_STRATEGIES.values(), ids=NO_SAVE_STRATEGIES.keys())
def test_what_is_no_save_strategy(tmp_path: Path, make: Callable[[], Any]) -> None:
    given = make()
    with pytest.raises(TypeError, match=r"(?i)strategy"):
        save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path, given)
    with pytest.raises(TypeError, match=r"(?i)strategy"):
        FP8SaveShardedStrategy(inner=given)
    assert names(tmp_path) == set()


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("make", NO_LOAD_STRATEGIES.values(), ids=NO_LOAD_STRATEGIES.keys())
def test_what_is_no_load_strategy(tmp_path: Path, make: Callable[[], Any]) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    given, model = make(), toy_model.Toy("block_scaled", PLACE, blank=True)
    before = {name: toy_model.content(p) for name, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"(?i)strategy"):
        load(model.sharded_state_dict(), tmp_path, given)
    assert {name: toy_model.content(p) for name, p in model.named_parameters()} == before


@pytest.mark.usefixtures("single")
def test_an_expansion_goes_with_its_directory_and_direction(tmp_path: Path) -> None:
    planned, other, empty = (tmp_path / name for name in ("planned", "other", "empty"))
    for directory in (planned, other, empty):
        directory.mkdir()
    for directory in (planned, other):
        save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), directory)
    model = toy_model.Toy("block_scaled", PLACE, blank=True)
    before = {name: toy_model.content(p) for name, p in model.named_parameters()}

    def for_a_load() -> Any:
        return expand_quantized(model.sharded_state_dict(), checkpoint_dir=planned)

    with pytest.raises(PlanningError, match=rf"_data: found an expansion for {planned}, expected one for {other}"):
        dist_checkpointing.load(for_a_load(), str(other), FP8LoadShardedStrategy())
    with pytest.raises(PlanningError, match="rowwise_data: found an expansion for a save"):
        dist_checkpointing.load(expand_quantized(model.sharded_state_dict()), str(planned), FP8LoadShardedStrategy())
    with pytest.raises(PlanningError, match="rowwise_data: found an expansion for a load"):
        dist_checkpointing.save(for_a_load(), str(empty), FP8SaveShardedStrategy())
    assert names(empty) <= {"common.pt"}
    assert {name: toy_model.content(p) for name, p in model.named_parameters()} == before


@pytest.mark.usefixtures("single")
def test_a_directory_has_more_than_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    model = toy_model.Toy("block_scaled", PLACE, blank=True)
    monkeypatch.chdir(tmp_path.parent)
    expanded = expand_quantized(model.sharded_state_dict(), checkpoint_dir=tmp_path.name)
    model.load_state_dict(dist_checkpointing.load(expanded, str(tmp_path), FP8LoadShardedStrategy()))
    assert model.wrong() == []


@pytest.mark.usefixtures("single")
def test_a_stock_save_that_is_refused_leaves_no_mixed_checkpoint(tmp_path: Path) -> None:
    entries = toy_model.Toy("block_scaled", PLACE).sharded_state_dict()
    save(entries | {"iteration": 1}, tmp_path)
    with pytest.raises(PlanningError):
        dist_checkpointing.save(entries | {"iteration": 2}, str(tmp_path), FP8SaveShardedStrategy())
    try:
        loaded = load(toy_model.Toy("block_scaled", PLACE, blank=True).sharded_state_dict(), tmp_path)
    except IncompleteCheckpointError:
        return
    assert loaded["iteration"] == 1


@pytest.mark.usefixtures("single")
def test_what_is_expanded_is_left_alone(tmp_path: Path) -> None:
    saved = expand_quantized(toy_model.Toy("block_scaled", PLACE).sharded_state_dict())
    save(expand_quantized(saved), tmp_path)
    model = toy_model.Toy("block_scaled", PLACE, blank=True)
    model.load_state_dict(load(expand_quantized(model.sharded_state_dict(), checkpoint_dir=tmp_path), tmp_path))
    assert model.wrong() == []


@pytest.mark.usefixtures("single")
def test_metadata_views(tmp_path: Path) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    stored = COMPONENTS | {"decoder.layers.norm.weight"}
    listed = dist_checkpointing.load_tensors_metadata(str(tmp_path), FP8LoadShardedStrategy())
    assert set(listed) == stored | QUANTIZED
    logical = listed["decoder.layers.qkv.weight"]
    assert (logical.global_shape, logical.dtype) == ((toy_model.NUM_LAYERS, 24, 16), torch.bfloat16)
    exactly = FP8LoadShardedStrategy().load_sharded_metadata(str(tmp_path))
    assert {entry.key for entry in exactly.values()} - {"common_state"} == stored


def assert_report(**counts: int) -> None:
    """The newest report has these counts and no others."""
    report = last_report()
    assert report is not None
    kinds = {k: report.to_dict()[k] for k in ("exact", "requantized", "dequantized", "quantized")}
    assert kinds == dict.fromkeys(kinds, 0) | counts


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("direction", ["save", "load"])
def test_the_state_dict_of_the_caller_is_not_changed(tmp_path: Path, direction: str) -> None:
    model = toy_model.Toy("block_scaled", PLACE)
    save(model.sharded_state_dict(), tmp_path)
    entries = model.sharded_state_dict()
    before = dict(entries)
    (save if direction == "save" else load)(entries, tmp_path)
    assert entries == before
    for name, parameter in model.named_parameters():
        assert entries[name].data is parameter


def load_with(
    directory: str, kind: str, layout: toy_model.Layout, how: str, strict: str
) -> tuple[list[str], set[str], set[str], dict[str, Any]]:
    """In a rank: (wrong parameters, missing keys, unexpected keys, report) of one load."""
    model = toy_model.Toy(kind, layout.place(dist.get_rank()), blank=True)
    entries = model.sharded_state_dict()
    if how == "ours":
        result = load(entries, directory, strict=strict)
    else:
        strategy: Any = TorchDistLoadShardedStrategy()
        if how.startswith("fully parallel"):
            strategy = FullyParallelLoadStrategyWrapper(strategy, exchange_algo="gather_object")
        if how.endswith("inside ours"):
            strategy = FP8LoadShardedStrategy(inner=strategy)
        expanded = expand_quantized(entries, checkpoint_dir=directory)
        with no_cuda.stand_ins():
            result = dist_checkpointing.load(expanded, directory, strategy, strict=strict)
    loaded, missing, unexpected = result if isinstance(result, tuple) else (result, set(), set())
    model.load_state_dict(loaded)
    report = last_report()
    assert report is not None
    return model.wrong(), missing, unexpected, report.to_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["ours", "stock", "fully parallel", "fully parallel inside ours"])
def test_every_load_strategy_gives_the_same_bytes(ranks: RankPool, tmp_path: Path, kind: str, how: str) -> None:
    two = toy_model.Layout(tp=2)
    ranks.run(f"{__name__}:save_toy", str(tmp_path), kind, two, "ours", n=two.size)
    replicas = toy_model.Layout(dp=2)
    for strict in ("raise_all", "return_all"):
        results = ranks.run(f"{__name__}:load_with", str(tmp_path), kind, replicas, how, strict, n=replicas.size)
        for wrong, missing, unexpected, report in results:
            assert wrong == []
            assert (missing, unexpected) == (set(), set())
            assert report["exact"] == NUM_QUANTIZED * replicas.dp


def save_toy(directory: str, kind: str, layout: toy_model.Layout, how: str) -> None:
    """In a rank: save the toy."""
    entries = toy_model.Toy(kind, layout.place(dist.get_rank())).sharded_state_dict()
    stock = TorchDistSaveShardedStrategy("torch_dist", 1)
    if how == "ours":
        save(entries, directory)
    elif how == "fully parallel inside ours":
        save(entries, directory, FullyParallelSaveStrategyWrapper(stock))
    else:
        outer = FullyParallelSaveStrategyWrapper(FP8SaveShardedStrategy())
        dist_checkpointing.save(expand_quantized(entries), directory, outer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["fully parallel inside ours", "fully parallel around ours"])
def test_fully_parallel_save(ranks: RankPool, tmp_path: Path, kind: str, how: str) -> None:
    replicas = toy_model.Layout(dp=2)
    ranks.run(f"{__name__}:save_toy", str(tmp_path), kind, replicas, how, n=replicas.size)
    # Without the wrapper, all of them would lie in the files of rank 0.
    written = {item.file.name.split("_")[2] for item in damage.items(tmp_path) if item.key in COMPONENTS}
    assert written == {"0", "1"}
    assert read_manifest(tmp_path).layers == NUM_QUANTIZED
    results = ranks.run(f"{__name__}:load_with", str(tmp_path), kind, replicas, "ours", "raise_all", n=2)
    assert [wrong for wrong, *_ in results] == [[], []]


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_async_save_writes_data_then_manifest_then_commits(tmp_path: Path, kind: str, wrapped: bool) -> None:
    model = toy_model.Toy(kind, PLACE)
    inner = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1)) if wrapped else None
    # 0.19 would take nvidia-resiliency-ext, which needs a GPU.
    choice: dict[str, Any] = {"async_strategy": "mcore"} if HOST_VERSION.release >= (0, 19) else {}
    seen: list[set[str]] = []

    def recorded(fn: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            fn()
            seen.append(names(tmp_path) & {".metadata", "fp8_manifest.json", "metadata.json"})

        return run

    with no_cuda.stand_ins():
        request = save(model.sharded_state_dict(), tmp_path, inner, async_sharded_save=True, **choice)
        request.finalize_fns[:] = [recorded(fn) for fn in request.finalize_fns]
        assert not names(tmp_path) & {".metadata", "fp8_manifest.json", "metadata.json"}
        request.execute_sync()

    data = {".metadata"}
    assert seen == [data, data | {"fp8_manifest.json"}, data | {"fp8_manifest.json", "metadata.json"}]
    loaded = toy_model.Toy(kind, PLACE, blank=True)
    loaded.load_state_dict(load(loaded.sharded_state_dict(), tmp_path))
    assert loaded.wrong() == []


def without_cuda(directory: str, kind: str) -> list[str]:
    """In a rank: save and load while every function of torch.cuda raises. The wrong parameters.

    Only is_available() answers, as it does without a GPU: torch's own writer asks it.
    """

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.cuda was called")

    functions = [n for n in dir(torch.cuda) if isinstance(getattr(torch.cuda, n), types.FunctionType)]
    replaced: dict[str, Any] = dict.fromkeys(functions, refuse) | {"is_available": lambda: False}
    layout = toy_model.Layout(tp=2)
    with mock.patch.multiple(torch.cuda, **replaced):
        try:
            torch.cuda.current_device()
        except AssertionError:
            save_toy(directory, kind, layout, "ours")
            wrong, *_ = load_with(directory, kind, layout, "ours", "return_all")
            return wrong
    raise AssertionError("torch.cuda was not replaced")


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_call_nothing_of_cuda(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(f"{__name__}:without_cuda", str(tmp_path), kind, n=2) == [[], []]
