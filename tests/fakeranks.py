"""Ranks of a parallel layout, one after another in one process, without torch.distributed.

What a load puts into a rank is compared, byte for byte, with the same cut of the whole model.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import apply_factories, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist.backends.memory import MemoryBackend
from megatron_fp8_dist.compat.host import ShardedTensor, is_main_replica
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from megatron_fp8_dist.sharding.expand import ComponentShard, values_of
from megatron_fp8_dist.sharding.load_plan import LoadPlan, expand_for_load, finish_plan, plan_tasks
from megatron_fp8_dist.sharding.load_task import Outcome
from megatron_fp8_dist.sharding.manifest import Manifest
from megatron_fp8_dist.sharding.records import build_manifest
from megatron_fp8_dist.sharding.save_plan import check_replicas, describe, expand_for_save, mixed_stacks, rehearse
from megatron_fp8_dist.sharding.stored import check_against_index, metadata_digest
from tests.elementwise import Elements, component_bytes, conform, elements_of, float_bits, joined, raw, scaled
from tests.fakemodel import CUT_AXIS, Index, Layout, Model, Place, Weight
from tests.shards import random_shard

if TYPE_CHECKING:
    from megatron_fp8_dist.backends.base import Backend
    from megatron_fp8_dist.sharding.layout import Region

DIRECTORY = Path("checkpoint")


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


class Mapped(Protocol):
    """What an entry needs to know of a weight; see `Weight`."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def cut(self) -> str:
        """How tensor-parallel ranks cut it."""

    @property
    def stack(self) -> tuple[int, ...]:
        """Layers, or layers and experts."""


def entry(weight: Mapped, index: Index, place: Place, tensor: torch.Tensor, stacked: bool) -> Any:
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


def save(ranks: Sequence[Rank], backend: Backend, directory: Path, directions: str = "both") -> Manifest:
    """What the strategies do in a save, rank after rank. Returns the manifest as it is read again."""
    described = [describe(rank.state_dict, directions) for rank in ranks]
    infos = [pickle.loads(pickle.dumps(info)) for info, _ in described]
    mixed, problems = mixed_stacks(infos)
    problems += [p for _, own in described for p in own]
    problems += [p for number, rank in enumerate(ranks) for p in check_replicas(rank.state_dict, infos, number)]
    refuse(problems)
    expansions = [expand_for_save(rank.state_dict, mixed, directions) for rank in ranks]
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


def kinds(ranks: Sequence[Rank]) -> set[str]:
    """What the plans said of all parameters."""
    return {outcome.kind for rank in ranks for outcome in rank.outcomes.values()}


def pair_id(value: Any) -> str | None:
    """A layout's name in test ids."""
    return str(value) if isinstance(value, Layout) else None


def single(key: str, tensor: torch.Tensor, *offsets: tuple[int, int, int], **more: Any) -> Any:
    """An entry by rank offsets."""
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, **more)


def rank_with(**entries: Any) -> Rank:
    """A rank with these entries, whose data are its tensors."""
    return Rank(next(Layout(1).places()), dict(entries), {n: e.data for n, e in entries.items()})


def whole_of(parts: Sequence[torch.Tensor]) -> Elements:
    """The elements of shards along axis 0."""
    return joined([elements_of(p) for p in parts], 0)


def through(model: Model, source: Layout, target: Layout, wanted: Model | None = None, **options: Any) -> list[Rank]:
    """Save at one layout, load at another, and compare."""
    backend = Recorder()
    manifest = save(build(model, source), backend, DIRECTORY)
    ranks = build(wanted or model, target, empty=True)
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(**options))
    check(model, ranks)
    return ranks


def uneven(key: str, tensor: torch.Tensor, offset: int, total: int, **more: Any) -> Any:
    """A fragment whose rank knows its element offset, not its index."""
    shape = tuple(tensor.shape)
    return ShardedTensor(key, tensor, tensor.dtype, shape, (total, *shape[1:]), (offset, 0), None, **more)


def padded(rows: Sequence[int], seed: int, scale: float) -> list[Rank]:
    """Ranks with shards of these many rows of a table that may have been padded."""
    return [
        rank_with(w=single("w", random_shard((n, 8), seed + i, scale), (0, i, len(rows)), allow_shape_mismatch=True))
        for i, n in enumerate(rows)
    ]
