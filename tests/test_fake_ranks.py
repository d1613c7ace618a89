"""Every layout to every other, with fake ranks in one process: bytes against NumPy slices of the whole."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor, join
from megatron_fp8_dist.sharding.manifest import Manifest
from tests.elementwise import component_bytes, elements_of, error_in_bound
from tests.fakemodel import E4M3, E5M2, SHAPES, Layout, Model, cut_indices, make_model
from tests.fakeranks import (
    DIRECTORY,
    Rank,
    Recorder,
    build,
    check,
    check_quantized,
    kinds,
    load,
    pair_id,
    rank_with,
    save,
    single,
    through,
    whole_of,
)
from tests.shards import random_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

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
