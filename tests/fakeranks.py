"""Ranks of a parallel layout, one after another in one process, without torch.distributed.

A `Model` is whole weights in NumPy, every element with a scale of its own. A layout cuts it into what each rank holds;
what a load puts into a rank is compared with the same cut of the whole.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import apply_factories, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist.backends.memory import MemoryBackend
from megatron_fp8_dist.compat.host import ShardedTensor, is_main_replica
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.numerics import destination_edges
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from megatron_fp8_dist.sharding.expand import ComponentShard, values_of
from megatron_fp8_dist.sharding.load_plan import LoadPlan, Outcome, expand_for_load, finish_plan, plan_tasks
from megatron_fp8_dist.sharding.manifest import Manifest, build_manifest, check_against_index, metadata_digest
from megatron_fp8_dist.sharding.save_plan import check_replicas, describe, expand_for_save, mixed_stacks, rehearse
from tests.elementwise import Bits, Bytes, Elements, component_bytes, conform, float_bits, raw, scaled, starts

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from megatron_fp8_dist.backends.base import Backend
    from megatron_fp8_dist.sharding.layout import Region

Index = tuple[int, ...]
"""Layer, or layer and expert."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups."""

    tp: int
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def places(self) -> Iterator[Place]:
        """Every rank's place."""
        for pp, ep, dp, tp in itertools.product(*map(range, (self.pp, self.ep, self.dp, self.tp))):
            yield Place(self, tp, pp, ep, dp)

    def __str__(self) -> str:
        return "".join(f"{n}{s}" for n, s in zip(("tp", "pp", "ep", "dp"), self._sizes, strict=True) if s > 1) or "one"

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.tp, self.pp, self.ep, self.dp


@dataclass(frozen=True, slots=True)
class Place:
    """One rank in its layout."""

    layout: Layout
    tp: int
    pp: int
    ep: int
    dp: int

    def holds(self, index: Index, stack: tuple[int, ...]) -> bool:
        """Whether the rank holds a layer (and expert) of a stack."""
        mine = zip(index, stack, (self.pp, self.ep), (self.layout.pp, self.layout.ep), strict=False)
        return all(i * parts // total == part for i, total, part, parts in mine)


def block_of(size: int, part: int, parts: int) -> NDArray[np.int64]:
    """Indices of one of `parts` equal parts."""
    return np.arange(part * size // parts, (part + 1) * size // parts)


def cut_indices(cut: str, shape: tuple[int, ...], tp: int, parts: int) -> tuple[NDArray[np.int64], ...]:
    """Indices, per axis, of what a tensor-parallel rank holds of a weight of `shape`."""
    everything = [np.arange(s) for s in shape]
    if cut == "column":
        everything[0] = block_of(shape[0], tp, parts)
    elif cut == "row":
        everything[1] = block_of(shape[1], tp, parts)
    elif cut == "swiglu":
        half = block_of(shape[0] // 2, tp, parts)
        everything[0] = np.concatenate([half, half + shape[0] // 2])
    return tuple(everything)


CUT_AXIS = {"column": 0, "row": 1, "swiglu": 0}


@dataclass(frozen=True)
class Weight:
    """One weight of every layer, whole."""

    name: str
    cut: str
    """"column", "row", "swiglu" or "norm" (replicated)."""
    codes: Bytes
    """(layers, M, K), (layers, experts, M, K) or (layers, M)."""
    scale: Bits
    """Bits of every element's scale."""
    plain: NDArray[np.float32]
    """What the layers hold that are not quantized."""
    schemes: tuple[Scheme | None, ...]
    """Per layer; None: high precision."""

    @property
    def stack(self) -> tuple[int, ...]:
        """Layers, or layers and experts."""
        return self.codes.shape[: self.codes.ndim - (1 if self.cut == "norm" else 2)]

    def local(self, array: NDArray[Any], index: Index, place: Place) -> NDArray[Any]:
        """What a rank holds of one layer of an array that belongs to this weight."""
        whole: NDArray[Any] = array[index]
        return whole[np.ix_(*cut_indices(self.cut, whole.shape, place.tp, place.layout.tp))]

    def elements(self, index: Index, place: Place) -> Elements:
        """Codes and scales that a rank holds of one layer."""
        codes = self.local(self.codes, index, place)
        return Elements(codes, self.local(self.scale, index, place), np.ones(codes.shape, np.bool_))

    def tensor(self, index: Index, place: Place) -> torch.Tensor:
        """A rank's parameter."""
        scheme = self.schemes[index[0]]
        if scheme is None:
            return torch.from_numpy(self.local(self.plain, index, place)).to(torch.bfloat16)
        elements = self.elements(index, place)
        components: dict[str, torch.Tensor] = {}
        for spec in scheme.directions:
            edges = destination_edges(scheme, spec, elements.codes.shape)
            values = elements.scale[np.ix_(*(e[:-1] for e in edges))].view(np.float32)
            components |= {spec.data: torch.from_numpy(elements.codes), spec.scale.component: torch.from_numpy(values)}
        return BlockScaledTensor.from_components(scheme, components)


@dataclass(frozen=True)
class Model:
    """Whole weights."""

    weights: tuple[Weight, ...]
    stacked: bool
    """Whether layers are a prepended axis of one key; otherwise each has its own key."""

    def with_schemes(self, *schemes: Scheme | None) -> Model:
        """The same model with other schemes for its quantized weights, layer by layer."""
        return replace(self, weights=tuple(w if w.cut == "norm" else replace(w, schemes=schemes) for w in self.weights))


E4M3 = Scheme("per_tensor", "E4M3")
SHAPES = {"column": (8, 8), "row": (8, 8), "swiglu": (16, 8)}


def scales(cut: str, shape: tuple[int, ...], scheme: Scheme, shards: int, rng: np.random.Generator) -> Bits:
    """Every element's scale, where each of `shards` tensor-parallel shards was quantized alone."""
    out = np.zeros(shape, np.float32)
    blocks = scheme.block(scheme.directions[0].scale, 2)
    for part in range(shards):
        indices = cut_indices(cut, shape, part, shards)
        for first in itertools.product(*(starts(len(i), b) for i, b in zip(indices, blocks, strict=True))):
            window = [i[f : None if b is None else f + b] for i, f, b in zip(indices, first, blocks, strict=True)]
            out[np.ix_(*window)] = rng.uniform(0.01, 2.0)
    return out.view(np.uint32)


def weight(
    cut: str, stack: tuple[int, ...], schemes: tuple[Scheme | None, ...], shards: int, seed: int, shape: Sequence[int]
) -> Weight:
    """A weight with random bytes (for exact paths all 256 of them) and distinct scales."""
    rng = np.random.default_rng(seed)
    whole = (*stack, *shape)
    kind = next((s for s in schemes if s is not None), E4M3)
    bits = np.zeros(whole, np.uint32)
    if cut != "norm":
        for index in np.ndindex(*stack):
            bits[index] = scales(cut, tuple(shape), kind, shards, rng)
    codes = rng.integers(0, 256, whole, dtype=np.uint8)
    plain = rng.permutation(np.arange(codes.size, dtype=np.float32) - codes.size / 2).reshape(whole)
    return Weight(f"{cut}.weight", cut, codes, bits, plain, schemes)


def make_model(
    *schemes: Scheme | None,
    stacked: bool = True,
    shards: int = 1,
    experts: int = 0,
    finite: bool = False,
    shapes: dict[str, tuple[int, int]] | None = None,
    seed: int = 0,
) -> Model:
    """A model with one layer per scheme.

    Args:
        schemes: per layer; None is high precision.
        stacked: whether layers are a prepended axis.
        shards: how many tensor-parallel shards were quantized apart; 1 gives scales that are equal on all ranks.
        experts: 0, or the size of a second prepended axis.
        finite: leave out NaN and infinite codes, which say nothing about rounding.
        shapes: of the weights by cut.
        seed: of the random values.
    """
    stack = (len(schemes), experts) if experts else (len(schemes),)
    chosen = SHAPES if shapes is None else shapes
    made = [weight(cut, stack, schemes, shards, seed + i, shape) for i, (cut, shape) in enumerate(chosen.items())]
    if finite:
        made = [replace(w, codes=np.where(w.codes & 0x7F >= 0x7B, w.codes & 0x83, w.codes)) for w in made]
    if not experts:
        made.append(weight("norm", stack, (None,) * len(schemes), 1, seed + 99, (8,)))
    return Model(tuple(made), stacked)


@dataclass
class Rank:
    """What one rank holds."""

    place: Place
    state_dict: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    origins: dict[str, tuple[Weight, Index]] = field(default_factory=dict)
    """Name -> what of the model it is."""
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> the value that a load returned."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Name -> what the plan said of it."""


def entry(weight: Weight, index: Index, place: Place, tensor: torch.Tensor, stacked: bool) -> Any:
    """A parameter's entry, as Megatron's layers make it."""
    offsets = tuple((a, i, n) for a, (i, n) in enumerate(zip(index, weight.stack, strict=True))) if stacked else ()
    key = f"layers.{weight.name}" if stacked else f"layers.{'.'.join(map(str, index))}.{weight.name}"
    if weight.cut == "norm":
        where, replica = offsets, (0, place.tp, place.dp)
    else:
        where = (*offsets, (len(offsets) + CUT_AXIS[weight.cut], place.tp, place.layout.tp))
        replica = (0, 0, place.dp)
    sharded = ShardedTensor.from_rank_offsets(key, tensor, *where, replica_id=replica, prepend_axis_num=len(offsets))
    return apply_swiglu_sharded_factory(sharded, offsets) if weight.cut == "swiglu" else sharded


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, with bytes that no test saves."""
    if not isinstance(tensor, BlockScaledTensor):
        return torch.full_like(tensor, -0.125)
    filled = {n: torch.full_like(c, 0x55 if c.dtype == torch.uint8 else 55.5) for n, c in tensor.components().items()}
    return BlockScaledTensor.from_components(tensor.scheme, filled)


def build(model: Model, layout: Layout, *, empty: bool = False) -> list[Rank]:
    """All ranks of a layout; `empty` ones are to be loaded."""
    ranks = []
    for place in layout.places():
        rank = Rank(place)
        for held in model.weights:
            for index in np.ndindex(*held.stack):
                if place.holds(index, held.stack):
                    name = f"{held.name}.{'.'.join(map(str, index))}"
                    tensor = held.tensor(index, place)
                    rank.tensors[name] = torch.nn.Parameter(blank(tensor) if empty else tensor)
                    rank.state_dict[name] = entry(held, index, place, rank.tensors[name], model.stacked)
                    rank.origins[name] = held, index
        ranks.append(rank)
    return ranks


class Recorder(MemoryBackend):
    """The memory backend, noting every region that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Region] = []

    def read(self, checkpoint_dir: Path, regions: Sequence[Region]) -> list[torch.Tensor]:
        """See `Backend.read`."""
        self.reads += regions
        return super().read(checkpoint_dir, regions)

    def code_reads(self) -> list[Region]:
        """The regions of codes that were read, empty ones left out."""
        return [r for r in self.reads if r.key.endswith("_data") and r.box.size]


def refuse(problems: Sequence[Any]) -> None:
    """Raise, as the strategies do, if there are problems."""
    if problems:
        raise PlanningError("refused", problems)


def save(ranks: Sequence[Rank], backend: Backend, directory: Path) -> Manifest:
    """What the strategies do in a save, rank after rank. Returns the manifest as it is read again."""
    described = [describe(rank.state_dict) for rank in ranks]
    infos = [pickle.loads(pickle.dumps(info)) for info, _ in described]
    mixed, problems = mixed_stacks(infos)
    problems += [p for _, own in described for p in own]
    problems += [p for number, rank in enumerate(ranks) for p in check_replicas(rank.state_dict, infos, number)]
    refuse(problems)
    expansions = [expand_for_save(rank.state_dict, mixed) for rank in ranks]
    refuse([p for expanded in expansions for p in rehearse(expanded)[1]])
    records = []
    for expanded in expansions:
        apply_factories(expanded)
        backend.write(expanded, directory)
        main = [v for v in values_of(expanded) if isinstance(v, ComponentShard) and is_main_replica(v.replica_id)]
        records += [leaf.record for leaf in main if leaf.record is not None]
    manifest = replace(build_manifest(records, {}), digest=metadata_digest(backend.index(directory)))
    return Manifest.loads(manifest.dumps())


def plan(rank: Rank, backend: Backend, directory: Path, manifest: Manifest, options: LoadOptions) -> LoadPlan:
    """What the strategies plan for one rank of a load."""
    made = plan_tasks(rank.state_dict, manifest, backend.index(directory))
    if not made.problems:
        regions = list(dict.fromkeys(r for task in made.tasks.values() for r in task.scale_regions()))
        finish_plan(made, dict(zip(regions, backend.read(directory, regions), strict=True)), options)
    return made


def load(
    ranks: Sequence[Rank],
    backend: Backend,
    directory: Path,
    manifest: Manifest,
    options: LoadOptions | None = None,
    *,
    one_by_one: bool = False,
) -> None:
    """What the strategies do in a load: all plan, then all read.

    Args:
        ranks: filled.
        backend: what reads.
        directory: of the checkpoint.
        manifest: of the checkpoint.
        options: how to load.
        one_by_one: let each parameter read its own components, as `megatron_fp8_dist.load` does.

    Raises:
        PlanningError: with the problems of all ranks; nothing but scales was read.
    """
    refuse(check_against_index(manifest, backend.index(directory)))
    plans = [plan(rank, backend, directory, manifest, options or LoadOptions()) for rank in ranks]
    refuse([p for made in plans for p in made.problems])
    for rank, made in zip(ranks, plans, strict=True):
        for name, value in rank.state_dict.items():
            if id(value) in made.tasks:
                rank.outcomes[name] = made.tasks[id(value)].outcome
        for task in made.tasks.values():
            task.pull = partial(backend.read, directory) if one_by_one else None
        leaves, _, factories = load_preprocess(expand_for_load(rank.state_dict, made))
        rank.loaded = apply_factory_merges(backend.load(leaves, directory), factories)


def check(model: Model, ranks: Sequence[Rank]) -> None:
    """Compare every destination, byte for byte, with the cut of the whole model that was saved."""
    saved = {w.name: w for w in model.weights}
    for rank in ranks:
        for name, (held, index) in rank.origins.items():
            check_one(saved[held.name], rank, name, index)


def check_one(saved: Weight, rank: Rank, name: str, index: Index) -> None:
    """Compare one destination, before and after the model's own load_state_dict."""
    source, tensor = saved.schemes[index[0]], rank.tensors[name]
    plain = torch.from_numpy(saved.local(saved.plain, index, rank.place)).to(torch.bfloat16)
    if source is None:
        np.testing.assert_array_equal(raw(rank.loaded[name]), raw(plain), err_msg=name)
        kind = "quantized" if isinstance(tensor, BlockScaledTensor) else ""
        assert rank.outcomes.get(name, Outcome("")).kind == kind, name
    elif isinstance(tensor, BlockScaledTensor):
        check_quantized(saved.elements(index, rank.place), source, tensor, rank.outcomes[name])
    else:
        values = saved.elements(index, rank.place).values(source.element)
        np.testing.assert_array_equal(raw(rank.loaded[name]), raw(torch.from_numpy(values).to(torch.bfloat16)))
        assert rank.outcomes[name].kind == "dequantized"
    before = component_bytes(tensor)
    with torch.no_grad():
        tensor.copy_(rank.loaded[name])
    if source is not None and isinstance(tensor, BlockScaledTensor):
        assert component_bytes(tensor) == before
    elif isinstance(tensor, BlockScaledTensor):
        assert component_bytes(tensor) == component_bytes(BlockScaledTensor.quantize(plain, tensor.scheme))


def check_quantized(source: Elements, scheme: Scheme, destination: torch.Tensor, outcome: Outcome) -> None:
    """Compare a quantized destination with the model's answer, and what the plan said of it."""
    tensor = scaled(destination)
    spec = tensor.scheme.directions[0]
    blocks = tensor.scheme.block(spec.scale, 2)
    codes, values, count = conform(source, scheme.element, tensor.scheme.element, blocks)
    np.testing.assert_array_equal(tensor.components()[spec.data].numpy(), codes)
    np.testing.assert_array_equal(float_bits(tensor.components()[spec.scale.component]), values)
    assert outcome.kind == ("requantized" if count else "exact")
    assert outcome.requantized_blocks == count
