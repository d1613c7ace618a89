"""The plan of a load: what is done with each parameter that is quantized in the model, in the checkpoint, or in both.

It is complete before anything is read into the model: the scales are known by then, so it is known which parameters
come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..compat.host import ShardedTensor
from ..errors import Problem
from ..options import LoadOptions
from ..quantized.scales import invalid_scales
from ..te import tensors
from .cuts import find_cuts
from .expand import (
    global_box,
    is_entry,
    leaves,
    make_factory,
    may_match,
    own,
    skeleton,
    values_of,
    walk,
)
from .layout import Shape, grid_shape, layer_key
from .load_task import LoadTask, Scales
from .manifest import Manifest
from .reshard import Source, grid_region, piece_regions, plan_source
from .stored import StoredTensor

_META = torch.device("meta")


@dataclass(slots=True)
class LoadPlan:
    """All tasks of one load on this rank."""

    absent: list[Problem] = field(default_factory=list)
    """Quantized parameters that the checkpoint knows nothing of."""
    tasks: dict[int, LoadTask] = field(default_factory=dict)
    """id of an entry of the state dict -> its task, for entries that hold or read quantized data."""
    problems: list[Problem] = field(default_factory=list)


def plan_tasks(state_dict: Any, manifest: Manifest, index: Mapping[str, StoredTensor]) -> LoadPlan:
    """The tasks of a state dict, geometry only.

    Args:
        state_dict: what the model wants.
        manifest: what the checkpoint holds quantized.
        index: what the checkpoint holds.

    Returns:
        The plan, without scales; what does not fit is in its problems.
    """
    plan = LoadPlan()
    by_param: dict[int, LoadTask] = {}
    keys = {*manifest.tensors, *manifest.mixed}
    for entry in values_of(state_dict):
        if not is_entry(entry) or not (tensors.is_quantized(entry.data) or may_match(entry, keys)):
            continue
        quantized = tensors.is_quantized(entry.data)
        if quantized and tensors.unsupported(entry.data, entry.key):
            continue
        wanted = tensors.directions_of(entry.data) if quantized else []
        sources = [_source(leaf, manifest, wanted, plan.problems) for leaf in leaves(skeleton(entry))]
        if all(s is not None for s in sources):
            found = tuple(s for s in sources if s is not None)
            stored = any(s.entry is not None or s.key in index for s in found)
            moved = any(s.key != leaf.key for s, leaf in zip(found, leaves(skeleton(entry)), strict=True))
            quantized = quantized or any(s.entry is not None for s in found)
            if stored and (quantized or moved):
                plan.tasks[id(entry)] = LoadTask(entry, found)
                other = by_param.setdefault(id(entry.data), plan.tasks[id(entry)])
                if other.sources != found:
                    where = f"the destination of {other.key} as well"
                    plan.problems.append(Problem(entry.key, where, "one source for one parameter"))
            elif quantized:
                plan.absent.append(
                    Problem(entry.key, "nothing in the checkpoint", "a quantized parameter of the model")
                )
    _join_cuts(plan, state_dict)
    return plan


def _join_cuts(plan: LoadPlan, state_dict: Any) -> None:
    """Let the tasks of one cut parameter know each other."""
    for cut in find_cuts(v for v in values_of(state_dict) if is_entry(v)):
        planned = [plan.tasks[id(e)] for e in cut.entries if id(e) in plan.tasks]
        for task in planned:
            task.cut = cut
        if planned and len(planned) < len(cut.entries):
            found = "some parts of the parameter: " + ", ".join(task.key for task in planned)
            plan.problems.append(Problem(cut.key, found, "all of its parts, or none"))


def _source(leaf: Any, manifest: Manifest, wanted: Sequence[str], problems: list[Problem]) -> Source | None:
    key, box, expected = leaf.key, global_box(leaf), tuple(leaf.global_shape)
    stack = manifest.mixed.get(key)
    if stack is not None:
        if not leaf.prepend_axis_num:
            problems.append(Problem(key, "an entry without a layer axis", f"one layer of {stack.num_layers}"))
            return None
        if (expected[0] != stack.num_layers and not leaf.allow_shape_mismatch) or box.offset[0] >= stack.num_layers:
            problems.append(Problem(key, f"{stack.num_layers} layers saved", f"{expected[0]} layers"))
            return None
        layer = box.offset[0]
        key, box, expected = layer_key(key, layer), box.drop(1), expected[1:]
    entry = manifest.tensors.get(key)
    if entry is None:
        return Source(key, box, None)
    if entry.global_shape != expected and not leaf.allow_shape_mismatch:
        problems.append(Problem(key, f"global shape {list(entry.global_shape)} saved", f"{list(expected)}"))
        return None
    source = plan_source(key, entry, box, wanted)
    try:
        for piece in source.pieces:
            tuple(piece_regions(source, piece))
    except ValueError as e:
        problems.append(Problem(key, str(e), "a region whose cuts do not split a byte"))
        return None
    return source


def finish_plan(plan: LoadPlan, scales: Scales, options: LoadOptions, directory: str = "") -> None:
    """Check all scale values, and decide every task's outcome; problems are added to the plan."""
    plan.problems += _shared_buffers(plan.tasks.values())
    for task in plan.tasks.values():
        task.directory = directory
        task.scales = {region: scales[region] for region in task.scale_regions()}
        bad = [p for source in task.sources for p in _bad_scales(task, source)]
        plan.problems += bad or task.rehearse(options)


def _shared_buffers(tasks: Iterable[LoadTask]) -> Iterator[Problem]:
    """Parameters that are to be restored from different sources into one buffer (a scale that a clone shares, say)."""
    owners: dict[int, LoadTask] = {}
    for task in tasks:
        restores = any(source.entry is not None for source in task.sources)
        if not restores or not tensors.is_quantized(task.param):
            continue
        for name, buffer in tensors.buffers(task.param).items():
            shared = buffer.numel() and not buffer.is_meta
            other = owners.setdefault(buffer.data_ptr(), task) if shared else task
            cut = task.cut is not None or other.cut is not None
            if other.param is not task.param and (cut or other.sources != task.sources):
                found = f"a {name} that {other.key} has too"
                remedy = "Build it anew: a clone() of Transformer Engine's tensors shares their scales."
                yield Problem(task.key, found, "a parameter with buffers of its own", remedy)
                break


def _bad_scales(task: LoadTask, source: Source) -> Iterator[Problem]:
    if source.entry is None:
        return
    for piece in source.pieces:
        for grid in source.grids():
            region = grid_region(source, source.entry, grid, piece)
            values = task.scales[region]
            bad = invalid_scales(values, grid.scale_format)
            if bool(bad.any()):
                at = [o + int(i) for o, i in zip(region.box.offset, bad.nonzero()[0], strict=True)]
                yield Problem(
                    f"{region.key}{at}", f"scale {values[bad][0].item()}", "a finite scale that is not negative"
                )
            used = grid_shape(source.entry.scheme, grid, piece.fragment, source.entry.prepended_axes)
            if _spare(values, used).any():
                found = f"a scale that is not 0 beyond the {list(used)} blocks of a fragment"
                yield Problem(f"{region.key}{list(region.box.offset)}", found, "0 in unused slots, and phases that fit")


def _spare(slots: torch.Tensor, used: Shape) -> torch.Tensor:
    """The slots of a fragment that no block has, the others zeroed."""
    if tuple(slots.shape) == used:
        return slots.new_zeros(())
    out = slots.clone()
    out[tuple(slice(0, n) for n in used)] = 0
    return out


def expand_for_load(state_dict: Any, plan: LoadPlan) -> Any:
    """The state dict with planned entries replaced by factories, in new containers.

    A quantized entry that the checkpoint knows nothing of keeps its key and loses its data: whether a missing key is an
    error is the host's to say (`strict=`).
    """

    def expand(value: Any) -> Any:
        if id(value) in plan.tasks:
            return make_factory(value, plan.tasks[id(value)])
        if is_entry(value) and tensors.is_quantized(value.data):
            if isinstance(value, ShardedTensor):
                return replace(value, data=None)
            return replace(value, data=torch.empty(value.data.shape, dtype=value.data.dtype, device=_META))
        return own(value)

    return walk(state_dict, expand)
