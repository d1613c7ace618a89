"""Every scheme on any cut to any other, with fake ranks in one process, against a model that knows only elements."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from tests import elements
from tests.elements import Sides, conform, random_sides, rule_of, sides_of, tensor_of
from tests.elementwise import component_bytes
from tests.fakemodel import Layout
from tests.fakeranks import Rank, Recorder, blank, load, save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")

DIRECTORY = Path("checkpoint")
KEY = "layers.weight"
SCHEMES = [
    Scheme("blockwise_2d", "E4M3"),
    Scheme.of("blockwise_2d", "E5M2", power_of_two=0),
    Scheme("blockwise_1d", "E4M3"),
    Scheme.of("blockwise_1d", "E4M3", power_of_two=0),
    Scheme("mxfp8", "E4M3"),
    Scheme("mxfp8", "E5M2"),
    Scheme("mxfp8_2d", "E4M3"),
    Scheme("nvfp4", "E2M1"),
    Scheme("nvfp4_2d", "E2M1"),
    Scheme("nvfp4_row_scaled", "E2M1"),
    Scheme.of("nvfp4_2d", "E2M1", e4m3_max=256, use_4over6=1),
]


def scheme_id(value: Any) -> str | None:
    if isinstance(value, Scheme):
        return "-".join([value.name, value.element, *(f"{k}={v}" for k, v in value.flags)])
    return None


each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)


def side_of(scheme: Scheme) -> int:
    """The longer side of a block."""
    return max(max(b) for b in rule_of(scheme).blocks.values())


@dataclass(frozen=True)
class Cut:
    """How a weight of `shape` is cut into shards."""

    kind: str
    """"rows", "columns" or "swiglu"."""
    edges: tuple[int, ...]
    """From 0 to the size of the axis; of a half, for SwiGLU."""
    even: bool = True

    @property
    def axis(self) -> int:
        """The axis that is cut."""
        return 1 if self.kind == "columns" else 0

    @property
    def parts(self) -> int:
        """Number of shards."""
        return len(self.edges) - 1

    def indices(self, shape: tuple[int, int], part: int) -> list[NDArray[np.int64]]:
        """Indices, per axis, of one shard."""
        out = [np.arange(s) for s in shape]
        own = np.arange(self.edges[part], self.edges[part + 1])
        out[self.axis] = np.concatenate([own, own + shape[0] // 2]) if self.kind == "swiglu" else own
        return out

    def entry(self, tensor: torch.Tensor, shape: tuple[int, int], part: int, stack: Stack, index: Stack) -> Any:
        """The entry that maps one shard of one weight of a stack."""
        offsets = tuple((a, i, n) for a, (i, n) in enumerate(zip(index, stack, strict=True)))
        if self.even:
            where = (*offsets, (len(offsets) + self.axis, part, self.parts))
            sharded = ShardedTensor.from_rank_offsets(KEY, tensor, *where, prepend_axis_num=len(offsets))
            return apply_swiglu_sharded_factory(sharded, offsets) if self.kind == "swiglu" else sharded
        first = [0, 0]
        first[self.axis] = self.edges[part]
        return ShardedTensor(
            KEY, tensor, tensor.dtype, tuple(tensor.shape), (*stack, *shape), (*index, *first), None, 0, len(stack)
        )


Stack = tuple[int, ...]
"""Number of layers, or layers and experts; or an index into them."""


def even(kind: str, size: int, parts: int) -> Cut:
    """Equal parts of an axis of `size` (of a half, for SwiGLU)."""
    return Cut(kind, tuple(range(0, size + 1, size // parts)))


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what every element of it is."""

    scheme: Scheme
    shape: tuple[int, int]
    stack: Stack
    whole: dict[Stack, Sides]
    backend: Recorder
    manifest: Any
    stored: list[str]


def one_rank() -> Rank:
    return Rank(next(Layout(1).places()))


def put(rank: Rank, name: str, entry: Any, tensor: torch.Tensor) -> None:
    rank.state_dict[name], rank.tensors[name] = entry, tensor


def pick(sides: Sides, indices: Sequence[NDArray[np.int64]]) -> Sides:
    """The elements of a shard."""
    return {d: side[np.ix_(*indices)] for d, side in sides.items()}


def saved(
    scheme: Scheme,
    shape: tuple[int, int],
    cut: Cut,
    *,
    stack: Stack = (1,),
    directions: Sequence[str] | None = None,
    choices: int = 8,
    amax: float | None = None,
    seed: int = 0,
) -> Saved:
    """Save a stack of weights, each shard of them quantized alone."""
    rng, stored = np.random.default_rng(seed), list(directions or rule_of(scheme).blocks)
    ranks, whole = [one_rank() for _ in range(cut.parts)], dict[Stack, Sides]()
    for index in itertools.product(*map(range, stack)):
        for part, rank in enumerate(ranks):
            indices = cut.indices(shape, part)
            size = tuple(len(i) for i in indices)
            sides = random_sides(scheme, size, rng, stored, choices=choices, amax=amax)
            for direction, side in sides.items():
                into = whole.setdefault(index, {}).setdefault(direction, _zeros(side, shape))
                window = np.ix_(*indices)
                into.codes[window], into.scale[window], into.amax[window] = side.codes, side.scale, side.amax
            tensor = torch.nn.Parameter(tensor_of(sides, scheme))
            put(rank, str(index), cut.entry(tensor, shape, part, stack, index), tensor)
    backend = Recorder()
    return Saved(scheme, shape, stack, whole, backend, save(ranks, backend, DIRECTORY), stored)


def _zeros(like: elements.Side, shape: tuple[int, int]) -> elements.Side:
    return elements.Side(np.zeros(shape, np.uint8), np.zeros(shape, like.scale.dtype), np.zeros(shape, np.float32))


def loaded(source: Saved, cut: Cut, directions: Sequence[str] | None = None, **options: Any) -> list[Rank]:
    """Load a checkpoint at another cut, and compare every destination with the model's answer."""
    scheme, shape = source.scheme, source.shape
    wanted = list(directions or rule_of(scheme).blocks)
    ranks, rng = [one_rank() for _ in range(cut.parts)], np.random.default_rng(99)
    places: dict[tuple[int, str], tuple[Stack, int]] = {}
    for (number, rank), index in itertools.product(enumerate(ranks), source.whole):
        size = tuple(len(i) for i in cut.indices(shape, number))
        tensor = torch.nn.Parameter(blank(tensor_of(random_sides(scheme, size, rng, wanted, choices=1), scheme)))
        put(rank, str(index), cut.entry(tensor, shape, number, source.stack, index), tensor)
        places[number, str(index)] = index, number
    load(ranks, source.backend, DIRECTORY, source.manifest, LoadOptions(**options))
    for (number, name), (index, part) in places.items():
        region = pick(source.whole[index], cut.indices(shape, part))
        check(ranks[number], name, region, source, wanted)
    return ranks


def check(rank: Rank, name: str, region: Sides, source: Saved, wanted: list[str]) -> None:
    """One destination holds what the model says, byte for byte, and what was quantized again is inside the bound."""
    answer = conform(region, source.scheme, source.stored, wanted)
    found, outcome = sides_of(rank.tensors[name]), rank.outcomes[name]
    assert list(found) == wanted
    for direction, side in answer.sides.items():
        np.testing.assert_array_equal(found[direction].scale, side.scale, err_msg=direction)
        np.testing.assert_array_equal(found[direction].amax, side.amax, err_msg=direction)
        np.testing.assert_array_equal(found[direction].codes, side.codes, err_msg=direction)
        changed = answer.again[direction]
        assert elements.error_in_bound(answer.old[changed], found[direction][changed], rule_of(source.scheme))
    assert (outcome.kind, outcome.requantized_blocks) == ("requantized" if answer.blocks else "exact", answer.blocks)


# At random


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], kind: str, scheme: Scheme) -> Cut:
    """A cut of a weight: tensor-parallel 1 to 8, or uneven fragments."""
    size = shape[1] if kind == "columns" else shape[0] // (2 if kind == "swiglu" else 1)
    step = 2 if scheme.element == "E2M1" else 1
    if kind != "swiglu" and draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, size // step - 1), max_size=4))
        return Cut(kind, (0, *(step * i for i in sorted(inner)), size), even=False)
    return even(kind, size, draw(st.sampled_from([p for p in (1, 2, 3, 4, 6, 8) if size % (p * step) == 0])))


@given(data=st.data(), scheme=st.sampled_from(SCHEMES), seed=st.integers(0, 2**20))
def test_any_cut_to_any_other(data: st.DataObject, scheme: Scheme, seed: int) -> None:
    sizes = [48, 96, 192, 288] if side_of(scheme) == 128 else [48, 64, 96, 144]
    shape = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    kind = data.draw(st.sampled_from(["rows", "columns", "swiglu"]))
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
                put(new, name, cut.entry(tensor, shape, part, first.stack, (0,)), tensor)
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
def test_unequal_scales_inside_a_block_are_refused_by_strict_bitwise(scheme: Scheme) -> None:
    # 24-row shards: a block of 32 or more rows, or one amax, joins two of them.
    shape = (48, 48)
    source = saved(scheme, shape, even("rows", 48, 2))
    if scheme.name == "nvfp4_row_scaled":
        loaded(source, even("rows", 48, 1), strict_bitwise=True)
        return
    with pytest.raises(PlanningError, match=rf"{KEY}: found \d+ block\(s\)"):
        loaded(source, even("rows", 48, 1), strict_bitwise=True)
    assert source.backend.code_reads() == []
    loaded(source, even("rows", 48, 1))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d"])
def test_merging_shards_of_another_amax_quantizes_all_blocks_again(name: str) -> None:
    scheme, shape, cut = Scheme(name, "E2M1"), (64, 64), even("rows", 64, 2)
    ranks, whole = [one_rank(), one_rank()], Sides()
    parts = [
        random_sides(scheme, (32, 64), np.random.default_rng(i), rule_of(scheme).blocks, choices=1, amax=amax)
        for i, amax in enumerate((0.5, 0.75))
    ]
    for part, (rank, sides) in enumerate(zip(ranks, parts, strict=True)):
        put(rank, "w", cut.entry(tensor_of(sides, scheme), shape, part, (1,), (0,)), tensor_of(sides, scheme))
    for direction in parts[0]:
        whole[direction] = elements.joined([p[direction] for p in parts])
    backend = Recorder()
    source = Saved(
        scheme, shape, (1,), {(0,): whole}, backend, save(ranks, backend, DIRECTORY), list(rule_of(scheme).blocks)
    )
    merged = loaded(source, even("rows", 64, 1))
    assert merged[0].outcomes["(0,)"].requantized_blocks == {"nvfp4": 2 * 64 * 4, "nvfp4_2d": 16}[name]


@each_scheme
def test_only_the_fragments_that_are_met_are_read(scheme: Scheme) -> None:
    source = saved(scheme, (192, 48), even("rows", 192, 8))
    cut = even("rows", 192, 2)
    source.backend.reads.clear()
    for part in range(2):
        rank = one_rank()
        tensor = tensor_of(pick(source.whole[0,], cut.indices((192, 48), part)), scheme)
        put(rank, "w", cut.entry(tensor, (192, 48), part, (1,), (0,)), tensor)
        load([rank], source.backend, DIRECTORY, source.manifest)
        directions = rule_of(scheme).blocks
        assert len(source.backend.code_reads()) == 4 * len(directions)
        source.backend.reads.clear()


# Packed codes


def odd_entry(tensor: torch.Tensor, offset: tuple[int, int], shape: tuple[int, int]) -> Any:
    return ShardedTensor(KEY, tensor, tensor.dtype, tuple(tensor.shape), shape, offset, None)


@pytest.mark.parametrize(("name", "offset"), [("nvfp4", (0, 3)), ("nvfp4", (3, 0)), ("nvfp4_2d", (0, 3))])
def test_packed_fragments_at_odd_offsets_are_refused_at_save(name: str, offset: tuple[int, int]) -> None:
    scheme = Scheme(name, "E2M1")
    sides = random_sides(scheme, (16, 16), np.random.default_rng(0), rule_of(scheme).blocks, choices=8)
    rank, backend = one_rank(), Recorder()
    put(rank, "w", odd_entry(tensor_of(sides, scheme), offset, (19, 19)), tensor_of(sides, scheme))
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*odd: packed E2M1"):
        save([rank], backend, DIRECTORY)
    assert not backend.chunks


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
    put(rank, "w", ShardedTensor(KEY, tensor, tensor.dtype, (16, 3), (1, 16, 16), (0, 0, 5), None, 0, 1), tensor)
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
        put(rank, "w", cut.entry(tensor, shape, part, (1,), (0,)), tensor)
    load(ranks, source.backend, DIRECTORY, source.manifest)
    for part, rank in enumerate(ranks):
        expected = pick(source.whole[0,], cut.indices(shape, part))["rowwise"].values(rule_of(scheme))
        found = rank.loaded["w"]
        assert not isinstance(found, BlockScaledTensor)
        np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))
