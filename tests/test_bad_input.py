"""Bad input: one error that names all problems, before anything is written to the model or to the folder."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fp8_dist import (
    BlockScaledTensor,
    FP8CheckpointError,
    FP8SaveShardedStrategy,
    expand_quantized,
    load,
    read_manifest,
    save,
)
from megatron_fp8_dist.compat.host import HOST_VERSION
from megatron_fp8_dist.errors import IncompleteCheckpointError, ManifestError, PlanningError, StorageError
from tests import damage, no_cuda, toy_model
from tests.damage import MANIFEST

pytestmark = [
    pytest.mark.usefixtures("single"),
    # Torch says so on every save over an older checkpoint, whoever saves.
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

PLACE = toy_model.Layout().place(0)
EVERY_LAYER = range(toy_model.NUM_LAYERS)
QKV = "decoder.layers.qkv.weight"
DATA, SCALE = f"{QKV}.rowwise_data", f"{QKV}.rowwise_scale_inv"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of the toy."""
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    return tmp_path


def blank() -> toy_model.Toy:
    return toy_model.Toy("block_scaled", PLACE, blank=True)


def bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: toy_model.content(parameter) for name, parameter in model.named_parameters()}


def assert_complete(error: FP8CheckpointError) -> None:
    """Each problem names its key, what was found and what was expected, and the text has them all."""
    assert error.problems
    for problem in error.problems:
        assert problem.key
        assert problem.found
        assert problem.expected
        assert f"{problem.key}: found {problem.found}, expected {problem.expected}" in str(error)


def refused_load(
    model: torch.nn.Module, entries: Any, directory: Path, kind: type[FP8CheckpointError] = FP8CheckpointError
) -> FP8CheckpointError:
    """The error of a load, by load() and by expand_quantized(), after which model and folder are as before."""
    before, files = bytes_of(model), damage.snapshot(directory)
    with pytest.raises(kind) as planned:
        expand_quantized(entries, checkpoint_dir=directory)
    with pytest.raises(kind) as caught:
        load(entries, directory)
    assert caught.value.problems == planned.value.problems
    assert bytes_of(model) == before
    assert damage.snapshot(directory) == files
    assert_complete(caught.value)
    return caught.value


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of damage."""

    name: str
    harm: Callable[[Path], object]
    kind: type[FP8CheckpointError]
    key: str
    """Key of the first problem."""
    text: str
    """Part of the message."""


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda d: damage.edit_manifest(d, change)


def _scale(value: float) -> Callable[[Path], None]:
    def spoil(scales: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scales, value)

    return lambda d: damage.rewrite(d, SCALE, spoil)


def _lose_chunk(key: str) -> Callable[[Path], None]:
    def lose(directory: Path) -> None:
        changed = damage.metadata(directory)
        stored = changed.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        del stored.chunks[2]
        damage.put_metadata(directory, changed)

    return lose


DAMAGED_FILES = [
    Case("no scale", lambda d: damage.drop(d, SCALE), ManifestError, SCALE, "component is missing"),
    Case("no codes", lambda d: damage.drop(d, DATA), ManifestError, DATA, "component is missing"),
    Case(
        "dtype of scales",
        lambda d: damage.declare(d, SCALE, dtype=torch.float64),
        ManifestError,
        SCALE,
        "found torch.float64 of shape [4, 1, 1], expected torch.float32 of shape [4, 1, 1]",
    ),
    Case(
        "dtype of codes",
        lambda d: damage.declare(d, DATA, dtype=torch.int8),
        ManifestError,
        DATA,
        "found torch.int8 of shape [4, 24, 16], expected torch.uint8 of shape [4, 24, 16]",
    ),
    Case(
        "shape of scales",
        lambda d: damage.declare(d, SCALE, shape=(4, 2, 1)),
        ManifestError,
        SCALE,
        "found torch.float32 of shape [4, 2, 1], expected torch.float32 of shape [4, 1, 1]",
    ),
    Case(
        "shape of codes",
        lambda d: damage.declare(d, DATA, shape=(4, 16, 24)),
        ManifestError,
        DATA,
        "found torch.uint8 of shape [4, 16, 24], expected torch.uint8 of shape [4, 24, 16]",
    ),
    Case("a plain tensor too", lambda d: damage.declare(d, QKV), ManifestError, QKV, "a plain tensor beside"),
    Case("NaN", _scale(math.nan), PlanningError, f"{SCALE}[0, 0, 0]", "scale nan"),
    Case("infinite", _scale(math.inf), PlanningError, f"{SCALE}[0, 0, 0]", "scale inf"),
    Case("negative", _scale(-0.5), PlanningError, f"{SCALE}[0, 0, 0]", "scale -0.5"),
    Case("no data file", lambda d: damage.data_file(d).unlink(), ManifestError, "__0_0.distcp", "no such file"),
    Case(
        "data file cut short",
        lambda d: damage.cut(damage.data_file(d), 0.5),
        ManifestError,
        "__0_0.distcp",
        "Files were lost or cut short",
    ),
    Case("no manifest", lambda d: (d / MANIFEST).unlink(), ManifestError, DATA, "no manifest knows it"),
    Case("manifest cut short", lambda d: damage.cut(d / MANIFEST, 0.5), ManifestError, MANIFEST, "no JSON"),
    Case("manifest empty", lambda d: damage.cut(d / MANIFEST, 0), ManifestError, MANIFEST, "no JSON"),
    Case("manifest binary", lambda d: (d / MANIFEST).write_bytes(b"\xff\0"), ManifestError, MANIFEST, "no UTF-8"),
    Case(
        "manifest newer",
        _edit(lambda m: m.update(version=2)),
        ManifestError,
        MANIFEST,
        "found format version 2, expected version 1. Install a newer megatron-fp8-dist.",
    ),
    Case(
        "manifest of another save",
        _edit(lambda m: m.update(digest="sha256:0")),
        ManifestError,
        MANIFEST,
        "found digest sha256:0",
    ),
    Case(
        "manifest without the tensor",
        _edit(lambda m: m["tensors"].pop(QKV)),
        ManifestError,
        DATA,
        "no manifest knows it",
    ),
    Case(
        "manifest with another shape",
        _edit(lambda m: m["tensors"][QKV].update(global_shape=[4, 48, 16], fragment_shape=[1, 48, 16])),
        ManifestError,
        DATA,
        "expected torch.uint8 of shape [4, 48, 16]",
    ),
    Case("chunk of codes not in .metadata", _lose_chunk(DATA), ManifestError, QKV, "3 stored chunks"),
    Case("chunk of scales not in .metadata", _lose_chunk(SCALE), ManifestError, MANIFEST, "found digest"),
    Case("no .metadata", lambda d: (d / ".metadata").unlink(), IncompleteCheckpointError, "{dir}", "no .metadata"),
    Case(".metadata cut short", lambda d: damage.cut(d / ".metadata", 0.5), StorageError, ".metadata", "readable"),
    Case(
        "no commit marker",
        lambda d: (d / "metadata.json").unlink(),
        IncompleteCheckpointError,
        "{dir}",
        "no metadata.json",
    ),
]


@pytest.mark.parametrize("case", DAMAGED_FILES, ids=[case.name for case in DAMAGED_FILES])
def test_a_damaged_checkpoint(checkpoint: Path, case: Case) -> None:
    case.harm(checkpoint)
    model = blank()
    error = refused_load(model, model.sharded_state_dict(), checkpoint, case.kind)
    assert error.problems[0].key == case.key.format(dir=checkpoint)
    assert case.text in str(error)


def test_another_backend_is_named(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    model = blank()
    error = refused_load(model, model.sharded_state_dict(), checkpoint, ManifestError)
    assert [(p.key, p.found) for p in error.problems] == [("metadata.json", "backend 'zarr'")]


@pytest.mark.parametrize("text", ["[]", "{}", "null", "7", '"torch_dist"', "{", ""])
def test_a_commit_marker_that_is_none(checkpoint: Path, text: str) -> None:
    (checkpoint / "metadata.json").write_text(text)
    model = blank()
    error = refused_load(model, model.sharded_state_dict(), checkpoint, IncompleteCheckpointError)
    assert [p.key for p in error.problems] == ["metadata.json"]


def test_the_same_damage_is_refused_for_a_high_precision_model(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    model = toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)
    error = refused_load(model, model.sharded_state_dict(), checkpoint, ManifestError)
    assert len(error.problems) == 2 * len(toy_model.QUANTIZED)


def test_all_damage_at_once(checkpoint: Path) -> None:
    damage.drop(checkpoint, SCALE)
    damage.declare(checkpoint, "decoder.layers.fc2.weight.rowwise_data", dtype=torch.int8)
    damage.data_file(checkpoint).unlink()
    model = blank()
    error = refused_load(model, model.sharded_state_dict(), checkpoint, ManifestError)
    keys = {SCALE, "decoder.layers.fc2.weight.rowwise_data", "__0_0.distcp"}
    assert {problem.key for problem in error.problems} == keys


def test_all_bad_scales_at_once(checkpoint: Path) -> None:
    _scale(-1.0)(checkpoint)
    fc1 = "decoder.layers.fc1.weight.rowwise_scale_inv"
    damage.rewrite(checkpoint, fc1, lambda scales: torch.full_like(scales, math.nan))
    model = blank()
    error = refused_load(model, model.sharded_state_dict(), checkpoint, PlanningError)
    places = {f"{SCALE}[{layer}, 0, 0]" for layer in EVERY_LAYER}
    halves = {f"{fc1}[{layer}, {half}, 0]" for layer in EVERY_LAYER for half in (0, 1)}
    assert {problem.key for problem in error.problems} == places | halves


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match="no such directory") as caught:
        load(blank().sharded_state_dict(), tmp_path / "nowhere")
    assert_complete(caught.value)


def one(weight: toy_model.Weight, codes: torch.Tensor, element: str = "E4M3") -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of one parameter in layer 0, and its entry."""
    parameter = toy_model.quantized("block_scaled", codes, 1.0, element)
    model = torch.nn.Module()
    model.register_parameter("weight", parameter)
    return model, {"weight": toy_model.entry(parameter, weight, PLACE, 0)}


def test_destinations_that_do_not_fit(checkpoint: Path) -> None:
    qkv, proj, fc1, _ = toy_model.QUANTIZED
    model, entries = torch.nn.ModuleList(), []
    for weight, codes, element in (
        (qkv, torch.zeros(24, 16, dtype=torch.uint8), "E5M2"),
        (proj, torch.zeros(16, 10, dtype=torch.uint8), "E4M3"),
        (fc1, torch.zeros(64, 16, dtype=torch.uint8), "E4M3"),
    ):
        module, entry = one(weight, codes, element)
        model.append(module)
        entries.append(entry)
    error = refused_load(model, {"model": entries}, checkpoint, PlanningError)
    assert {(p.key, p.found.partition(" ")[0], p.expected) for p in error.problems} == {
        (QKV, "E4M3", "E5M2 codes"),
        ("decoder.layers.proj.weight", "global", "[4, 16, 10]"),
        ("decoder.layers.fc1.weight", "global", "[4, 64, 16]"),
    }
    assert "LoadOptions(allow_recast=True)" in str(error)


def test_destinations_that_cannot_be_written(checkpoint: Path) -> None:
    qkv, proj, *_ = toy_model.QUANTIZED
    twice = toy_model.quantized("block_scaled", torch.zeros(48, 16, dtype=torch.uint8), 1.0)
    halves = [toy_model.quantized("block_scaled", torch.zeros(16, 4, dtype=torch.uint8), s) for s in (0.5, 0.25)]
    model = blank()
    model.layers["1"].qkv = torch.nn.Parameter(twice.detach()[:24])
    model.layers["3"].proj = torch.nn.Parameter(torch.cat([h.detach() for h in halves], 1))
    error = refused_load(model, model.sharded_state_dict(), checkpoint, PlanningError)
    assert [p.key for p in error.problems] == [f"decoder.layers.{w.name}.weight" for w in (qkv, proj)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
def test_a_destination_that_is_no_float(checkpoint: Path, dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(24, 16, dtype=dtype))
    entries = {"weight": toy_model.entry(model.get_buffer("weight"), toy_model.QUANTIZED[0], PLACE, 0)}
    error = refused_load(model, entries, checkpoint, PlanningError)
    assert [(p.key, p.found) for p in error.problems] == [(QKV, f"{dtype} in the model")]


def test_one_parameter_under_two_keys(tmp_path: Path) -> None:
    def entries(*weights: Any) -> dict[str, Any]:
        return {k: ShardedTensor.from_rank_offsets(k, w) for k, w in zip(("first", "second"), weights, strict=True)}

    saved = [toy_model.quantized("block_scaled", torch.full((2, 2), c, dtype=torch.uint8), 0.5) for c in (1, 2)]
    save(entries(*saved), tmp_path)
    model = torch.nn.Module()
    model.weight = toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    error = refused_load(model, entries(model.weight, model.weight), tmp_path, PlanningError)
    assert [(p.key, p.found) for p in error.problems] == [("second", "the destination of first as well")]


def test_one_parameter_in_two_entries_of_one_key(checkpoint: Path) -> None:
    model = blank()
    qkv = toy_model.QUANTIZED[0]
    again = toy_model.entry(model.parameter(qkv, 0), qkv, PLACE, 0)
    again.replica_id = 1
    load(model.sharded_state_dict() | {"again": again}, checkpoint)
    assert model.wrong() == []


def test_another_number_of_layers(checkpoint: Path) -> None:
    model = blank()
    layer = ShardedTensor.from_rank_offsets(QKV, model.layers["0"].qkv, (0, 4, 8), prepend_axis_num=1)
    error = refused_load(model, {"weight": layer}, checkpoint, PlanningError)
    assert [(p.key, p.found, p.expected) for p in error.problems] == [
        (QKV, "global shape [4, 24, 16] saved", "[8, 24, 16]")
    ]


def test_a_parameter_that_the_checkpoint_does_not_hold(checkpoint: Path) -> None:
    model, entries = one(toy_model.QUANTIZED[0], torch.zeros(24, 16, dtype=torch.uint8))
    entries["weight"].key = "student.weight"
    before = bytes_of(model)
    with pytest.raises(FP8CheckpointError, match=r"student\.weight") as caught:
        load(entries, checkpoint)
    assert bytes_of(model) == before
    # load() has expanded the state dict: advice to do so would send the user the wrong way.
    assert "expand" not in str(caught.value)


def test_a_parameter_that_megatron_does_not_merge_is_noticed(tmp_path: Path) -> None:
    # Megatron splits a list into entries and common state, and joins the halves again by position.
    weight = toy_model.quantized("block_scaled", torch.arange(16).to(torch.uint8).reshape(4, 4), 0.5)
    save({"list": [ShardedTensor.from_rank_offsets("student.weight", weight), {"step": 3}]}, tmp_path)
    blank_weight = toy_model.quantized("block_scaled", torch.zeros(4, 4, dtype=torch.uint8), 1.0)
    entries = {"list": [ShardedTensor.from_rank_offsets("student.weight", blank_weight), {"step": 0}]}
    with pytest.raises(StorageError, match=r"student\.weight"):
        load(entries, tmp_path)


@dataclass
class Record:
    """What a state dict may hold."""

    value: Any


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda value: (value,),
    "list of tuples": lambda value: [{"deep": (value,)}],
    "Namespace": lambda value: Namespace(value=value),
    "SimpleNamespace": lambda value: SimpleNamespace(value=value),
    "Record": Record,
}


BAD_ENTRIES: dict[str, tuple[Any, str]] = {
    "quantized key with a suffix": (("quantized", DATA), DATA),
    "plain key with a suffix": (("plain", SCALE), SCALE),
    "loose quantized tensor": (("loose", ""), "(state dict)"),
    "quantized tensor in an object": (("object", "extra"), "extra"),
    # Megatron looks into dicts and lists alone: it would pickle what is in these with the common state.
    **{f"quantized entry in a {how}": ((how, "student.weight"), "student.weight") for how in HOLDERS},
    **{f"quantized tensor in a {how}": ((f"{how} of tensors", ""), "(state dict)") for how in HOLDERS | {"set": set}},
}


def bad_entry(how: str, key: str) -> Any:
    """A value that must not be saved."""
    weight = toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    if how == "quantized" or how in HOLDERS:
        entry = ShardedTensor.from_rank_offsets(key, weight)
        return entry if how == "quantized" else HOLDERS[how](entry)
    if how.endswith(" of tensors"):
        return {weight} if how == "set of tensors" else HOLDERS[how.removesuffix(" of tensors")](weight)
    if how == "plain":
        return ShardedTensor.from_rank_offsets(key, torch.zeros(2, 2))
    return weight if how == "loose" else ShardedObject(key, {"deep": [weight]}, (1,), (0,))


@pytest.mark.parametrize("name", BAD_ENTRIES)
@pytest.mark.parametrize("older", [False, True], ids=["fresh folder", "older checkpoint"])
def test_entries_that_cannot_be_saved(tmp_path: Path, name: str, older: bool) -> None:
    if older:
        save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    before = damage.snapshot(tmp_path)
    (how, key), place = BAD_ENTRIES[name]
    entries = blank().sharded_state_dict() | {"bad": bad_entry(how, key)}
    with pytest.raises(PlanningError) as caught:
        save(entries, tmp_path)
    assert [p.key for p in caught.value.problems] == [place]
    assert_complete(caught.value)
    assert damage.snapshot(tmp_path) == before


def test_all_entries_that_cannot_be_saved_at_once(tmp_path: Path) -> None:
    entries = {name: bad_entry(how, key) for name, ((how, key), _) in BAD_ENTRIES.items()}
    with pytest.raises(PlanningError) as caught:
        save(entries, tmp_path)
    assert {p.key for p in caught.value.problems} == {place for _, place in BAD_ENTRIES.values()}


def layer(index: int, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> Any:
    """An entry of one layer of a stack."""
    components = {"rowwise_data": torch.zeros(2, 2, dtype=torch.uint8), "rowwise_scale_inv": torch.ones(1, 1)}
    weight = BlockScaledTensor.from_components(toy_model.scheme(), components, dtype)
    where = (0, index, layers)
    return ShardedTensor.from_rank_offsets("stack", torch.nn.Parameter(weight), where, prepend_axis_num=1)


def row(index: int) -> Any:
    """An entry of one of four fragments."""
    weight = toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    return ShardedTensor.from_rank_offsets("rows", weight, (0, index, 4))


def joined() -> Any:
    """An entry of a parameter that is two quantized shards."""
    parts = [toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), s) for s in (1.0, 0.5)]
    return ShardedTensor.from_rank_offsets("joined", torch.nn.Parameter(torch.cat([p.detach() for p in parts])))


CONFLICTS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "two nominal dtypes": (lambda: [layer(0), layer(1, torch.float16)], "stack: found nominal_dtype"),
    "a fragment that nobody saves": (lambda: [row(i) for i in (0, 1, 3)], "rows: found 3 fragments in all main"),
    "a layer that nobody saves": (lambda: [layer(i, layers=3) for i in (0, 2)], "stack"),
    "a parameter of two shards": (lambda: [joined()], "joined: found"),
}


@pytest.mark.parametrize(("entries", "message"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_a_conflict_between_entries_leaves_an_older_checkpoint(
    checkpoint: Path, entries: Callable[[], list[Any]], message: str
) -> None:
    before = damage.snapshot(checkpoint)
    # Megatron-LM checks the access pattern at its first save alone.
    with pytest.raises(FP8CheckpointError, match=message) as caught:
        save({"entries": entries()}, checkpoint, validate_access_integrity=False)
    assert_complete(caught.value)
    assert damage.snapshot(checkpoint) == before
    model = blank()
    load(model.sharded_state_dict(), checkpoint)
    assert model.wrong() == []


def test_a_factory_that_loses_the_codes(checkpoint: Path) -> None:
    def build(key: str, t: torch.Tensor, replica_id: Any, _: None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, t * 1, replica_id=replica_id)

    weight = toy_model.quantized("block_scaled", torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    before = damage.snapshot(checkpoint)
    with pytest.raises(PlanningError) as caught:
        save({"bad": ShardedTensorFactory("student.weight", weight, build, lambda loaded: loaded)}, checkpoint)
    assert [p.key for p in caught.value.problems] == ["student.weight"]
    assert_complete(caught.value)
    assert damage.snapshot(checkpoint) == before


class PowerCut(BaseException):
    """Ends a save at one point; no handler of ours catches it."""


CRASH_POINTS = {
    "before the data": "megatron_fp8_dist.backends.torch_dist.TorchDistBackend.write",
    "before .metadata": "torch.distributed.checkpoint.FileSystemWriter.finish",
    "before the manifest": "megatron_fp8_dist.strategies.save.write_manifest",
    "amid the manifest": "pathlib.Path.replace",
    "before the commit": "megatron.core.dist_checkpointing.serialization.save_config",
}


def save_by(means: str, entries: Any, directory: Path) -> None:
    """Save by our save(), or by stock's with our strategy."""
    if means == "ours":
        save(entries, directory)
    else:
        dist_checkpointing.save(expand_quantized(entries), str(directory), FP8SaveShardedStrategy())


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize(("by", "older"), [("ours", False), ("ours", True), ("stock", True)])
def test_an_interrupted_save_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, by: str, older: bool
) -> None:
    def cut(*_: object, **__: object) -> None:
        raise PowerCut

    if older:
        save(toy_model.Toy("block_scaled", PLACE, high_precision=(1,)).sharded_state_dict(), tmp_path)
    entries = toy_model.Toy("block_scaled", PLACE).sharded_state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(CRASH_POINTS[point], cut)
        with pytest.raises((PowerCut, StorageError)):
            save_by(by, entries, tmp_path)

    model = blank()
    error = refused_load(model, model.sharded_state_dict(), tmp_path, IncompleteCheckpointError)
    assert "no metadata.json" in str(error)
    assert "The save was interrupted before it was complete" in str(error)
    with pytest.raises(IncompleteCheckpointError):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointingException):
        dist_checkpointing.load(model.sharded_state_dict(), str(tmp_path))

    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    load(model.sharded_state_dict(), tmp_path)
    assert model.wrong() == []


def test_an_async_save_over_an_older_checkpoint_is_refused_until_it_is_finalized(checkpoint: Path) -> None:
    choice: dict[str, Any] = {"async_strategy": "mcore"} if HOST_VERSION.release >= (0, 19) else {}
    model = blank()
    with no_cuda.stand_ins():
        entries = toy_model.Toy("block_scaled", PLACE).sharded_state_dict()
        request = save(entries, checkpoint, async_sharded_save=True, **choice)
        refused_load(model, model.sharded_state_dict(), checkpoint, IncompleteCheckpointError)
        request.execute_sync()
    load(model.sharded_state_dict(), checkpoint)
    assert model.wrong() == []


def stock_save(model: toy_model.Toy, directory: Path) -> None:
    with no_cuda.stand_ins():
        dist_checkpointing.save(model.sharded_state_dict(), str(directory))


def test_a_stock_save_over_ours(checkpoint: Path) -> None:
    saved = toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER)
    stock_save(saved, checkpoint)

    plain = toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)
    plain.load_state_dict(dist_checkpointing.load(plain.sharded_state_dict(), str(checkpoint)))
    assert bytes_of(plain) == bytes_of(saved)

    for model in (blank(), toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)):
        error = refused_load(model, model.sharded_state_dict(), checkpoint, ManifestError)
        assert DATA in {problem.key for problem in error.problems}


def test_ours_over_a_stock_save(tmp_path: Path) -> None:
    stock_save(toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER), tmp_path)
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    model = blank()
    load(model.sharded_state_dict(), tmp_path)
    assert model.wrong() == []
    plain = toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)
    with pytest.raises((CheckpointException, CheckpointingException)):
        dist_checkpointing.load(plain.sharded_state_dict(), str(tmp_path))


def test_common_state_of_an_older_checkpoint_is_not_read(tmp_path: Path) -> None:
    # Where there is a common.pt, as Megatron up to 0.18 writes it, 0.19 takes it for its own.
    torch.save({"iteration": 1}, tmp_path / "common.pt")
    save(blank().sharded_state_dict() | {"iteration": 2}, tmp_path)
    assert load(blank().sharded_state_dict(), tmp_path)["iteration"] == 2


def test_a_checkpoint_without_quantized_tensors_over_one_with_them(checkpoint: Path) -> None:
    plain = toy_model.Toy("block_scaled", PLACE, high_precision=EVERY_LAYER)
    save(plain.sharded_state_dict(), checkpoint)
    assert not (checkpoint / MANIFEST).exists()
    again = toy_model.Toy("block_scaled", PLACE, blank=True, high_precision=EVERY_LAYER)
    again.load_state_dict(load(again.sharded_state_dict(), checkpoint))
    assert bytes_of(again) == bytes_of(plain)
