"""Stacks whose layers are not all quantized alike, with fake ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from megatron_fp8_dist.sharding.manifest import MixedStack
from tests.elementwise import component_bytes
from tests.fakemodel import E4M3, E5M2, SHAPES, Layout, make_model
from tests.fakeranks import DIRECTORY, Rank, Recorder, build, kinds, load, pair_id, rank_with, save, single, through
from tests.shards import random_shard

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

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


@pytest.mark.parametrize("schemes", [MIXED[:3], [*MIXED, None, None]], ids=["fewer", "more"])
def test_another_number_of_layers_is_a_problem_on_every_rank(schemes: list[Scheme | None]) -> None:
    backend = Recorder()
    manifest = save(build(make_model(*MIXED), Layout(1)), backend, DIRECTORY)
    # Each pipeline stage alone, also one whose layers were all saved.
    for rank in build(make_model(*schemes), Layout(1, len(schemes)), empty=True):
        with pytest.raises(PlanningError, match=rf"found 4 layers saved, expected {len(schemes)} layers"):
            load([rank], backend, DIRECTORY, manifest)


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
