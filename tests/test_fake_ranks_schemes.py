"""Every scheme on any cut to any other, with fake ranks in one process, against a model that knows only elements."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.sharding.manifest import MixedStack
from tests import elements
from tests.elements import Sides, random_sides, rule_of, sides_of, tensor_of
from tests.elementwise import component_bytes
from tests.fakemodel import Layout, make_model, pick, put
from tests.fakeranks import DIRECTORY, Rank, Recorder, build, load, save
from tests.fakeranks import check as check_model
from tests.shardcuts import (
    KEY,
    SCHEMES,
    Cut,
    Saved,
    check,
    destinations,
    each_scheme,
    empty,
    even,
    hold,
    loaded,
    one_rank,
    saved,
    scheme_id,
    side_of,
)

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")


TP_SIZES = (1, 2, 3, 4, 6, 8)

# At random


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], kind: str, scheme: Scheme) -> Cut:
    """A cut of a weight: tensor-parallel 1 to 8, or uneven fragments."""
    size = shape[1] if kind == "columns" else shape[0] // (2 if kind == "swiglu" else 1)
    step = 2 if scheme.element == "E2M1" else 1
    if kind != "swiglu" and draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, size // step - 1), max_size=4))
        return Cut(kind, (0, *(step * i for i in sorted(inner)), size), even=False)
    return even(kind, size, draw(st.sampled_from([tp for tp in TP_SIZES if size % (tp * step) == 0])))


@given(data=st.data(), scheme=st.sampled_from(SCHEMES), seed=st.integers(0, 2**20))
def test_any_cut_to_any_other(data: st.DataObject, scheme: Scheme, seed: int) -> None:
    sizes = [48, 96, 192, 288, 131] if side_of(scheme) == 128 else [48, 64, 96, 144, 37]
    if scheme.element == "E2M1":
        sizes[-1] = 50
    kind = data.draw(st.sampled_from(["rows", "columns", "swiglu"]))
    # The last one has no even halves, for SwiGLU or for packed codes.
    rows = st.sampled_from(sizes[:-1] if kind == "swiglu" else sizes)
    shape = data.draw(rows), data.draw(st.sampled_from(sizes))
    target_kind = "swiglu" if kind == "swiglu" else data.draw(st.sampled_from(["rows", "columns"]))
    stack = data.draw(st.sampled_from([(1,), (2,), (1, 2)]))
    names = list(rule_of(scheme).blocks)
    some = st.sampled_from([names, *([n] for n in names)])
    source = saved(
        scheme,
        shape,
        data.draw(cuts(shape, kind, scheme)),
        stack=stack,
        directions=data.draw(some),
        choices=data.draw(st.sampled_from([1, 2, 8])),
        amax=data.draw(st.sampled_from([None, 0.75])),
        seed=seed,
    )
    loaded(source, data.draw(cuts(shape, target_kind, scheme)), data.draw(some))


# Cuts that deserve a name


PAIRS = list(itertools.product(TP_SIZES, repeat=2))
KINDS = ("rows", "columns", "swiglu")


@pytest.mark.parametrize(("number", "source", "target"), [(i, *pair) for i, pair in enumerate(PAIRS)])
def test_every_tensor_parallel_size_to_every_other(number: int, source: int, target: int) -> None:
    # Every scheme and every kind of cut in turn.
    scheme, kind = SCHEMES[number % len(SCHEMES)], KINDS[number // 2 % len(KINDS)]
    size, shape = 96, {"rows": (96, 48), "columns": (48, 96), "swiglu": (192, 48)}[kind]
    loaded(saved(scheme, shape, even(kind, size, source), choices=2, amax=0.75), even(kind, size, target))


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
@pytest.mark.parametrize("kind", ["rows", "columns", "swiglu"])
def test_block_edges_there_and_back(scheme: Scheme, kind: str) -> None:
    # TP4 -> TP2 -> TP8 -> TP4; a shard of TP8 is one block wide.
    side = side_of(scheme)
    size, shape = 8 * side, {"rows": (8 * side, 32), "columns": (32, 8 * side), "swiglu": (16 * side, 32)}[kind]
    first = saved(scheme, shape, even(kind, size, 4), amax=0.75)
    source = first
    for parts in (2, 8, 4):
        cut = even(kind, size, parts)
        ranks = loaded(source, cut, strict_bitwise=True)
        backend = Recorder()
        again = [one_rank() for _ in ranks]
        for part, (old, new) in enumerate(zip(ranks, again, strict=True)):
            for name, tensor in old.tensors.items():
                hold(new, name, cut.entry(tensor, shape, part, first.stack, (0,)), tensor)
        source = Saved(scheme, shape, first.stack, first.whole, backend, save(again, backend, DIRECTORY), first.stored)
    for part, rank in enumerate(ranks):
        original = tensor_of(pick(first.whole[0,], even(kind, size, 4).indices(shape, part)), scheme)
        assert component_bytes(rank.tensors["(0,)"]) == component_bytes(original)


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
@pytest.mark.parametrize("kind", ["rows", "columns", "swiglu"])
def test_the_saved_cut_is_exact_wherever_it_lies(scheme: Scheme, kind: str) -> None:
    # 48-row shards and 24-row SwiGLU halves start and end inside blocks of every scheme.
    shape = (192, 96) if kind != "columns" else (96, 192)
    size = 96 if kind == "swiglu" else 192
    loaded(saved(scheme, shape, even(kind, size, 4), stack=(1, 2)), even(kind, size, 4), strict_bitwise=True)


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
@pytest.mark.parametrize("kind", KINDS)
def test_equal_scales_are_exact_on_any_cut(scheme: Scheme, kind: str) -> None:
    # Shards of 24 elements, of which a block of 32 or more joins two or parts of two.
    size, shape = 96, {"rows": (96, 48), "columns": (48, 96), "swiglu": (192, 48)}[kind]
    source = saved(scheme, shape, even(kind, size, 4), choices=1, amax=0.75)
    for parts in (1, 3):
        loaded(source, even(kind, size, parts), strict_bitwise=True)


@each_scheme
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_uneven_fragments(scheme: Scheme, kind: str) -> None:
    shape = (192, 32) if kind == "rows" else (32, 192)
    cut = Cut(kind, (0, 40, 128, 130, 192), even=False)
    source = saved(scheme, shape, cut)
    loaded(source, cut, strict_bitwise=True)
    for other in (Cut(kind, (0, 64, 150, 192), even=False), even(kind, 192, 3)):
        loaded(source, other)


def test_shards_of_64_rows_inside_blocks_of_128() -> None:
    # 192 rows are a block and a half: TP1 joins two shards in its first block, and keeps the third one as it is.
    source = saved(Scheme("blockwise_2d", "E4M3"), (192, 128), even("rows", 192, 3))
    assert len(np.unique(source.whole[0,]["rowwise"].scale)) == 3
    for parts, blocks in {1: [1], 2: [1, 1], 3: [0] * 3, 6: [0] * 6}.items():
        ranks = loaded(source, even("rows", 192, parts))
        assert [rank.outcomes["(0,)"].requantized_blocks for rank in ranks] == blocks


@each_scheme
def test_swiglu_halves_merge_in_one_requantization(scheme: Scheme) -> None:
    # Gate and up projection of 44 rows, no multiple of a block, each in two shards with scales of their own.
    loaded(saved(scheme, (88, 48), even("rows", 88, 4)), even("swiglu", 44, 1))


@each_scheme
def test_unequal_scales_inside_a_block_are_refused_by_strict_bitwise(scheme: Scheme) -> None:
    # 24-row shards: a block of 32 or more rows, or one amax, joins two of them.
    source, cut = saved(scheme, (48, 48), even("rows", 48, 2)), even("rows", 48, 1)
    if scheme.name == "nvfp4_row_scaled":
        loaded(source, cut, strict_bitwise=True)
        return
    ranks = destinations(source, cut)
    before = component_bytes(ranks[0].tensors["(0,)"])
    with pytest.raises(PlanningError, match=rf"{KEY}: found \d+ block\(s\)"):
        load(ranks, source.backend, DIRECTORY, source.manifest, LoadOptions(strict_bitwise=True))
    assert source.backend.code_reads() == []
    assert component_bytes(ranks[0].tensors["(0,)"]) == before
    loaded(source, cut)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d"])
def test_merging_shards_of_another_amax_quantizes_all_blocks_again(name: str) -> None:
    scheme, shape, cut = Scheme(name, "E2M1"), (64, 64), even("rows", 64, 2)
    ranks, whole = [one_rank(), one_rank()], Sides()
    parts = [
        random_sides(scheme, (32, 64), np.random.default_rng(i), rule_of(scheme).blocks, choices=1, amax=amax)
        for i, amax in enumerate((0.5, 0.75))
    ]
    for part, (rank, sides) in enumerate(zip(ranks, parts, strict=True)):
        hold(rank, "w", cut.entry(tensor_of(sides, scheme), shape, part, (1,), (0,)), tensor_of(sides, scheme))
    for direction in parts[0]:
        whole[direction] = elements.joined([p[direction] for p in parts])
    backend = Recorder()
    source = Saved(
        scheme, shape, (1,), {(0,): whole}, backend, save(ranks, backend, DIRECTORY), list(rule_of(scheme).blocks)
    )
    merged = loaded(source, even("rows", 64, 1))
    assert merged[0].outcomes["(0,)"].requantized_blocks == {"nvfp4": 2 * 64 * 4, "nvfp4_2d": 16}[name]


# What is read


def reads(source: Saved) -> dict[str, int]:
    """Component -> regions that were read since the last call."""
    found = Counter(r.key.removeprefix(f"{KEY}.").partition("@")[0] for r in set(source.backend.reads) if r.box.size)
    source.backend.reads.clear()
    return dict(found)


SHARDS = {
    "even": even("rows", 192, 8),
    "uneven": Cut("rows", (0, 20, 40, 96, 98, 104, 150, 192), even=False),
}


@each_scheme
@pytest.mark.parametrize(("saved_cut", "met"), [("even", 4), ("uneven", 3)])
def test_only_the_fragments_that_are_met_are_read(scheme: Scheme, saved_cut: str, met: int) -> None:
    # The first half meets so many of all fragments.
    source = saved(scheme, (192, 48), SHARDS[saved_cut])
    rank = destinations(source, even("rows", 192, 2))[0]
    source.backend.reads.clear()
    load([rank], source.backend, DIRECTORY, source.manifest)
    components = [name for spec in scheme.directions for name in (spec.data, *(g.component for g in spec.grids))]
    assert reads(source) == dict.fromkeys(components, met)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if len(s.directions) > 1], ids=scheme_id)
@pytest.mark.parametrize("wanted", ["rowwise", "columnwise"])
def test_a_direction_that_the_destination_has_not_is_not_read(scheme: Scheme, wanted: str) -> None:
    source = saved(scheme, (96, 48), even("rows", 96, 2))
    source.backend.reads.clear()
    loaded(source, even("rows", 96, 2), [wanted], strict_bitwise=True)
    [spec] = [spec for spec in scheme.directions if spec.name == wanted]
    assert set(reads(source)) == {spec.data, *(grid.component for grid in spec.grids)}


def part_entry(tensor: torch.Tensor, offset: tuple[int, int], shape: tuple[int, int]) -> Any:
    """A fragment that lies anywhere."""
    return ShardedTensor(KEY, tensor, tensor.dtype, tuple(tensor.shape), shape, offset, None)


@each_scheme
def test_destinations_may_overlap(scheme: Scheme) -> None:
    # All on one rank; two of them begin at one place, and differ in extent.
    source = saved(scheme, (96, 32), Cut("rows", (0, 40, 96), even=False), stack=())
    rank, regions = one_rank(), {"first": (0, 64), "all": (0, 96), "middle": (32, 80)}
    for name, (start, stop) in regions.items():
        tensor = empty(scheme, (stop - start, 32))
        hold(rank, name, part_entry(tensor, (start, 0), (96, 32)), tensor)
    load([rank], source.backend, DIRECTORY, source.manifest)
    for name, (start, stop) in regions.items():
        region = pick(source.whole[()], (np.arange(start, stop), np.arange(32)))
        check(rank, name, region, source, list(rule_of(scheme).blocks))


# Packed codes


ODD = [("nvfp4", (0, 3)), ("nvfp4", (3, 0)), ("nvfp4_2d", (0, 3)), ("nvfp4_row_scaled", (0, 3))]


@pytest.mark.parametrize(("name", "offset"), ODD)
def test_packed_fragments_at_odd_offsets_are_refused_at_save(name: str, offset: tuple[int, int]) -> None:
    scheme = Scheme(name, "E2M1")
    sides = random_sides(scheme, (16, 16), np.random.default_rng(0), rule_of(scheme).blocks, choices=8)
    rank, backend = one_rank(), Recorder()
    hold(rank, "w", part_entry(tensor_of(sides, scheme), offset, (19, 19)), tensor_of(sides, scheme))
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*odd: packed E2M1"):
        save([rank], backend, DIRECTORY)
    assert not backend.chunks


@pytest.mark.parametrize(("name", "offset"), ODD)
def test_packed_destinations_at_odd_offsets_are_refused_at_load(name: str, offset: tuple[int, int]) -> None:
    scheme, rank = Scheme(name, "E2M1"), one_rank()
    source = saved(scheme, (48, 48), even("rows", 48, 1), stack=())
    tensor = empty(scheme, (16, 16))
    before = component_bytes(tensor)
    hold(rank, "w", part_entry(tensor, offset, (48, 48)), tensor)
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*odd: packed E2M1 .* expected .*do not split a byte"):
        load([rank], source.backend, DIRECTORY, source.manifest)
    assert component_bytes(tensor) == before
    assert source.backend.code_reads() == []


def test_odd_swiglu_halves_of_packed_codes() -> None:
    # Halves of 3 rows: columnwise codes are packed along rows, rowwise ones are not.
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*odd: packed E2M1"):
        saved(Scheme("nvfp4", "E2M1"), (6, 16), even("swiglu", 3, 1))
    source = saved(Scheme("nvfp4_2d", "E2M1"), (6, 16), even("swiglu", 3, 1))
    loaded(source, even("swiglu", 3, 1), strict_bitwise=True)
    loaded(source, even("swiglu", 3, 3))


def test_an_odd_cut_of_packed_codes_into_high_precision_is_refused_by_key() -> None:
    source = saved(Scheme("nvfp4_2d", "E2M1"), (16, 16), even("columns", 16, 1))
    rank = one_rank()
    tensor = torch.zeros(16, 3, dtype=torch.bfloat16)
    hold(rank, "w", ShardedTensor(KEY, tensor, tensor.dtype, (16, 3), (1, 16, 16), (0, 0, 5), None, 0, 1), tensor)
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*odd"):
        load([rank], source.backend, DIRECTORY, source.manifest)


# Values


@each_scheme
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_a_high_precision_destination_gets_the_values(scheme: Scheme, kind: str) -> None:
    shape, cut = (96, 96), even(kind, 96, 3)
    source = saved(scheme, shape, even(kind, 96, 2))
    ranks = [one_rank() for _ in range(3)]
    for part, rank in enumerate(ranks):
        size = tuple(len(i) for i in cut.indices(shape, part))
        tensor = torch.zeros(size, dtype=torch.float32)
        hold(rank, "w", cut.entry(tensor, shape, part, (1,), (0,)), tensor)
    load(ranks, source.backend, DIRECTORY, source.manifest)
    for part, rank in enumerate(ranks):
        expected = pick(source.whole[0,], cut.indices(shape, part))["rowwise"].values(rule_of(scheme))
        found = rank.loaded["w"]
        assert not isinstance(found, BlockScaledTensor)
        np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


# Padded tables


ONE = {"blockwise": np.float32(1), "mxfp8": np.uint8(127), "nvfp4": np.uint8(0x38)}
"""A scale of 1, by family."""


def table_entry(tensor: torch.Tensor, part: int, parts: int) -> Any:
    """Rows of a table that another layout may have padded to another number of rows."""
    return ShardedTensor.from_rank_offsets(KEY, tensor, (0, part, parts), allow_shape_mismatch=True)


def padded(whole: Sides, scheme: Scheme, first: int, rows: int) -> Sides:
    """Rows of a table, also beyond its end: code 0, and whatever scale keeps the block that they are in as it is."""
    out, one = Sides(), ONE[scheme.name.partition("_")[0]]
    for direction, side in whole.items():
        inside = side[first : first + rows]
        shape, known = (rows, side.codes.shape[1]), len(inside.codes)
        part = elements.Side(np.zeros(shape, np.uint8), np.full(shape, one), np.ones(shape, np.float32))
        part.codes[:known], part.scale[:known], part.amax[:known] = inside.codes, inside.scale, inside.amax
        if known:
            height = rule_of(scheme).blocks[direction][0]
            part.scale[known : -(-known // height) * height] = inside.scale[-1]
            part.amax[known:] = 1 if scheme.name == "nvfp4_row_scaled" else inside.amax[-1]
        out[direction] = part
    return out


@each_scheme
@pytest.mark.parametrize("choices", [1, 8], ids=["equal", "unequal"])
@pytest.mark.parametrize("rows", [(32,), (16, 16), (10, 10, 10), (9, 9), (14,)], ids=str)
def test_rows_beyond_a_table_are_zero_and_choose_no_scale(scheme: Scheme, choices: int, rows: tuple[int, ...]) -> None:
    # 20 rows were saved, in units that make some blocks end inside the table, cross its end or lie beyond it.
    unit = max(2, side_of(scheme) // 16)
    rng, whole, ranks, backend = np.random.default_rng(0), Sides(), [one_rank(), one_rank()], Recorder()
    for part, rank in enumerate(ranks):
        sides = random_sides(scheme, (10 * unit, 32), rng, rule_of(scheme).blocks, choices=choices, amax=0.75)
        own = np.arange(10 * unit) + part * 10 * unit
        put(whole, (20 * unit, 32), (own, np.arange(32)), sides)
        hold(rank, "w", table_entry(tensor_of(sides, scheme), part, 2), tensor_of(sides, scheme))
    manifest = save(ranks, backend, DIRECTORY)
    source = Saved(scheme, (20 * unit, 32), (), {(): whole}, backend, manifest, list(whole))
    wanted = [one_rank() for _ in rows]
    for part, (rank, size) in enumerate(zip(wanted, rows, strict=True)):
        tensor = empty(scheme, (size * unit, 32))
        hold(rank, "w", table_entry(tensor, part, len(rows)), tensor)
    load(wanted, backend, DIRECTORY, manifest)
    for part, (rank, size) in enumerate(zip(wanted, rows, strict=True)):
        check(rank, "w", padded(whole, scheme, part * size * unit, size * unit), source, list(whole))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d"])
def test_blocks_beyond_a_table_have_scale_1_whatever_the_amax(name: str) -> None:
    # 32 rows were saved, of two amax: all of their blocks are quantized again, and none of the 32 rows beyond them.
    scheme, backend = Scheme(name, "E2M1"), Recorder()
    ranks = [one_rank(), one_rank()]
    for part, (rank, amax) in enumerate(zip(ranks, (0.5, 0.75), strict=True)):
        rng = np.random.default_rng(part)
        sides = random_sides(scheme, (16, 16), rng, rule_of(scheme).blocks, choices=1, amax=amax)
        hold(rank, "w", table_entry(tensor_of(sides, scheme), part, 2), tensor_of(sides, scheme))
    manifest, tensor, wanted = save(ranks, backend, DIRECTORY), empty(scheme, (64, 16)), one_rank()
    hold(wanted, "w", table_entry(tensor, 0, 1), tensor)
    load([wanted], backend, DIRECTORY, manifest)
    for side in sides_of(tensor).values():
        assert not side.codes[32:].any()
        assert set(side.scale[32:].flat) == {ONE["nvfp4"]}
    assert wanted.outcomes["w"].requantized_blocks == {"nvfp4": 32 + 2 * 16, "nvfp4_2d": 2}[name]


# Layers of one stack


MXFP8, NVFP4 = Scheme("mxfp8", "E4M3"), Scheme("nvfp4", "E2M1")
STACKS = {
    "nvfp4 with mxfp8 edges": (MXFP8, NVFP4, NVFP4, MXFP8),
    "two element formats": (MXFP8, Scheme("mxfp8", "E5M2"), Scheme("mxfp8", "E5M2"), MXFP8),
    "1-D and 2-D": (Scheme("nvfp4_2d", "E2M1"), NVFP4, Scheme("mxfp8_2d", "E4M3"), Scheme("blockwise_1d", "E5M2")),
    "a layer in high precision": (None, NVFP4, MXFP8, NVFP4),
}
LAYER = (96, 64)
Indices = list[NDArray[np.int64]]


def stages(number: int, cut: Cut, num_layers: int, make: Callable[[int, Indices], torch.Tensor]) -> list[Rank]:
    """Ranks of so many pipeline stages; `make` gives a shard of a layer."""
    ranks = [one_rank() for _ in range(number * cut.parts)]
    for layer, part in itertools.product(range(num_layers), range(cut.parts)):
        rank = ranks[layer * number // num_layers * cut.parts + part]
        tensor = torch.nn.Parameter(make(layer, cut.indices(LAYER, part)))
        hold(rank, str(layer), cut.entry(tensor, LAYER, part, (num_layers,), (layer,)), tensor)
    return ranks


@pytest.mark.parametrize("schemes", STACKS.values(), ids=STACKS)
def test_layers_of_one_stack_in_different_schemes(schemes: tuple[Scheme | None, ...]) -> None:
    rng, cut, backend = np.random.default_rng(0), even("rows", 96, 2), Recorder()
    whole: list[Sides] = [Sides() for _ in schemes]
    plain = torch.from_numpy(rng.standard_normal(LAYER)).to(torch.bfloat16)

    def make(layer: int, indices: Indices) -> torch.Tensor:
        scheme, size = schemes[layer], tuple(len(i) for i in indices)
        if scheme is None:
            return plain[np.ix_(*indices)]
        sides = random_sides(scheme, size, rng, rule_of(scheme).blocks, choices=2, amax=0.75)
        put(whole[layer], LAYER, indices, sides)
        return tensor_of(sides, scheme)

    def blank_one(layer: int, indices: Indices) -> torch.Tensor:
        scheme, size = schemes[layer], tuple(len(i) for i in indices)
        return torch.zeros(size, dtype=torch.bfloat16) if scheme is None else empty(scheme, size)

    manifest = save(stages(4, cut, len(schemes), make), backend, DIRECTORY)
    quantized = tuple(i for i, s in enumerate(schemes) if s is not None)
    assert manifest.mixed == {KEY: MixedStack(len(schemes), quantized)}
    assert [manifest.tensors[f"{KEY}.layer_{i}"].scheme for i in quantized] == [schemes[i] for i in quantized]
    for number, other in ((1, cut), (2, cut), (1, even("rows", 96, 1)), (2, even("columns", 64, 4))):
        ranks = stages(number, other, len(schemes), blank_one)
        load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=other == cut))
        for position, rank in enumerate(ranks):
            indices = other.indices(LAYER, position % other.parts)
            for name, scheme in ((n, schemes[int(n)]) for n in rank.tensors):
                if scheme is None:
                    assert component_bytes(rank.loaded[name]) == component_bytes(plain[np.ix_(*indices)])
                    continue
                source = Saved(scheme, LAYER, (), {}, backend, manifest, list(rule_of(scheme).blocks))
                check(rank, name, pick(whole[int(name)], indices), source, source.stored)


# Per-tensor scaling


def test_one_scale_for_all_ranks_there_and_back() -> None:
    model = make_model(Scheme("per_tensor", "E4M3"), Scheme("per_tensor", "E5M2"))
    ranks = build(model, Layout(4))
    for tp in (2, 8, 4):
        backend = Recorder()
        manifest = save(ranks, backend, DIRECTORY)
        ranks = build(model, Layout(tp), empty=True)
        load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
        check_model(model, ranks)
