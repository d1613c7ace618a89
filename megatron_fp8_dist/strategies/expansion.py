"""expand_quantized: planning across ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..backends.base import Backend
from ..backends.directory import find_manifest
from ..backends.torch_dist import TorchDistBackend
from ..errors import ManifestError
from ..options import LoadOptions, SaveOptions
from ..report import LoadReport, record
from ..sharding.expand import check_entries, check_model, outside_autograd, unexpanded
from ..sharding.load_plan import LoadPlan, expand_for_load, finish_plan, plan_tasks
from ..sharding.manifest import Manifest
from ..sharding.records import FragmentRecord, build_manifest
from ..sharding.save_plan import (
    check_replicas,
    describe,
    expand_for_save,
    missing_layers,
    mixed_stacks,
    plain_layers,
    rehearse,
)
from ..sharding.stored import check_against_index
from .collective import attempt, from_first, gather, gather_to_first, rank, refuse


@dataclass(frozen=True, slots=True)
class LoadExpansion:
    """A state dict that is ready for `dist_checkpointing.load`, with its plan and what that will do."""

    state_dict: Any
    plan: LoadPlan
    report: LoadReport
    backend: Backend
    """What read the scales, and can read the codes."""


def expand_quantized(
    sharded_state_dict: Any,
    *,
    checkpoint_dir: str | Path | None = None,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    options: SaveOptions | LoadOptions | None = None,
    process_group: Any = None,
) -> Any:
    """Turn the entries of quantized parameters into entries of plain components. Collective.

    What comes back can be given to stock `dist_checkpointing.save` with `FP8SaveShardedStrategy`, or to stock
    `dist_checkpointing.load` with any strategy that reads this backend's files.

    Args:
        sharded_state_dict: a state dict with the model's entries; it is not changed. Entries keep their parameter as
            `.data`, so that optimizers find it by identity before and after.
        checkpoint_dir: None expands for a save. A directory expands for a load from it: the manifest and the scales
            are read, everything is checked, and every parameter's outcome is decided (see `last_report`).
        model: where given, every quantized parameter of it must be carried by an entry.
        options: SaveOptions or LoadOptions; must fit `checkpoint_dir`.
        process_group: the ranks that save or load together; all of them by default.

    Returns:
        The state dict in new containers.

    Raises:
        PlanningError, ManifestError, IncompleteCheckpointError, StorageError: on all ranks alike, with every problem
            found on any rank. Nothing was written, no parameter was changed.
        TypeError: options of the wrong kind.
    """
    if checkpoint_dir is None:
        save_options = options or SaveOptions()
        if not isinstance(save_options, SaveOptions):
            raise TypeError("expanding for a save takes SaveOptions; pass checkpoint_dir= to expand for a load")
        return expand_save(sharded_state_dict, save_options, model, process_group)
    load_options = options or LoadOptions()
    if not isinstance(load_options, LoadOptions):
        raise TypeError("expanding for a load (checkpoint_dir=) takes LoadOptions")
    expansion = expand_load(sharded_state_dict, Path(checkpoint_dir), load_options, model, process_group)
    record(expansion.report)
    return expansion.state_dict


def _parameters(model: torch.nn.Module | Sequence[torch.nn.Module] | None) -> Iterable[tuple[str, torch.Tensor]]:
    if model is None:
        return []
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    many = len(chunks) > 1
    return [(f"chunk {i}: {n}" if many else n, p) for i, m in enumerate(chunks) for n, p in m.named_parameters()]


def _check_local(state_dict: Any, model: Any) -> None:
    problems = [*check_entries(state_dict), *check_model(state_dict, _parameters(model))]
    refuse("the state dict cannot be saved or loaded exactly", problems)


def expand_save(state_dict: Any, options: SaveOptions, model: Any = None, group: Any = None) -> Any:
    """Expand for a save. Collective: a rank with high-precision layers alone cannot know that its stack is mixed."""
    state_dict = unexpanded(state_dict)

    def local() -> Any:
        _check_local(state_dict, model)
        info, problems = describe(state_dict, options.directions)
        refuse("quantized parameters do not fit together", problems)
        return info

    infos = gather(attempt(local, group), group)
    mixed, conflicts = mixed_stacks(infos)

    def expand() -> tuple[Any, list[FragmentRecord], set[tuple[str, int]]]:
        problems = [*conflicts, *check_replicas(state_dict, infos, rank(group))]
        refuse("the ranks' quantized parameters do not fit together", problems)
        expanded = expand_for_save(state_dict, mixed, options.directions)
        records, found = rehearse(expanded)
        refuse("the state dict cannot be saved exactly", found)
        return expanded, records, plain_layers(expanded)

    expanded, records, plain = attempt(lambda: outside_autograd(expand), group)
    everywhere = gather_to_first((records, plain), group)

    def check() -> None:
        if everywhere is not None:
            manifest = build_manifest((r for theirs, _ in everywhere for r in theirs), {})
            layers = set[tuple[str, int]]().union(*(theirs for _, theirs in everywhere))
            refuse("layers of a mixed stack are missing", missing_layers(manifest, layers))

    attempt(check, group)
    return expanded


def backend_of(directory: Path) -> Backend:
    """The backend that wrote a checkpoint."""
    return TorchDistBackend()


def _manifest(directory: Path, group: Any) -> Manifest | None:
    """The checked manifest, on every rank; rank 0 reads."""

    def read() -> Manifest | None:
        if rank(group) != 0:
            return None
        manifest = find_manifest(directory)
        backend = backend_of(directory)
        index = backend.index(directory)
        problems = [*check_against_index(manifest or Manifest(tensors={}), index), *backend.damage(directory)]
        if problems:
            raise ManifestError("the manifest and the files of the checkpoint do not fit together", problems)
        return manifest

    return from_first(attempt(read, group), group)


def expand_load(
    state_dict: Any,
    directory: Path,
    options: LoadOptions,
    model: Any = None,
    group: Any = None,
    *,
    absent_ok: bool = True,
) -> LoadExpansion:
    """Expand for a load from `directory`: the whole plan. Collective.

    `absent_ok` leaves it to the host what it says of a parameter that the checkpoint does not hold.
    """
    state_dict = unexpanded(state_dict)
    manifest = _manifest(directory, group) or Manifest(tensors={})
    backend = backend_of(directory)

    def plan() -> LoadPlan:
        _check_local(state_dict, model)
        planned = plan_tasks(state_dict, manifest, backend.index(directory))
        regions = list(dict.fromkeys(r for task in planned.tasks.values() for r in task.scale_regions()))
        finish_plan(
            planned,
            dict(zip(regions, backend.read(directory, regions), strict=True)),
            options,
            str(directory.resolve()),
        )
        missing = [] if absent_ok else planned.absent
        refuse("the checkpoint cannot be loaded into this model", [*planned.problems, *missing])
        return planned

    planned = attempt(lambda: outside_autograd(plan), group)
    report = _report(planned, directory, group)
    return LoadExpansion(expand_for_load(state_dict, planned), planned, report, backend)


def _report(plan: LoadPlan, directory: Path, group: Any) -> LoadReport:
    kinds = ("exact", "requantized", "dequantized", "quantized")
    outcomes = [task.outcome for task in plan.tasks.values()]
    numbers = [*(sum(o.kind == k for o in outcomes) for k in kinds), sum(o.codes for o in outcomes)]
    numbers.append(sum(o.component_bytes for o in outcomes))
    blocks: Counter[str] = Counter()
    for task in plan.tasks.values():
        blocks[task.key] += task.outcome.requantized_blocks
    total, all_blocks = [0] * len(numbers), Counter[str]()
    for theirs, their_blocks in gather((numbers, blocks), group):
        total = [a + b for a, b in zip(total, theirs, strict=True)]
        all_blocks += their_blocks
    named = dict(zip((*kinds, "codes", "component_bytes"), total, strict=True))
    return LoadReport(checkpoint_dir=str(directory), requantized_blocks=dict(all_blocks), **named)
