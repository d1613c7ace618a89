"""Every layout to every other, with fake ranks in one process: bytes against NumPy slices of the whole."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

import megatron_fp8_dist
from megatron_fp8_dist.backends.torch_dist import TorchDistBackend
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized import numerics
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor, join
from megatron_fp8_dist.report import LoadReport, SaveReport
from megatron_fp8_dist.sharding.load_plan import Outcome
from megatron_fp8_dist.sharding.manifest import Manifest, MixedStack
from tests.elementwise import Elements, component_bytes, elements_of, error_in_bound, joined, raw, scaled
from tests.fakeranks import (
    E4M3,
    SHAPES,
    Layout,
    Model,
    Rank,
    Recorder,
    build,
    check,
    check_quantized,
    cut_indices,
    load,
    make_model,
    save,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_fp8_dist.sharding.layout import Region

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

E5M2 = Scheme("per_tensor", "E5M2")
DIRECTORY = Path("checkpoint")
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
PAIRS = list(itertools.permutations(LAYOUTS, 2))
MERGES = [(a, b) for a, b in PAIRS if a.tp > b.tp]
SPLITS = [(a, b) for a, b in PAIRS if a.tp < b.tp]

stacked_or_not = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "keyed"])


@cache
def saved(layout: Layout, stacked: bool, *, equal: bool) -> tuple[Model, Recorder, Manifest]:
    """A checkpoint of two layers; unequal scales are one per tensor-parallel rank."""
    shards = 1 if equal else layout.tp
    # Codes are random bytes, NaN among them, except where they will be rounded.
    model = make_model(E4M3, E4M3, stacked=stacked, shards=shards, finite=not equal)
    backend = Recorder()
    return model, backend, save(build(model, layout), backend, DIRECTORY)


def kinds(ranks: Sequence[Rank]) -> set[str]:
    return {outcome.kind for rank in ranks for outcome in rank.outcomes.values()}


def pair_id(value: Any) -> str | None:
    return str(value) if isinstance(value, Layout) else None


@stacked_or_not
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=pair_id)
@pytest.mark.usefixtures("no_arithmetic")
def test_equal_scales_are_exact_everywhere(source: Layout, target: Layout, stacked: bool) -> None:
    model, backend, manifest = saved(source, stacked, equal=True)
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest)
    check(model, ranks)
    assert kinds(ranks) == {"exact"}


@stacked_or_not
@pytest.mark.parametrize(("source", "target"), [*SPLITS, *((a, a) for a in LAYOUTS)], ids=pair_id)
@pytest.mark.usefixtures("no_arithmetic")
def test_unequal_scales_split_exactly(source: Layout, target: Layout, stacked: bool) -> None:
    model, backend, manifest = saved(source, stacked, equal=False)
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    check(model, ranks)
    assert kinds(ranks) == {"exact"}


@stacked_or_not
@pytest.mark.parametrize(("source", "target"), MERGES, ids=pair_id)
def test_unequal_scales_merge_in_one_requantization(source: Layout, target: Layout, stacked: bool) -> None:
    model, backend, manifest = saved(source, stacked, equal=False)
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest)
    check(model, ranks)
    assert kinds(ranks) == {"requantized"}
    assert {o.requantized_blocks for rank in ranks for o in rank.outcomes.values()} == {1}
    assert all(inside_bound(rank) for rank in ranks)


def inside_bound(rank: Rank) -> bool:
    for name, (weight, index) in rank.origins.items():
        tensor = rank.tensors[name]
        if isinstance(tensor, BlockScaledTensor):
            old = weight.elements(index, rank.place).values("E4M3")
            after = elements_of(tensor)
            if not error_in_bound(old, after.codes, after.scale.view(np.float32), "E4M3"):
                return False
    return True


@stacked_or_not
@pytest.mark.parametrize(("source", "target"), MERGES, ids=pair_id)
def test_strict_bitwise_refuses_before_codes_are_read(source: Layout, target: Layout, stacked: bool) -> None:
    model, backend, manifest = saved(source, stacked, equal=False)
    backend.reads.clear()
    ranks = build(model, target, empty=True)
    before = [component_bytes(t) for rank in ranks for t in rank.tensors.values()]
    with pytest.raises(PlanningError) as caught:
        load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    wanted = {v.key for rank in ranks for n, v in rank.state_dict.items() if "norm" not in n}
    assert {p.key for p in caught.value.problems} == wanted
    assert all("1 block(s)" in p.found for p in caught.value.problems)
    assert backend.reads
    assert backend.code_reads() == []
    assert [component_bytes(t) for rank in ranks for t in rank.tensors.values()] == before


@pytest.mark.parametrize(("source", "target"), [(Layout(4, 2), Layout(2)), (Layout(1), Layout(2, 2))], ids=pair_id)
def test_one_by_one_gives_the_same_bytes(source: Layout, target: Layout) -> None:
    model, backend, manifest = saved(source, True, equal=False)
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest, one_by_one=True)
    check(model, ranks)


@stacked_or_not
@pytest.mark.parametrize(
    ("source", "target"), [(Layout(2, dp=2), Layout(1, dp=3)), (Layout(1, dp=2), Layout(2))], ids=pair_id
)
def test_data_parallel_replicas(source: Layout, target: Layout, stacked: bool) -> None:
    model, backend = make_model(E4M3, E4M3, stacked=stacked), Recorder()
    manifest = save(build(model, source), backend, DIRECTORY)
    chunks = [len(tensor.chunks) for tensor in backend.index(DIRECTORY).values()]
    assert max(chunks) == source.tp * 2 * (2 if stacked else 1)  # swiglu; no replica is written
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest)
    check(model, ranks)


# What is read


def fragments_met(cut: str, source: Layout, target: Layout, tp: int) -> int:
    """How many saved fragments of one layer a rank's region meets, counted element by element."""
    shape = SHAPES[cut]
    owner = np.zeros(shape, np.int64)
    for part in range(source.tp):
        rows, columns = cut_indices(cut, shape, part, source.tp)
        halves = np.array_split(rows, 2) if cut == "swiglu" else [rows]
        for i, half in enumerate(halves):
            owner[np.ix_(half, columns)] = part + i * source.tp
    return len(np.unique(owner[np.ix_(*cut_indices(cut, shape, tp, target.tp))]))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=pair_id)
def test_a_rank_reads_only_fragments_that_it_meets(source: Layout, target: Layout) -> None:
    model, backend, manifest = saved(source, True, equal=True)
    for rank in build(model, target, empty=True):
        backend.reads.clear()
        load([rank], backend, DIRECTORY, manifest)
        layers = 2 // target.pp
        expected = {cut: layers * fragments_met(cut, source, target, rank.place.tp) for cut in SHAPES}
        found = {cut: sum(r.key == f"layers.{cut}.weight.rowwise_data" for r in backend.code_reads()) for cut in SHAPES}
        assert found == expected
        # No code region crosses a fragment, and what is read is what the rank holds.
        assert sum(r.box.size for r in backend.code_reads()) == sum(
            t.numel() for t in rank.tensors.values() if isinstance(t, BlockScaledTensor)
        )


def test_a_scale_region_is_always_all_of_one_fragments_scales() -> None:
    model = make_model(Scheme("toy_block", "E4M3"), shards=1, shapes={"column": (24, 8)})
    backend = Recorder()
    manifest = save(build(model, Layout(1)), backend, DIRECTORY)
    load(build(model, Layout(2), empty=True), backend, DIRECTORY, manifest)
    boxes = {r.box for r in backend.reads if r.key.endswith("scale_inv")}
    assert {(b.offset, b.shape) for b in boxes} == {((0, 0, 0), (1, 6, 2))}


# SwiGLU


def single(key: str, tensor: torch.Tensor, *offsets: tuple[int, int, int], **more: Any) -> Any:
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, **more)


def rank_with(**entries: Any) -> Rank:
    """A rank with these entries, whose data are its tensors."""
    return Rank(next(Layout(1).places()), dict(entries), {n: e.data for n, e in entries.items()})


def random_shard(shape: tuple[int, ...], seed: int, scale: float, scheme: Scheme = E4M3) -> BlockScaledTensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7B, shape, dtype=torch.uint8, generator=generator)
    edges = numerics.destination_edges(scheme, scheme.directions[0], shape)
    values = torch.full([len(e) - 1 for e in edges], scale)
    return BlockScaledTensor.from_components(scheme, {"rowwise_data": codes, "rowwise_scale_inv": values})


SWIGLU = "swiglu.weight.0"


def swiglu_rank(*, empty: bool) -> Rank:
    """One rank that holds nothing but a SwiGLU weight of 16 rows."""
    rank = build(make_model(E4M3, stacked=False, shapes={"swiglu": (16, 8)}), Layout(1), empty=empty)[0]
    del rank.state_dict["norm.weight.0"]
    return rank


def check_halves(halves: Sequence[BlockScaledTensor], rank: Rank) -> None:
    """The loaded weight is both halves, requantized in one block."""
    check_quantized(whole_of(halves), E4M3, rank.tensors[SWIGLU], rank.outcomes[SWIGLU])
    assert rank.outcomes[SWIGLU].requantized_blocks == 1


def test_swiglu_halves_of_unequal_scale_merge_once() -> None:
    halves = [random_shard((8, 8), 1, 0.5), random_shard((8, 8), 2, 0.3)]
    key = "layers.0.swiglu.weight"
    source = rank_with(
        **{name: single(key, half, (0, i, 2)) for i, (name, half) in enumerate(zip("wv", halves, strict=True))}
    )
    backend = Recorder()
    manifest = save([source], backend, DIRECTORY)
    rank = swiglu_rank(empty=True)
    with pytest.raises(PlanningError, match=key):
        load([rank], backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    assert backend.code_reads() == []
    load([rank], backend, DIRECTORY, manifest)
    check_halves(halves, rank)


def test_swiglu_parameter_whose_halves_have_their_own_scales() -> None:
    halves = [random_shard((8, 8), 1, 0.5), random_shard((8, 8), 2, 0.3)]
    source, rank = swiglu_rank(empty=False), swiglu_rank(empty=True)
    source.state_dict[SWIGLU].data = join(halves, 0)
    backend = Recorder()
    load([rank], backend, DIRECTORY, save([source], backend, DIRECTORY))
    check_halves(halves, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_swiglu_halves_under_keys_of_their_own(tp: int) -> None:
    model, backend = make_model(E4M3, E4M3, shapes={"swiglu": (16, 8)}), Recorder()
    saving, loading = build(model, Layout(2)), build(model, Layout(tp), empty=True)
    for rank in (*saving, *loading):
        for name, (weight, index) in rank.origins.items():
            if weight.cut == "swiglu":
                rank.state_dict[name] = own_keys(rank, rank.tensors[name], index[0])
    manifest = save(saving, backend, DIRECTORY)
    assert set(manifest.tensors) == {"fc1_w", "fc1_v"}
    load(loading, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    check(model, loading)


def own_keys(rank: Rank, tensor: torch.Tensor, layer: int) -> Any:
    """A SwiGLU weight of two layers whose halves Megatron stores apart."""
    layers = ((0, layer, 2),)
    sharded = single("fc1", tensor, *layers, (1, rank.place.tp, rank.place.layout.tp), prepend_axis_num=1)
    return apply_swiglu_sharded_factory(sharded, layers, singleton_local_shards=True)


# Block schemes: phases and slots


TOY_SHAPES = {"column": (24, 8), "row": (8, 24), "swiglu": (24, 8)}


@stacked_or_not
@pytest.mark.parametrize("name", ["toy_block", "toy_flat"])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS[::2], repeat=2)), ids=pair_id)
def test_blocks_and_phases(source: Layout, target: Layout, name: str, stacked: bool) -> None:
    # At TP2 a SwiGLU shard is 12 rows of blocks of 4 or 3, and its second half starts inside a block of 4.
    scheme = Scheme(name, "E4M3")
    model = make_model(scheme, stacked=stacked, shards=source.tp, finite=True, shapes=TOY_SHAPES)
    backend = Recorder()
    manifest = save(build(model, source), backend, DIRECTORY)
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest)
    check(model, ranks)
    if source == target:
        assert kinds(ranks) == {"exact"}


# Uneven fragments


def uneven(key: str, tensor: torch.Tensor, offset: int, total: int, **more: Any) -> Any:
    """A fragment whose rank knows its element offset, not its index."""
    shape = tuple(tensor.shape)
    return ShardedTensor(key, tensor, tensor.dtype, shape, (total, *shape[1:]), (offset, 0), None, **more)


def whole_of(parts: Sequence[torch.Tensor]) -> Elements:
    return joined([elements_of(p) for p in parts], 0)


def save_rows(
    sizes: Sequence[int], scales: Sequence[float], scheme: Scheme = E4M3
) -> tuple[Elements, Recorder, Manifest]:
    parts = [random_shard((s, 8), i, scale, scheme) for i, (s, scale) in enumerate(zip(sizes, scales, strict=True))]
    starts = [0, *itertools.accumulate(sizes)]
    backend = Recorder()
    ranks = [rank_with(w=uneven("w", part, o, sum(sizes))) for part, o in zip(parts, starts, strict=False)]
    return whole_of(parts), backend, save(ranks, backend, DIRECTORY)


def load_rows(
    whole: Elements, backend: Recorder, manifest: Manifest, sizes: Sequence[int], scheme: Scheme = E4M3
) -> list[Rank]:
    starts = [0, *itertools.accumulate(sizes)]
    shards = [random_shard((s, 8), 9, 9.0, scheme) for s in sizes]
    ranks = [rank_with(w=uneven("w", t, o, sum(sizes))) for t, o in zip(shards, starts, strict=False)]
    load(ranks, backend, DIRECTORY, manifest)
    for rank, start, size in zip(ranks, starts, sizes, strict=False):
        check_quantized(whole[slice(start, start + size),], scheme, rank.tensors["w"], rank.outcomes["w"])
    return ranks


@pytest.mark.parametrize("sizes", [(5, 3, 8), (16,), (8, 8), (1, 15), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 0.25, 0.3)], ids=["equal", "unequal"])
def test_uneven_fragments(sizes: tuple[int, ...], scales: tuple[float, ...]) -> None:
    whole, backend, manifest = save_rows((5, 3, 8), scales)
    assert {k.partition("@")[2] for k in backend.index(DIRECTORY)} == {"", "0_0", "5_0", "8_0"}
    ranks = load_rows(whole, backend, manifest, sizes)
    if len(set(scales)) == 1 or sizes == (5, 3, 8):
        assert kinds(ranks) == {"exact"}


@pytest.mark.parametrize("sizes", [(5, 3, 8), (16,), (7, 9)], ids=str)
def test_uneven_fragments_of_a_block_scheme(sizes: tuple[int, ...]) -> None:
    scheme = Scheme("toy_block", "E4M3")
    load_rows(*save_rows((5, 3, 8), (0.5, 0.25, 0.3), scheme), sizes, scheme)


def layered(tensor: torch.Tensor, layer: int, offset: int, num_layers: int = 2) -> Any:
    """An uneven fragment of one layer of a stack of 8 columns."""
    rows, columns = tensor.shape
    where = (layer, 0, offset)
    return ShardedTensor("w", tensor, tensor.dtype, (rows, columns), (num_layers, rows, 8), where, None, 0, 1)


def columns_of(tensor: torch.Tensor, *sizes: int) -> list[tuple[int, torch.Tensor]]:
    """(first column, part) of a tensor cut into columns, each part a tensor of its own."""
    starts = itertools.accumulate(sizes, initial=0)
    return [(o, part.clone()) for o, part in zip(starts, tensor.split(list(sizes), 1), strict=False)]


@pytest.mark.parametrize("mixed", [False, True], ids=["stack", "mixed stack"])
def test_uneven_columns_of_layers(mixed: bool) -> None:
    layers = [
        torch.ones(4, 8, dtype=torch.bfloat16) if mixed else random_shard((4, 8), 5, 0.25),
        random_shard((4, 8), 6, 0.5),
    ]
    source = [
        rank_with(**{str(layer): layered(part, layer, o)})
        for layer, tensor in enumerate(layers)
        for o, part in columns_of(tensor, 5, 3)
    ]
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    assert bool(manifest.mixed) == mixed
    wanted = columns_of(random_shard((4, 8), 9, 9.0), 2, 6)
    ranks = [rank_with(w=layered(part, 1, o)) for o, part in wanted]
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    assert kinds(ranks) == {"exact"}
    found = joined([elements_of(part) for _, part in wanted], 1)
    np.testing.assert_array_equal(found.codes, elements_of(layers[1]).codes)
    np.testing.assert_array_equal(found.scale, elements_of(layers[1]).scale)


@pytest.mark.parametrize("shape", [(8,), (4, 2, 6), (2, 2, 2, 2)], ids=str)
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    whole = random_shard(shape, 1, 0.5)
    backend = Recorder()
    manifest = save([rank_with(w=single("w", whole))], backend, DIRECTORY)
    parts = [random_shard((shape[0] // 2, *shape[1:]), 9, 9.0) for _ in range(2)]
    ranks = [rank_with(w=single("w", part, (0, i, 2))) for i, part in enumerate(parts)]
    load(ranks, backend, DIRECTORY, manifest)
    assert kinds(ranks) == {"exact"}
    np.testing.assert_array_equal(whole_of(parts).codes, elements_of(whole).codes)
    np.testing.assert_array_equal(whole_of(parts).scale, elements_of(whole).scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_high_precision_destination_of_any_dtype(dtype: torch.dtype) -> None:
    whole = random_shard((4, 8), 1, 0.5)
    backend = Recorder()
    manifest = save([rank_with(w=single("w", whole))], backend, DIRECTORY)
    rank = rank_with(w=single("w", torch.zeros(4, 8, dtype=dtype)))
    load([rank], backend, DIRECTORY, manifest)
    expected = torch.from_numpy(elements_of(whole).values("E4M3")).to(dtype)
    np.testing.assert_array_equal(raw(rank.loaded["w"]), raw(expected))


def test_even_fragments_loaded_unevenly() -> None:
    parts = [random_shard((8, 8), i, 0.5) for i in range(2)]
    backend = Recorder()
    ranks = [rank_with(w=single("w", part, (0, i, 2))) for i, part in enumerate(parts)]
    load_rows(whole_of(parts), backend, save(ranks, backend, DIRECTORY), (5, 3, 8))


def test_other_global_shape_is_a_problem() -> None:
    _, backend, manifest = save_rows((5, 3, 8), (0.5, 0.5, 0.5))
    rank = rank_with(w=uneven("w", random_shard((8, 8), 9, 9.0), 0, 20))
    with pytest.raises(PlanningError, match=r"w: found global shape \[16, 8\] saved, expected \[20, 8\]"):
        load([rank], backend, DIRECTORY, manifest)


def test_a_quantized_tensor_without_rows() -> None:
    empty = BlockScaledTensor.from_components(
        E4M3, {"rowwise_data": torch.zeros(0, 8, dtype=torch.uint8), "rowwise_scale_inv": torch.zeros(0, 1)}
    )
    backend = Recorder()
    manifest = save([rank_with(w=single("w", empty))], backend, DIRECTORY)
    rank = rank_with(w=single("w", empty.clone()))
    load([rank], backend, DIRECTORY, manifest)
    assert rank.outcomes["w"] == Outcome("exact")


# allow_shape_mismatch


def padded(rows: Sequence[int], seed: int, scale: float) -> list[Rank]:
    """Ranks with shards of these many rows of a table that may have been padded."""
    return [
        rank_with(w=single("w", random_shard((n, 8), seed + i, scale), (0, i, len(rows)), allow_shape_mismatch=True))
        for i, n in enumerate(rows)
    ]


@pytest.mark.parametrize("saved_rows", [(6, 6), (5, 5), (12,), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("wanted_rows", [(16,), (8, 8), (4, 4, 4, 4, 4), (5, 5), (7, 7)], ids=str)
@pytest.mark.parametrize("scale_step", [0.0, 0.1], ids=["equal", "unequal"])
def test_rows_outside_are_zero_and_choose_no_scale(
    saved_rows: tuple[int, ...], wanted_rows: tuple[int, ...], scale_step: float
) -> None:
    source = padded(saved_rows, 0, 0.5)
    for i, rank in enumerate(source):
        scaled(rank.tensors["w"]).components()["rowwise_scale_inv"].add_(i * scale_step)
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    stored = whole_of([rank.tensors["w"] for rank in source])
    total, wanted = sum(saved_rows), sum(wanted_rows)
    whole = Elements(*(np.zeros((max(total, wanted), 8), d) for d in (np.uint8, np.uint32, np.bool_)))
    whole.codes[:total], whole.scale[:total], whole.known[:total] = stored.codes, stored.scale, stored.known
    ranks = padded(wanted_rows, 50, 9.0)
    load(ranks, backend, DIRECTORY, manifest)
    starts = itertools.accumulate(wanted_rows, initial=0)
    for rank, start, size in zip(ranks, starts, wanted_rows, strict=False):
        tensor = scaled(rank.tensors["w"])
        check_quantized(whole[slice(start, start + size),], E4M3, tensor, rank.outcomes["w"])
        if start >= total:
            assert not tensor.components()["rowwise_data"].any()
            assert tensor.components()["rowwise_scale_inv"].tolist() == [[1.0]]


def test_rows_outside_of_a_high_precision_destination_are_zero() -> None:
    source = padded((6,), 0, 0.5)
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    table = torch.ones(8, 8, dtype=torch.bfloat16)
    rank = rank_with(w=single("w", table, allow_shape_mismatch=True))
    load([rank], backend, DIRECTORY, manifest)
    expected = torch.zeros(8, 8, dtype=torch.bfloat16)
    expected[:6] = source[0].tensors["w"].dequantize()
    np.testing.assert_array_equal(raw(rank.loaded["w"]), raw(expected))


# Mixed stacks


def through(model: Model, source: Layout, target: Layout, wanted: Model | None = None, **options: Any) -> list[Rank]:
    """Save at one layout, load at another, and compare."""
    backend = Recorder()
    manifest = save(build(model, source), backend, DIRECTORY)
    ranks = build(wanted or model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(**options))
    check(model, ranks)
    return ranks


MIXED = [None, E4M3, E4M3, None]
DEPTHS = [(Layout(1), Layout(1, 4)), (Layout(1, 4), Layout(1)), (Layout(2, 4), Layout(1, 2)), (Layout(1), Layout(4, 2))]


@pytest.mark.parametrize(("source", "target"), DEPTHS, ids=pair_id)
@pytest.mark.usefixtures("no_arithmetic")
def test_mixed_stack(source: Layout, target: Layout) -> None:
    model, backend = make_model(*MIXED), Recorder()
    manifest = save(build(model, source), backend, DIRECTORY)
    assert manifest.mixed == {f"layers.{cut}.weight": MixedStack(4, (1, 2)) for cut in SHAPES}
    keys = {key for key in backend.index(DIRECTORY) if key.startswith("layers.column")}
    name = "layers.column.weight"
    components = {f"{name}.layer_{i}.rowwise_{c}" for i in (1, 2) for c in ("data", "scale_inv")}
    assert keys == components | {f"{name}.layer_0", f"{name}.layer_3"}
    ranks = build(model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    for rank in ranks:
        assert {o.kind for o in rank.outcomes.values()} <= {"exact", ""}
    for rank in ranks:
        for name, tensor in rank.tensors.items():
            expected = rank.origins[name][0].tensor(rank.origins[name][1], rank.place)
            got = tensor if isinstance(tensor, BlockScaledTensor) else rank.loaded[name]
            assert component_bytes(got) == component_bytes(expected)


@pytest.mark.parametrize(("source", "target"), DEPTHS, ids=pair_id)
def test_two_schemes_in_one_stack(source: Layout, target: Layout) -> None:
    ranks = through(make_model(E4M3, E5M2, E5M2, E4M3), source, target, strict_bitwise=True)
    assert kinds(ranks) == {"exact"}


@pytest.mark.parametrize(("source", "target"), DEPTHS, ids=pair_id)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, E4M3, E4M3, None), (E4M3, E4M3, None, None)),
        ((E4M3, E4M3, E4M3, E4M3), (None, E4M3, E4M3, None)),
        ((None, E4M3, E4M3, None), (E4M3, E4M3, E4M3, E4M3)),
        ((None, None, None, None), (E4M3, None, E4M3, E4M3)),
        ((E4M3, E4M3, E4M3, E4M3), (None, None, None, None)),
    ],
    ids=["moved", "fewer", "more", "first", "none"],
)
def test_the_set_of_quantized_layers_changes(
    source: Layout, target: Layout, before: tuple[Scheme | None, ...], after: tuple[Scheme | None, ...]
) -> None:
    model = make_model(*before, finite=True)
    ranks = through(model, source, target, wanted=model.with_schemes(*after))
    changes = {(a is not None, b is not None) for a, b in zip(before, after, strict=True)}
    words = {(True, True): "exact", (True, False): "dequantized", (False, True): "quantized", (False, False): ""}
    assert kinds(ranks) - {""} == {words[c] for c in changes} - {""}


@pytest.mark.parametrize("after", [(None, E4M3), (E4M3, E4M3)], ids=["dequantized", "quantized"])
def test_a_changed_set_is_not_bitwise(after: tuple[Scheme | None, ...]) -> None:
    before: tuple[Scheme | None, ...] = (E4M3, E4M3) if None in after else (None, E4M3)
    model = make_model(*before, finite=True)
    with pytest.raises(PlanningError, match=r"layers.column.weight: found .*high precision|bfloat16"):
        through(model, Layout(1), Layout(1), wanted=model.with_schemes(*after), strict_bitwise=True)


def test_another_element_format_is_refused_unless_it_is_allowed() -> None:
    model = make_model(E4M3, E4M3, finite=True)
    wanted = model.with_schemes(E5M2, E5M2)
    with pytest.raises(PlanningError, match=r"found E4M3 codes.*expected E5M2 codes.*allow_recast=True"):
        through(model, Layout(1), Layout(1), wanted=wanted)
    ranks = through(model, Layout(2), Layout(1, 2), wanted=wanted, allow_recast=True)
    assert kinds(ranks) == {"requantized"}


def test_a_layer_that_was_not_saved_is_a_problem() -> None:
    backend = Recorder()
    manifest = save(build(make_model(*MIXED), Layout(1)), backend, DIRECTORY)
    ranks = build(make_model(*MIXED, E4M3), Layout(1), empty=True)
    with pytest.raises(PlanningError, match=r"layers\.column\.weight: found 4 layers saved, expected 5 layers"):
        load(ranks, backend, DIRECTORY, manifest)


# Errors that name ranks


def embedding(tensor: torch.Tensor, replica: int) -> Rank:
    return rank_with(w=single("embedding", tensor, replica_id=replica))


REPLICAS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], str]] = {
    "two schemes": (
        lambda: random_shard((4, 8), 1, 0.5),
        lambda: random_shard((4, 8), 1, 0.5, E5M2),
        r"embedding: found schemes per_tensor/E4M3 and per_tensor/E5M2.*\[rank 0, 1\]",
    ),
    "quantized beside high precision": (
        lambda: random_shard((4, 8), 1, 0.5),
        lambda: torch.ones(4, 8, dtype=torch.bfloat16),
        "embedding: found high precision on rank 1, quantized on rank 0",
    ),
    "high precision beside quantized": (
        lambda: torch.ones(4, 8, dtype=torch.bfloat16),
        lambda: random_shard((4, 8), 1, 0.5),
        "embedding: found high precision on rank 0, quantized on rank 1",
    ),
}


@pytest.mark.parametrize(("first", "second", "message"), REPLICAS.values(), ids=REPLICAS.keys())
def test_replicas_of_different_scheme_name_both_ranks(
    first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor], message: str
) -> None:
    backend = Recorder()
    with pytest.raises(PlanningError, match=message):
        save([embedding(first(), 0), embedding(second(), 1)], backend, DIRECTORY)
    assert not backend.chunks


def test_fragments_of_one_layer_in_two_schemes_name_both_ranks() -> None:
    ranks = build(make_model(E4M3, E4M3), Layout(2))
    other = build(make_model(E4M3, E5M2), Layout(2))
    with pytest.raises(PlanningError, match=r"layers.row.weight: .*E4M3 and per_tensor/E5M2.*\[rank 0, 1\]"):
        save([ranks[0], other[1]], Recorder(), DIRECTORY)


# Experts


EXPERT_LAYOUTS = [
    (Layout(1), Layout(2, ep=4)),
    (Layout(2, ep=4), Layout(1)),
    (Layout(1, 2, ep=2), Layout(1, ep=4)),
    (Layout(2, ep=4), Layout(1, 2, ep=2)),
]


@pytest.mark.parametrize(("source", "target"), EXPERT_LAYOUTS, ids=pair_id)
@pytest.mark.parametrize("schemes", [(E4M3, E4M3), (None, E4M3), (E5M2, E4M3)], ids=["all", "mixed", "two"])
def test_experts_and_layers_prepended(source: Layout, target: Layout, schemes: tuple[Scheme | None, ...]) -> None:
    ranks = through(make_model(*schemes, experts=4), source, target)
    assert kinds(ranks) - {""} == {"exact"}


# At random


layouts = st.builds(Layout, tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2]))
any_schemes = st.lists(st.sampled_from([None, E4M3, E5M2]), min_size=4, max_size=4)


@given(
    source=layouts, target=layouts, before=any_schemes, after=any_schemes, stacked=st.booleans(), equal=st.booleans()
)
def test_any_layout_and_schemes(
    source: Layout, target: Layout, before: list[Scheme | None], after: list[Scheme | None], stacked: bool, equal: bool
) -> None:
    model = make_model(*before, stacked=stacked, shards=1 if equal else source.tp, finite=True)
    through(model, source, target, wanted=model.with_schemes(*after), allow_recast=True)


@given(data=st.data(), scheme=st.sampled_from(["per_tensor", "toy_block", "toy_flat"]))
def test_any_uneven_fragments(data: st.DataObject, scheme: str) -> None:
    total = data.draw(st.integers(1, 20))
    chosen = Scheme(scheme, "E4M3")

    def sizes() -> list[int]:
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))), total] if total > 1 else [0, 1]
        return [b - a for a, b in itertools.pairwise(cuts)]

    parts = sizes()
    scales = data.draw(st.lists(st.sampled_from([0.5, 0.25, 0.3]), min_size=len(parts), max_size=len(parts)))
    load_rows(*save_rows(parts, scales, chosen), sizes(), chosen)


# The same through files, and the public calls


def together(ranks: Sequence[Rank]) -> dict[str, Any]:
    """All ranks' entries in one state dict of one process.

    Megatron does not take a plain tensor twice under one key from one process, so replicas of those are left out.
    """
    first = {id(v) for v in ranks[0].state_dict.values()}
    out = {}
    for number, rank in enumerate(ranks):
        for name, value in rank.state_dict.items():
            quantized = isinstance(value.data, BlockScaledTensor)
            replica = rank.place.tp > 0 and "norm" in name
            if quantized or not replica or id(value) in first:
                out[f"{number}.{name}"] = value
    return out


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
    "mixed": (make_model(*MIXED), Layout(2, 2), Layout(1, 4)),
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
