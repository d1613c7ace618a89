"""Saves, reshards and reloads at random, beside a model that knows nothing but elements."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from megatron_fp8_dist import Scheme
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from tests import elements, fakeranks, formats
from tests.elements import Answer, Sides, conform, random_sides, sides_of, tensor_of
from tests.elementwise import component_bytes, raw, scaled
from tests.fakemodel import Index, Layout, cut_indices, pick, put
from tests.fakeranks import Rank, Recorder, blank
from tests.shards import pointers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from megatron_fp8_dist.sharding.manifest import Manifest

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "per_tensor_rule")

TP_SIZES = (1, 2, 3, 4, 6, 8)
CUTS = ("swiglu", "column", "row", "swiglu")
USAGES = ("both", "both", "rowwise", "columnwise")
GROUPS = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)]
"""Sizes of the pipeline-, expert- and data-parallel groups."""
MOST_RANKS = 8
SIZES = {
    "blockwise": [144, 192, 288],
    "mxfp8": [48, 50, 96, 144],
    "nvfp4": [48, 52, 96, 144],
    "per": [24, 48, 50],
}
"""Family -> sizes of an axis: shards that end inside blocks, and shards of one block and a part of the next."""
WHOLE = max(itertools.chain(*SIZES.values()))
kept_directions = st.sampled_from(["both", "rowwise"])
scale_choices = st.sampled_from([1, 2, 8])
amaxes = st.sampled_from([None, None, 0.75])

LAYERS: dict[str, tuple[Scheme, Scheme]] = {
    "per_tensor": (Scheme("per_tensor", "E4M3"),) * 2,
    "per_tensor of two formats": (Scheme("per_tensor", "E4M3"), Scheme("per_tensor", "E5M2")),
    "blockwise_2d": (Scheme("blockwise_2d", "E4M3"),) * 2,
    "blockwise_2d, plain scales": (Scheme.of("blockwise_2d", "E5M2", power_of_two=0),) * 2,
    "blockwise_1d": (Scheme("blockwise_1d", "E4M3"),) * 2,
    "mxfp8": (Scheme("mxfp8", "E4M3"),) * 2,
    "mxfp8 of two formats": (Scheme("mxfp8", "E4M3"), Scheme("mxfp8", "E5M2")),
    "mxfp8_2d": (Scheme("mxfp8_2d", "E4M3"),) * 2,
    "nvfp4": (Scheme("nvfp4", "E2M1"),) * 2,
    "nvfp4_2d": (Scheme.of("nvfp4_2d", "E2M1", e4m3_max=256, use_4over6=1),) * 2,
    "nvfp4_row_scaled": (Scheme("nvfp4_row_scaled", "E2M1"),) * 2,
    "nvfp4 beside mxfp8": (Scheme("mxfp8", "E4M3"), Scheme("nvfp4", "E2M1")),
}
"""The schemes of two layers."""


_rule_of_blocks = elements.rule_of


def rule_of(scheme: Scheme) -> formats.Rule:
    """The reference rule; a tensor that has one scale is a block that no weight here is larger than."""
    if scheme.name != "per_tensor":
        return _rule_of_blocks(scheme)
    scale = partial(formats.float32_scale, element=scheme.element, power_of_two=False, limit=formats.FLOAT32_MAX)
    return formats.Rule(scheme.element, scale, {"rowwise": (WHOLE, WHOLE)}, np.float32)


@pytest.fixture
def per_tensor_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of elements.py with per-tensor scaling, which is no scheme of blocks."""
    monkeypatch.setattr(elements, "rule_of", rule_of)


Whole = dict[Index, Sides]
"""Layer (and expert) -> the elements of its weight, whole."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The weight of all layers, as a layout maps it."""

    cut: str
    stack: Index
    name: str = "weight"


@dataclass(frozen=True, slots=True)
class Form:
    """How a model lies on its ranks, and which directions its tensors have."""

    layout: Layout
    cut: str
    usage: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A save, and what every element of it is."""

    directory: Path
    manifest: Manifest
    whole: Whole


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor-parallel rank holds of the weight of one layer (and expert)."""

    index: Index
    tp: int
    indices: tuple[NDArray[np.int64], ...]

    @property
    def name(self) -> str:
        """Its name on a rank."""
        return str(self.index)


def directions_of(scheme: Scheme, usage: str) -> list[str]:
    """The directions that a tensor has; where there is only one, it has that one."""
    names = list(rule_of(scheme).blocks)
    return [n for n in names if usage in ("both", n)] or names[:1]


class Checkpoints(RuleBasedStateMachine):
    """A model on fake ranks, its checkpoints in memory, and what every element of each of them is."""

    schemes: ClassVar[tuple[Scheme, Scheme]]

    @initialize(data=st.data(), seed=st.integers(0, 2**20), stacked=st.booleans(), experts=st.sampled_from([0, 0, 2]))
    def a_model_and_its_checkpoint(self, data: st.DataObject, seed: int, stacked: bool, experts: int) -> None:
        self.rng, self.stacked = np.random.default_rng(seed), stacked
        self.stack = (len(self.schemes), experts) if experts else (len(self.schemes),)
        # Of two families the second one in the alphabet: packed codes allow the fewest cuts.
        sizes = st.sampled_from(SIZES[max(s.name.partition("_")[0] for s in self.schemes)])
        self.shape = data.draw(sizes), data.draw(sizes)
        self.backend, self.checkpoints = Recorder(), list[Checkpoint]()
        self.form = self.draw_form(data)
        self.whole = self.random_weights(data.draw(scale_choices), data.draw(amaxes))
        self.ranks = self.build(self.form, self.whole)
        self.save(data.draw(kept_directions))

    # Rules

    @rule(directions=kept_directions)
    def save(self, directions: str) -> None:
        directory = Path(f"checkpoint {len(self.checkpoints)}")
        manifest = fakeranks.save(self.ranks, self.backend, directory, directions)
        kept = {
            index: {d: side for d, side in sides.items() if directions == "both" or d == "rowwise"} or sides
            for index, sides in self.whole.items()
        }
        self.checkpoints.append(Checkpoint(directory, manifest, kept))
        # On the saved cuts every checkpoint is exact, wherever they lie.
        usage = "rowwise" if directions == "rowwise" and self.form.usage == "both" else self.form.usage
        form = replace(self.form, usage=usage)
        back = self.build(form)
        self.read(back, self.checkpoints[-1], strict_bitwise=True)
        self.check(back, form, kept)

    @rule(data=st.data())
    def load_the_newest_into_another_layout(self, data: st.DataObject) -> None:
        form = self.draw_form(data)
        self.load_into(self.build(form), form, self.checkpoints[-1])

    @rule(data=st.data())
    def load_any_in_place(self, data: st.DataObject) -> None:
        before = [pointers(tensor) for rank in self.ranks for tensor in rank.tensors.values()]
        self.load_into(self.ranks, self.form, data.draw(st.sampled_from(self.checkpoints)))
        assert [pointers(tensor) for rank in self.ranks for tensor in rank.tensors.values()] == before

    @rule(data=st.data())
    def load_bit_for_bit_or_not_at_all(self, data: st.DataObject) -> None:
        form, saved = self.draw_form(data), data.draw(st.sampled_from(self.checkpoints))
        ranks = self.build(form)
        inexact = {shard.name for shard, answer in self.answers(form, saved) if answer.blocks}
        if not inexact:
            self.load_into(ranks, form, saved, strict_bitwise=True)
            return
        before = [component_bytes(tensor) for rank in ranks for tensor in rank.tensors.values()]
        self.backend.reads.clear()
        with pytest.raises(PlanningError) as caught:
            self.read(ranks, saved, strict_bitwise=True)
        keys = {rank.state_dict[name].key for rank in ranks for name in inexact & set(rank.state_dict)}
        assert {problem.key for problem in caught.value.problems} == keys
        assert not self.backend.code_reads()
        assert [component_bytes(tensor) for rank in ranks for tensor in rank.tensors.values()] == before

    @rule(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def load_into_high_precision(self, data: st.DataObject, dtype: torch.dtype) -> None:
        form, saved = self.draw_form(data), data.draw(st.sampled_from(self.checkpoints))
        ranks = self.build(form, dtype=dtype)
        self.read(ranks, saved)
        for shard in self.shards(form):
            side = next(iter(pick(saved.whole[shard.index], shard.indices).values()))
            expected = torch.from_numpy(side.values(rule_of(self.scheme(shard.index)))).to(dtype)
            for rank in self.holding(ranks, shard):
                assert rank.outcomes[shard.name].kind == "dequantized"
                np.testing.assert_array_equal(raw(rank.loaded[shard.name]), raw(expected))

    @rule(data=st.data())
    def change_weights(self, data: st.DataObject) -> None:
        self.whole = self.random_weights(data.draw(scale_choices), data.draw(amaxes))
        for shard in self.shards(self.form):
            new = tensor_of(pick(self.whole[shard.index], shard.indices), self.scheme(shard.index))
            for rank in self.holding(self.ranks, shard):
                for name, component in scaled(rank.tensors[shard.name]).components().items():
                    component.copy_(new.components()[name])

    @rule(data=st.data())
    def switch_usage(self, data: st.DataObject) -> None:
        self.form = replace(self.form, usage=data.draw(st.sampled_from(USAGES)))
        for index, new in self.random_weights(data.draw(scale_choices), data.draw(amaxes)).items():
            self.whole[index] = {d: self.whole[index].get(d, side) for d, side in new.items()}
        self.ranks = self.build(self.form, self.whole)

    @invariant()
    def every_byte_is_the_models(self) -> None:
        self.check(self.ranks, self.form, self.whole)

    # What the rules need

    def scheme(self, index: Index) -> Scheme:
        """The scheme of a layer."""
        return self.schemes[index[0]]

    def fits(self, cut: str, tp: int) -> bool:
        """Whether a cut gives `tp` equal shards, none of which splits a byte."""
        rows, columns = self.shape
        size = {"column": rows, "row": columns, "swiglu": rows // 2}[cut]
        return size % (tp * (2 if any(s.element == "E2M1" for s in self.schemes) else 1)) == 0

    def draw_form(self, data: st.DataObject) -> Form:
        """A layout, a cut that is possible there, and directions."""
        tp = data.draw(st.sampled_from([tp for tp in TP_SIZES if any(self.fits(cut, tp) for cut in CUTS)]))
        cut = data.draw(st.sampled_from([cut for cut in CUTS if self.fits(cut, tp)]))
        groups = [g for g in GROUPS if tp * math.prod(g) <= MOST_RANKS and (g[1] == 1 or len(self.stack) == 2)]
        pp, ep, dp = data.draw(st.sampled_from(groups))
        return Form(Layout(tp, pp, ep, dp), cut, data.draw(st.sampled_from(USAGES)))

    def shards(self, form: Form) -> Iterator[Shard]:
        """Every quantized shard."""
        for index, tp in itertools.product(np.ndindex(*self.stack), range(form.layout.tp)):
            yield Shard(index, tp, cut_indices(form.cut, self.shape, tp, form.layout.tp))

    def holding(self, ranks: list[Rank], shard: Shard) -> Iterator[Rank]:
        """The ranks that hold a shard."""
        return (rank for rank in ranks if rank.place.tp == shard.tp and shard.name in rank.tensors)

    def random_weights(self, choices: int, amax: float | None) -> Whole:
        """Every shard quantized alone, with so many different scales; `amax` is of all shards."""
        whole: Whole = {}
        for shard in self.shards(self.form):
            scheme, size = self.scheme(shard.index), tuple(len(i) for i in shard.indices)
            names = directions_of(scheme, self.form.usage)
            part = random_sides(scheme, size, self.rng, names, choices=choices, amax=amax)
            put(whole.setdefault(shard.index, {}), self.shape, shard.indices, part)
        return whole

    def build(self, form: Form, whole: Whole | None = None, dtype: torch.dtype | None = None) -> list[Rank]:
        """The ranks of a model that holds `whole`, or what no test saves; in high precision where `dtype` is given."""
        ranks = [Rank(place) for place in form.layout.places()]
        for shard in self.shards(form):
            scheme, size = self.scheme(shard.index), tuple(len(i) for i in shard.indices)
            weight = Mapped(form.cut, self.stack)
            for rank in ranks:
                if rank.place.tp != shard.tp or not rank.place.holds(shard.index, self.stack):
                    continue
                if whole is not None:
                    tensor: torch.Tensor = tensor_of(pick(whole[shard.index], shard.indices), scheme)
                elif dtype is not None:
                    tensor = torch.full(size, -0.125, dtype=dtype)
                else:
                    names = directions_of(scheme, form.usage)
                    tensor = blank(tensor_of(random_sides(scheme, size, self.rng, names, choices=1), scheme))
                rank.tensors[shard.name] = torch.nn.Parameter(tensor)
                rank.state_dict[shard.name] = fakeranks.entry(
                    weight, shard.index, rank.place, rank.tensors[shard.name], self.stacked
                )
        return ranks

    def check(self, ranks: list[Rank], form: Form, whole: Whole) -> None:
        """Compare every byte of every rank."""
        for shard in self.shards(form):
            wanted = component_bytes(tensor_of(pick(whole[shard.index], shard.indices), self.scheme(shard.index)))
            for rank in self.holding(ranks, shard):
                assert component_bytes(rank.tensors[shard.name]) == wanted, shard.index

    def read(self, ranks: list[Rank], saved: Checkpoint, **options: Any) -> None:
        """Load, and nothing else."""
        fakeranks.load(ranks, self.backend, saved.directory, saved.manifest, LoadOptions(**options))

    def load_into(self, ranks: list[Rank], form: Form, saved: Checkpoint, **options: Any) -> None:
        """Load, compare what was counted, and go on with these ranks."""
        self.read(ranks, saved, **options)
        whole: Whole = {}
        for shard, answer in self.answers(form, saved):
            put(whole.setdefault(shard.index, {}), self.shape, shard.indices, answer.sides)
            kind, how = "requantized" if answer.blocks else "exact", rule_of(self.scheme(shard.index))
            for rank in self.holding(ranks, shard):
                outcome, found = rank.outcomes[shard.name], sides_of(rank.tensors[shard.name])
                assert (outcome.kind, outcome.requantized_blocks) == (kind, answer.blocks)
                for direction, changed in answer.again.items():
                    assert elements.error_in_bound(answer.old[changed], found[direction][changed], how)
        self.form, self.ranks, self.whole = form, ranks, whole

    def answers(self, form: Form, saved: Checkpoint) -> Iterator[tuple[Shard, Answer]]:
        """What every shard must hold after a load."""
        for shard in self.shards(form):
            scheme, source = self.scheme(shard.index), pick(saved.whole[shard.index], shard.indices)
            yield shard, conform(source, scheme, list(source), directions_of(scheme, form.usage))


@pytest.mark.parametrize("name", LAYERS)
def test_any_way_of_saving_and_loading(name: str) -> None:
    machine = type(f"Checkpoints of {name}", (Checkpoints,), {"schemes": LAYERS[name]})
    small = settings().derandomize
    few = settings(max_examples=4 if small else 100, stateful_step_count=5 if small else 20)
    run_state_machine_as_test(machine, settings=few)
