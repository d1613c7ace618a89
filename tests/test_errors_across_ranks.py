"""One rank's error becomes every rank's, with the rank named, and the ranks stay usable."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron_fp8_dist import FP8SaveShardedStrategy, load, save
from megatron_fp8_dist.backends.torch_files import DirectReader
from megatron_fp8_dist.compat.host import HOST_VERSION
from megatron_fp8_dist.errors import FP8CheckpointError
from megatron_fp8_dist.te import tensors
from tests import damage, toy_model
from tests.rankpool import ROOT, RankPool

LAYOUT = toy_model.Layout(tp=4)
CULPRIT = 2
"""The rank that fails alone."""
SCALES = "decoder.layers.qkv.weight.rowwise_scale_inv"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank saw."""

    kinds: tuple[str, ...]
    """Names of the error's class and its bases."""
    text: str
    problems: tuple[Any, ...]
    wrong_after: list[str]
    """Wrong parameters after a save and a load that followed in the same process group."""


def culprit() -> bool:
    return dist.get_rank() == CULPRIT


def toy(*, blank: bool = False) -> toy_model.Toy:
    return toy_model.Toy("block_scaled", LAYOUT.place(dist.get_rank()), blank=blank)


def two_schemes(directory: Path) -> None:
    """The culprit's weights have another element format."""
    entries = toy().sharded_state_dict()
    if culprit():
        weight = toy_model.QUANTIZED[0]
        codes = weight.part(weight.codes(0), LAYOUT.place(CULPRIT))
        parameter = toy_model.quantized("block_scaled", codes, 1.0, "E5M2")
        entries["layers.0.qkv"] = toy_model.entry(parameter, weight, LAYOUT.place(CULPRIT), 0)
    save(entries, directory)


def high_precision_replica(directory: Path) -> None:
    """The culprit holds a shard in high precision that the others hold quantized."""
    model = toy_model.Toy("block_scaled", LAYOUT.place(dist.get_rank()), high_precision=(0,) if culprit() else ())
    save(model.sharded_state_dict(), directory)


def loose_tensor(directory: Path) -> None:
    """The culprit has a quantized tensor outside of any entry."""
    entries: dict[str, Any] = toy().sharded_state_dict()
    if culprit():
        entries["loose"] = toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    save(entries, directory)


def dequantizing_factory(directory: Path) -> None:
    """The culprit's factory loses the codes when Megatron builds it."""
    entries = toy().sharded_state_dict()
    if culprit():
        built = entries["layers.0.fc1"].build_fn
        entries["layers.0.fc1"] = replace(
            entries["layers.0.fc1"], build_fn=lambda key, t, *rest: built(key, t * 1, *rest)
        )
    save(entries, directory)


def duplicate_main_replicas(directory: Path, strategy: FP8SaveShardedStrategy | None = None) -> None:
    """Every rank says that it holds the main replica; Megatron notices on rank 0 alone."""
    entries = toy().sharded_state_dict()
    for layer in range(toy_model.NUM_LAYERS):
        entries[f"layers.{layer}.norm"].replica_id = 0
    save(entries, directory, strategy)


def second_save_of_a_strategy(directory: Path) -> None:
    """The same, with the strategy of an earlier save that came to its end."""
    strategy = FP8SaveShardedStrategy()
    save(toy().sharded_state_dict(), directory, strategy)
    duplicate_main_replicas(directory, strategy)


def duplicate_readers(directory: Path) -> None:
    """The same in a load."""
    save(toy().sharded_state_dict(), directory)
    entries = toy(blank=True).sharded_state_dict()
    for layer in range(toy_model.NUM_LAYERS):
        entries[f"layers.{layer}.norm"].replica_id = 0
    load(entries, directory)


def unexpected_key(directory: Path) -> None:
    """Only the culprit asks for a key that is not there, and Megatron refuses that before it calls the strategy."""
    save(toy().sharded_state_dict(), directory)
    entries = toy(blank=True).sharded_state_dict()
    if culprit():
        entries["extra"] = ShardedTensor.from_rank_offsets("student.extra", torch.zeros(2))
    load(entries, directory, strict="raise_unexpected")


def missing_key(directory: Path) -> None:
    """The same with the default strictness, where the strategy itself finds out."""
    save(toy().sharded_state_dict(), directory)
    entries = toy(blank=True).sharded_state_dict()
    if culprit():
        entries["extra"] = ShardedTensor.from_rank_offsets("student.extra", torch.zeros(2))
    load(entries, directory)


def marker_stays(directory: Path) -> None:
    """Rank 0 cannot remove an older checkpoint's commit marker."""
    save(toy().sharded_state_dict(), directory)
    with mock.patch.object(Path, "unlink", failing):
        save(toy().sharded_state_dict(), directory)


def manifest_unreadable(directory: Path) -> None:
    save(toy().sharded_state_dict(), directory)
    with mock.patch("megatron_fp8_dist.strategies.expansion.find_manifest", failing):
        load(toy(blank=True).sharded_state_dict(), directory)


def writer_fails(directory: Path) -> None:
    with mock.patch.object(FileSystemWriter, "write_data", failing if culprit() else FileSystemWriter.write_data):
        save(toy().sharded_state_dict(), directory)


def manifest_fails(directory: Path) -> None:
    with mock.patch("megatron_fp8_dist.strategies.save.write_manifest", failing):
        save(toy().sharded_state_dict(), directory)


def factory_fails(directory: Path) -> None:
    """The culprit's own factory, of a tensor that is not quantized, fails when it builds."""

    def build(key: str, t: torch.Tensor, replica_id: Any, _: Any) -> ShardedTensor:
        if culprit():
            failing()
        return ShardedTensor.from_rank_offsets(key, t, replica_id=replica_id)

    own = ShardedTensorFactory("student.own", torch.ones(2), build, lambda loaded: loaded, dist.get_rank())
    save(toy().sharded_state_dict() | {"own": own}, directory)


def common_state_hook_fails(directory: Path) -> None:
    """The culprit's hook for common state fails; Megatron would leave the others in a broadcast."""
    hook: Callable[..., Any] = failing if culprit() else same
    save(toy().sharded_state_dict(), directory, preprocess_common_before_consistancy_check=hook)


def common_state_does_not_pickle(directory: Path) -> None:
    """Rank 0 has a value that cannot be pickled."""
    entries: dict[str, Any] = toy().sharded_state_dict()
    if dist.get_rank() == 0:
        entries["own"] = lambda: None
    save(entries, directory)


def commit_fails(directory: Path, **how: Any) -> None:
    """Rank 0 cannot write metadata.json, while the others wait for it in a barrier."""
    write = serialization.save_config
    with mock.patch.object(serialization, "save_config", failing if dist.get_rank() == 0 else write):
        save(toy().sharded_state_dict(), directory, **how)


def commit_with_hashes_fails(directory: Path) -> None:
    """The same where the others have two barriers before them, the second one for hashes of all files."""
    commit_fails(directory, verify_integrity=True)


def hashes_fail(directory: Path) -> None:
    """Rank 0 cannot write the hashes of all files."""
    write = serialization.save_integrity_manifest
    with mock.patch.object(serialization, "save_integrity_manifest", failing if dist.get_rank() == 0 else write):
        save(toy().sharded_state_dict(), directory, verify_integrity=True)


def same(value: Any) -> Any:
    return value


def other_shape(directory: Path) -> None:
    """The culprit's model wants another shape."""
    save(toy().sharded_state_dict(), directory)
    entries = toy(blank=True).sharded_state_dict()
    if culprit():
        weight = toy_model.Weight("qkv", (48, 16), 0)
        place = LAYOUT.place(CULPRIT)
        parameter = toy_model.quantized("block_scaled", weight.part(weight.codes(0), place), 1.0)
        entries["layers.0.qkv"] = toy_model.entry(parameter, weight, place, 0)
    load(entries, directory)


def bad_scale(directory: Path) -> None:
    """Only the culprit reads the fragment whose scale is NaN."""
    save(toy().sharded_state_dict(), directory)
    if dist.get_rank() == 0:
        damage.rewrite(directory, SCALES, lambda t: torch.full_like(t, math.nan), at=(0, CULPRIT, 0))
    dist.barrier()
    load(toy(blank=True).sharded_state_dict(), directory)


def reader_fails(directory: Path, part: str) -> None:
    """The culprit's disk fails when it reads the tensors whose key ends in `part`; planning has read the scales."""
    save(toy().sharded_state_dict(), directory)

    def failing_at(read: Any) -> Any:
        def read_data(self: FileSystemReader, plan: Any, planner: Any) -> Any:
            if any(item.storage_index.fqn.endswith(part) for item in plan.items):
                failing()
            return read(self, plan, planner)

        return read_data

    with ExitStack() as stack:
        for reader in (FileSystemReader, DirectReader) if culprit() else ():
            stack.enter_context(mock.patch.object(reader, "read_data", failing_at(reader.read_data)))
        load(toy(blank=True).sharded_state_dict(), directory)


def restore_fails(directory: Path) -> None:
    """The culprit fails at its third parameter."""
    save(toy().sharded_state_dict(), directory)
    calls = []

    def restore(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            failing()
        original(*args)

    original = tensors.restore
    with mock.patch.object(tensors, "restore", restore if culprit() else original):
        load(toy(blank=True).sharded_state_dict(), directory)


def failing(*_: object) -> None:
    raise OSError(5, "the disk is gone")


def codes_unreadable(directory: Path) -> None:
    reader_fails(directory, ".rowwise_data")


def plain_unreadable(directory: Path) -> None:
    reader_fails(directory, "norm.weight")


@dataclass(frozen=True, slots=True)
class Case:
    """One way to fail, and what every rank must see."""

    run: Callable[[Path], None]
    kind: str
    """A class of the error."""
    text: str
    ranks: tuple[int, ...]
    """The ranks that it names."""
    restored: bool = False
    """Whether other ranks had restored their parameters by then."""


CASES = [
    Case(two_schemes, "PlanningError", "per_tensor/E5M2", (0, CULPRIT)),
    Case(high_precision_replica, "PlanningError", f"high precision on rank {CULPRIT}", (CULPRIT,)),
    Case(loose_tensor, "PlanningError", "outside of any sharded entry", (CULPRIT,)),
    Case(dequantizing_factory, "PlanningError", "from the entry's factory", (CULPRIT,)),
    Case(duplicate_main_replicas, "CheckpointingException", "Invalid access pattern", (0,)),
    Case(second_save_of_a_strategy, "CheckpointingException", "Invalid access pattern", (0,)),
    Case(duplicate_readers, "CheckpointingException", "Invalid access pattern", (0,)),
    Case(unexpected_key, "CheckpointingException", "student.extra", (CULPRIT,)),
    Case(missing_key, "FP8CheckpointError", "student.extra", (CULPRIT,)),
    Case(marker_stays, "StorageError", "the disk is gone", (0,)),
    Case(manifest_unreadable, "StorageError", "the disk is gone", (0,)),
    Case(writer_fails, "StorageError", "the disk is gone", (CULPRIT,)),
    Case(manifest_fails, "StorageError", "the disk is gone", (0,)),
    Case(factory_fails, "StorageError", "the disk is gone", (CULPRIT,)),
    Case(common_state_hook_fails, "StorageError", "the disk is gone", (CULPRIT,)),
    Case(common_state_does_not_pickle, "StorageError", "pickle", (0,)),
    Case(commit_fails, "StorageError", "the disk is gone", (0,)),
    Case(other_shape, "PlanningError", "[4, 48, 16]", (CULPRIT,)),
    Case(bad_scale, "PlanningError", f"{SCALES}[0, {CULPRIT}, 0]: found scale nan", (CULPRIT,)),
    Case(plain_unreadable, "StorageError", "the disk is gone", (CULPRIT,)),
    Case(codes_unreadable, "StorageError", "the disk is gone", (CULPRIT,), restored=True),
    Case(restore_fails, "StorageError", "the disk is gone", (CULPRIT,), restored=True),
]
if HOST_VERSION.release >= (0, 19):
    CASES += [Case(run, "StorageError", "the disk is gone", (0,)) for run in (commit_with_hashes_fails, hashes_fail)]


def fail_then_work(directory: str, name: str) -> Outcome:
    """In a rank: run a case, then save and load in the same process group."""
    folders = [Path(directory) / part for part in ("bad", "good")]
    try:
        globals()[name](folders[0])
    except FP8CheckpointError as e:
        error = e
    else:
        raise AssertionError("no error")
    save(toy().sharded_state_dict(), folders[1])
    model = toy(blank=True)
    load(model.sharded_state_dict(), folders[1])
    kinds = tuple(cls.__name__ for cls in type(error).__mro__)
    return Outcome(kinds, str(error), error.problems, model.wrong())


@pytest.mark.parametrize("case", CASES, ids=[case.run.__name__ for case in CASES])
def test_every_rank_gets_the_error(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    for part in ("bad", "good"):
        (tmp_path / part).mkdir()
    outcomes = ranks.run(f"{__name__}:fail_then_work", str(tmp_path), case.run.__name__, timeout=60)
    assert len({(o.kinds, o.text) for o in outcomes}) == 1
    assert case.kind in outcomes[0].kinds
    assert case.text in outcomes[0].text
    problems = {p.key: p for p in outcomes[0].problems}
    restored = problems.pop("(restored before the error)", None)
    assert {p.ranks for p in problems.values()} == {case.ranks}
    assert (restored is not None) == case.restored
    if restored is not None:
        assert restored.found.split(", ") == sorted(f"decoder.layers.{w.name}.weight" for w in toy_model.QUANTIZED)
        assert "The model must not be used" in restored.remedy
    assert [o.wrong_after for o in outcomes] == [[]] * LAYOUT.size


def test_psutil_is_a_dependency() -> None:
    # Without it Megatron's writer fails on a worker and leaves the ranks in a collective.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "psutil" in project["dependencies"]
