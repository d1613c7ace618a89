"""Inputs at the edge: thin, deep and empty weights, odd memory, idle ranks, nothing quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from megatron_fp8_dist import (
    BlockScaledTensor,
    FP8CheckpointError,
    LoadOptions,
    Scheme,
    last_report,
    load,
    save,
)
from megatron_fp8_dist.te import tensors
from tests import damage, no_cuda, te_cpu, toy_model
from tests.parameters import KINDS, contents, each_scheme, parameter, tensor
from tests.rankpool import RankPool
from tests.te_cpu import Kind

STRICT = LoadOptions(strict_bitwise=True)
EVERY_LAYER = range(toy_model.NUM_LAYERS)


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of this process alone where a test sends no jobs to ranks, and what NVFP4's quantizer needs."""
    if "ranks" not in request.fixturenames:
        request.getfixturevalue("single")
    with te_cpu.current_device_stand_in():
        yield


def whole(key: str, value: torch.Tensor, *offsets: tuple[int, int, int], **more: Any) -> Any:
    return ShardedTensor.from_rank_offsets(key, value, *offsets, **more)


def exact() -> int:
    report = last_report()
    assert report is not None
    found: int = report.to_dict()["exact"]
    return found


Entry = Callable[[str, Any], Any]
FORMS: dict[str, Entry] = {
    "whole": whole,
    "layer": lambda key, value: whole(key, value, (0, 0, 1), prepend_axis_num=1),
    "expert": lambda key, value: whole(key, value, (0, 0, 1), (1, 0, 1), prepend_axis_num=2),
    "swiglu": lambda key, value: apply_swiglu_sharded_factory(whole(key, value), ()),
}
THIN = [(1, 64), (64, 1), (1, 1), (1, 2), (2, 1), (129, 1), (1, 33), (2, 257)]
DEEP = [(7,), (1,), (3, 4, 6), (2, 1, 5), (2, 3, 4, 5)]


def shapes_of(scheme: Scheme) -> list[tuple[int, ...]]:
    """The shapes that a scheme takes: packed codes come in pairs, blocks have two axes."""
    packed = {spec.packed_axis for spec in scheme.directions} - {None}
    shapes: list[tuple[int, ...]] = [s for s in THIN if all(s[axis] % 2 == 0 for axis in packed if axis is not None)]
    return [*shapes, *DEEP] if scheme.name == "per_tensor" else shapes


def mapped(
    make: Callable[[int, tuple[int, ...]], Any], seed: int, shapes: list[tuple[int, ...]]
) -> tuple[list[Any], dict[str, Any]]:
    """A parameter per shape and form that it can have, and their entries."""
    cases = [(s, f) for s in shapes for f in FORMS if f != "swiglu" or (s[0] % 4 == 0 and len(s) == 2)]
    parameters = [make(seed + number, shape) for number, (shape, _) in enumerate(cases)]
    entries = {f"{s} {f}": FORMS[f](f"{s}.{f}", p) for (s, f), p in zip(cases, parameters, strict=True)}
    return parameters, entries


@each_scheme
def test_thin_and_deep_weights(tmp_path: Path, scheme: Scheme) -> None:
    source, saved = mapped(partial(parameter, scheme), 0, shapes_of(scheme))
    found, wanted = mapped(partial(parameter, scheme), 1000, shapes_of(scheme))
    save(saved, tmp_path)
    load(wanted, tmp_path, options=STRICT)
    assert [contents(p) for p in found] == [contents(p) for p in source]
    assert exact() == len(found)


def float8(rowwise: bool, seed: int, shape: tuple[int, ...]) -> Any:
    """A Float8Tensor that has its codes, or their transpose alone."""
    codes, scale = tensor(Scheme("per_tensor", "E4M3"), seed, shape).components().values()
    return nn.Parameter(te_cpu.float8(codes, scale.item(), rowwise=rowwise))


@pytest.mark.te
@pytest.mark.parametrize("rowwise", [True, False], ids=["codes", "transpose"])
def test_thin_and_deep_weights_of_transformer_engine(tmp_path: Path, rowwise: bool) -> None:
    source, saved = mapped(partial(float8, rowwise), 0, [*THIN, *DEEP])
    save(saved, tmp_path)
    for into in (True, False):
        found, wanted = mapped(partial(float8, into), 1000, [*THIN, *DEEP])
        load(wanted, tmp_path, options=STRICT)
        assert exact() == len(found)
        assert [contents(tensors.wrap(p)) for p in found] == [contents(tensors.wrap(p)) for p in source]


@each_scheme
@pytest.mark.parametrize("axis", [0, 1])
def test_fragments_of_one_row_or_column(tmp_path: Path, scheme: Scheme, axis: int) -> None:
    step = 2 if scheme.element == "E2M1" else 1
    shape = (step, 20) if axis == 0 else (20, step)
    source, found = ([parameter(scheme, first + i, shape) for i in range(6)] for first in (0, 100))
    save({str(i): whole("w", p, (axis, i, 6)) for i, p in enumerate(source)}, tmp_path)
    load({str(i): whole("w", p, (axis, i, 6)) for i, p in enumerate(found)}, tmp_path, options=STRICT)
    assert [contents(p) for p in found] == [contents(p) for p in source]
    joined = torch.cat([p.detach() for p in source], axis)
    assert isinstance(joined, BlockScaledTensor)
    merged = parameter(scheme, 200, tuple(joined.shape))
    load({"w": whole("w", merged)}, tmp_path)
    expected, _ = joined.conform(scheme)
    assert contents(merged) == contents(expected)


def piece(key: str, value: torch.Tensor, start: int, total: int) -> Any:
    """Rows of a tensor whose fragments have no regular grid."""
    shape = tuple(value.shape)
    return ShardedTensor(key, value, value.dtype, shape, (total, *shape[1:]), (start, 0), None)


@each_scheme
def test_empty_tensors(tmp_path: Path, scheme: Scheme) -> None:
    # Of no rows, of no columns, of neither, and a fragment without rows behind the last one.
    shapes: dict[str, tuple[int, int]] = {"rows": (0, 64), "columns": (64, 0), "both": (0, 0)}

    def state(first: int) -> tuple[list[Any], dict[str, Any]]:
        made = {k: parameter(scheme, first + i, s) for i, (k, s) in enumerate(shapes.items())}
        entries = {k: piece(k, p, 0, p.shape[0]) for k, p in made.items()}
        rows = (0, 32, 0, 32, 0, 0)
        parts = [parameter(scheme, first + 10 + i, (n, 64)) for i, n in enumerate(rows)]
        starts = accumulate(rows, initial=0)
        entries |= {f"w{i}": piece("w", p, start, 64) for i, (p, start) in enumerate(zip(parts, starts, strict=False))}
        return [*made.values(), *parts], entries

    source, saved = state(0)
    save(saved, tmp_path)
    found, wanted = state(100)
    load(wanted, tmp_path, options=STRICT)
    assert [contents(p) for p in found] == [contents(p) for p in source]
    assert exact() == len(found)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)], ids=str)
def test_an_empty_tensor_on_a_grid_of_fragments_is_refused_as_megatron_does(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    plain = whole("w", torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ZeroDivisionError):
        dist_checkpointing.save({"w": plain}, str(tmp_path))
    with pytest.raises(FP8CheckpointError):
        save({"w": whole("w", parameter(Scheme("per_tensor", "E4M3"), 0, shape))}, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Memory


def column_major(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def every_second(t: torch.Tensor) -> torch.Tensor:
    room = torch.full([2 * s for s in t.shape], 0x55, dtype=torch.uint8).to(t.dtype)
    room[::2, ::2] = t
    return room[::2, ::2]


def inside(t: torch.Tensor) -> torch.Tensor:
    room = torch.full([s + 3 for s in t.shape], 0x55, dtype=torch.uint8).to(t.dtype)
    room[1:-2, 2:-1] = t
    return room[1:-2, 2:-1]


MEMORY = [column_major, every_second, inside]


def around(view: torch.Tensor) -> torch.Tensor:
    """What lies in the memory of a view beside it."""
    out = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).clone()
    out.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return out


@each_scheme
@pytest.mark.parametrize("memory", MEMORY)
def test_components_that_are_not_contiguous(
    tmp_path: Path, scheme: Scheme, memory: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def make(seed: int) -> Any:
        parts = {n: memory(c) for n, c in tensor(scheme, seed, (6, 40)).components().items()}
        return nn.Parameter(BlockScaledTensor.from_components(scheme, parts))

    source, found, plain = make(1), make(2), parameter(scheme, 3, (6, 40))
    assert not source.components()["rowwise_data"].is_contiguous()
    beside = {n: around(c) for n, c in found.components().items()}
    save({"w": whole("w", source)}, tmp_path)
    for destination in (found, plain):
        load({"w": whole("w", destination)}, tmp_path, options=STRICT)
        assert contents(destination) == contents(parameter(scheme, 1, (6, 40)))
    assert all(torch.equal(around(c), beside[n]) for n, c in found.components().items())


@pytest.mark.te
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_buffers_that_are_not_contiguous(
    tmp_path: Path, kind: Kind, memory: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def make(seed: int) -> Any:
        made = parameter(kind, seed, (64, 96))
        for name, buffer in te_cpu.buffers(made).items():
            setattr(made, name, memory(buffer) if buffer.dim() == 2 else buffer)
        return made

    source, found = make(1), make(2)
    buffers = te_cpu.buffers(found)
    save({"w": whole("w", source)}, tmp_path)
    load({"w": whole("w", found)}, tmp_path, options=STRICT)
    assert contents(tensors.wrap(found)) == contents(tensors.wrap(parameter(kind, 1, (64, 96))))
    assert all(buffer is buffers[name] for name, buffer in te_cpu.buffers(found).items())


# Ranks


def only_on(rank: int, entries: dict[str, Any]) -> dict[str, Any]:
    return entries if dist.get_rank() == rank else {}


def weight(seed: int) -> Any:
    return parameter(Scheme("mxfp8", "E4M3"), seed, (40, 64))


def idle_rank(directory: str) -> tuple[bool, int]:
    """One rank saves, the other one loads; a third one does neither."""
    save(only_on(1, {"w": whole("w", weight(1))}), directory)
    loaded = weight(2)
    load(only_on(0, {"w": whole("w", loaded)}), directory, options=STRICT)
    return contents(loaded) == contents(weight(1 if dist.get_rank() == 0 else 2)), exact()


def lone_parameters(directory: str) -> tuple[list[bool], int]:
    """Each rank has a parameter of its own, and one in high precision; then every rank wants all of them."""
    here, size = dist.get_rank(), dist.get_world_size()
    save({"w": whole(f"w{here}", weight(here)), "norm": whole(f"norm{here}", torch.full((4,), float(here)))}, directory)
    loaded = [weight(100 + i) for i in range(size)]
    norms = [torch.zeros(4) for _ in range(size)]
    entries = {f"w{i}": whole(f"w{i}", p, replica_id=here) for i, p in enumerate(loaded)}
    entries |= {f"norm{i}": whole(f"norm{i}", n, replica_id=here) for i, n in enumerate(norms)}
    load(entries, directory, options=STRICT)
    same = [contents(p) == contents(weight(i)) for i, p in enumerate(loaded)]
    return same + [torch.equal(n, torch.full((4,), float(i))) for i, n in enumerate(norms)], exact()


def nothing_at_all(directory: str) -> dict[str, Any]:
    """No rank has a tensor, quantized or not."""
    save({"iteration": 7}, directory)
    loaded: dict[str, Any] = load({"iteration": 0}, directory)
    return loaded


def test_a_rank_without_fragments(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(f"{__name__}:idle_rank", str(tmp_path), n=3) == [(True, 1)] * 3


def test_parameters_on_one_rank_only(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(f"{__name__}:lone_parameters", str(tmp_path), n=2) == [([True] * 4, 4)] * 2


def test_a_state_dict_without_tensors(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(f"{__name__}:nothing_at_all", str(tmp_path), n=2) == [{"iteration": 7}] * 2


# Nothing quantized


def save_plain(directory: str, layout: toy_model.Layout, by: str) -> None:
    """In a rank: save a checkpoint without anything quantized, by stock code or by ours."""
    place = layout.place(dist.get_rank())
    entries: dict[str, Any] = toy_model.Toy("block_scaled", place, high_precision=EVERY_LAYER).sharded_state_dict()
    replica = (0, place.tp, 0)
    entries["extra"] = ShardedObject("extra", {"step": torch.ones(2)}, (1,), (0,), replica)
    entries["uneven"] = ShardedTensor(
        "uneven", torch.arange(6.0).reshape(2, 3), torch.float32, (2, 3), (2, 3), (0, 0), None, replica
    )
    entries["iteration"] = 7
    # Stock has two files per rank by default, and deals tensors out to them in an order of its own.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    if by == "ours":
        save(entries, directory, strategy)
    else:
        with no_cuda.stand_ins():
            dist_checkpointing.save(entries, directory, strategy)


def assert_same_files(ours: Path, stock: Path) -> None:
    """Every file has the same bytes, and `.metadata` says the same but for where and when."""
    found, right = damage.snapshot(ours), damage.snapshot(stock)
    for files in (found, right):
        files.pop(".metadata")
    assert found == right
    said = [damage.metadata(directory) for directory in (ours, stock)]
    assert said[0].storage_meta is not None
    assert said[0] == replace(said[1], storage_meta=said[0].storage_meta)
    for tables in ([list(m.state_dict_metadata) for m in said], [list(m.storage_data or ()) for m in said]):
        assert tables[0] == tables[1]


def test_nothing_quantized_gives_the_files_of_stock(ranks: RankPool, tmp_path: Path) -> None:
    layout = toy_model.Layout(tp=2)
    for by in ("ours", "stock"):
        (tmp_path / by).mkdir()
        ranks.run(f"{__name__}:save_plain", str(tmp_path / by), layout, by, n=layout.size)
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
