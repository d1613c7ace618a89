"""save() and load(): stock dist_checkpointing.save and load, with quantized parameters exact."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..backends.directory import COMMIT_MARKER, check_common_state, check_directory, clear_commit
from ..compat.host import CHECKPOINT_ERRORS, dist_checkpointing, host_range, tolerates_missing
from ..errors import Problem, StorageError
from ..options import LoadOptions, SaveOptions
from ..report import LoadReport, record
from ..sharding.expand import QuantizedFactory, build_factories, values_of
from ..sharding.layout import logical_key
from ..sharding.pickling import check_picklable
from .collective import agree, attempt, barrier, from_first, gather, is_agreed, rank
from .expansion import LoadExpansion, expand_load, expand_save
from .load import FP8LoadShardedStrategy
from .prefetch import Prefetch, window_for
from .save import FP8SaveShardedStrategy

_logger = logging.getLogger("megatron_fp8_dist")

Strategy = TypeVar("Strategy", FP8SaveShardedStrategy, FP8LoadShardedStrategy)

HOOK = "preprocess_common_before_consistancy_check"
"""Megatron's name for the function that common state goes through before ranks compare it."""

MAX_KEYS = 10
"""A warning names at most so many keys."""


def save(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    *,
    options: SaveOptions | None = None,
    **stock_kwargs: Any,
) -> Any:
    """Save a checkpoint whose quantized parameters stay quantized. Collective.

    Args:
        sharded_state_dict: as for `dist_checkpointing.save`; quantized parameters are the entries' `.data`. It is not
            changed.
        checkpoint_dir: an existing directory. A complete checkpoint in it stops being one before anything is written.
        sharded_strategy: None, or a strategy that `FP8SaveShardedStrategy` takes as `inner`.
        options: how quantized parameters are saved.
        **stock_kwargs: passed to `dist_checkpointing.save`.

    Returns:
        What `dist_checkpointing.save` returns.

    Raises:
        FP8CheckpointError: on all ranks alike. A PlanningError leaves the directory as it was.
    """
    strategy: FP8SaveShardedStrategy = _strategy(FP8SaveShardedStrategy, sharded_strategy, options)
    # One strategy may serve every save of a job: this one has not come to its end yet.
    strategy.finished = False
    directory = Path(checkpoint_dir)
    attempt(lambda: check_directory(directory))
    expanded = expand_save(sharded_state_dict, strategy.options)
    if host_range.COMMON_STATE_FIRST:
        # Or a crash could leave the older checkpoint's marker beside the new common state.
        attempt(lambda: clear_commit(directory, common_state=False) if rank() == 0 else None)
    built = attempt(lambda: build_factories(expanded))
    stock_kwargs[HOOK] = partial(_checked_common_state, stock_kwargs.get(HOOK))
    return _together(
        lambda: dist_checkpointing.save(built, str(directory), strategy, **stock_kwargs),
        barriers=lambda: _pending_barriers(strategy, directory, stock_kwargs),
    )


def load(
    sharded_state_dict: Any,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    *,
    options: LoadOptions | None = None,
    **stock_kwargs: Any,
) -> Any:
    """Load a checkpoint into a model, quantized parameters bit for bit wherever that is possible. Collective.

    Quantized parameters are written in place; what is returned for them is an alias that `load_state_dict` may copy
    onto them. What was quantized in the checkpoint alone comes back dequantized; what is quantized in the model alone
    comes back in high precision, and the model's own `load_state_dict` quantizes it.

    Args:
        sharded_state_dict: as for `dist_checkpointing.load`. It is not changed.
        checkpoint_dir: a complete checkpoint, stock or ours.
        sharded_strategy: None, or the strategy that reads.
        options: how quantized parameters are loaded.
        **stock_kwargs: passed to `dist_checkpointing.load`. Keys that `strict=` modes return are logical keys.

    Returns:
        What `dist_checkpointing.load` returns.

    Raises:
        FP8CheckpointError: on all ranks alike. Until a StorageError no parameter was changed; after one the model must
            not be used.
    """
    started = time.perf_counter()
    directory = Path(checkpoint_dir)
    strategy: FP8LoadShardedStrategy = _strategy(FP8LoadShardedStrategy, sharded_strategy, options)
    attempt(lambda: check_common_state(directory) if host_range.COMMON_STATE_FIRST else None)
    absent_ok = attempt(lambda: tolerates_missing(stock_kwargs.get("strict")))
    expansion = expand_load(sharded_state_dict, directory, strategy.options, absent_ok=absent_ok)
    for value in values_of(expansion.state_dict):
        if isinstance(value, QuantizedFactory):
            # Nothing looks for parameters in here any more, and Megatron would make a BF16 copy of each.
            value.data = None
    if strategy.inner is None:
        _read_one_by_one(expansion, directory)
    strategy.plan = expansion.plan
    try:
        result = _together(lambda: _load(expansion, str(directory), strategy, stock_kwargs))
    except StorageError as e:
        restored = _restored(expansion)
        if restored:
            raise type(e)(e.summary, [*e.problems, restored]) from e
        raise
    finally:
        strategy.plan = None
    report = replace(expansion.report, seconds=from_first(time.perf_counter() - started))
    record(report)
    strategy.report = report
    if rank() == 0:
        _log(report)
    return _with_logical_keys(result)


def _strategy(cls: type[Strategy], given: Any, options: Any) -> Strategy:
    """The strategy to use: `given` if it is one of ours, else one of ours around it.

    Raises:
        ValueError: options beside a strategy that has its own.
    """
    if not isinstance(given, cls):
        return cls(options, inner=given)
    if options is not None:
        raise ValueError(f"options= beside a ready {cls.__name__}, which has its own: give them to the strategy")
    return given


def _read_one_by_one(expansion: LoadExpansion, directory: Path) -> None:
    """Let each parameter get its components when it is restored, so that only few are held twice at a time."""
    tasks = list(expansion.plan.tasks.values())
    announced = [region for task in tasks for region in task.regions()]
    window = window_for(sum(region.box.size for region in announced))
    pull = Prefetch(partial(expansion.backend.read, directory), announced, window)
    for task in tasks:
        task.pull = pull


def _load(expansion: LoadExpansion, directory: str, strategy: FP8LoadShardedStrategy, stock_kwargs: Any) -> Any:
    """Stock load, and a check that it carried the whole plan out."""
    result = dist_checkpointing.load(expansion.state_dict, directory, strategy, **stock_kwargs)
    left = [
        Problem(task.key, "a parameter that was not restored", "its components merged by dist_checkpointing.load")
        for task in expansion.plan.tasks.values()
        if not task.restored and task.outcome.kind in ("exact", "requantized")
    ]
    if left:
        raise StorageError("Megatron did not merge every parameter of the state dict", left)
    return result


def _restored(expansion: LoadExpansion) -> Problem | None:
    """Which parameters were restored before an error, on any rank. Collective: every rank has the error."""
    done = {task.key for task in expansion.plan.tasks.values() if task.restored}
    everywhere = sorted(set[str]().union(*gather(done)))
    if not everywhere:
        return None
    remedy = "The model must not be used: load a whole checkpoint into it."
    return Problem("(restored before the error)", ", ".join(everywhere), "all parameters", remedy)


def _log(report: LoadReport) -> None:
    counts = (report.exact, report.requantized, report.dequantized, report.quantized)
    speed = report.component_bytes / 1e9 / max(report.seconds, 1e-9)
    _logger.info(
        "loaded %d exact, %d requantized, %d dequantized, %d quantized parameters (%d codes, %d bytes) in %.2f s "
        "(%.2f GB/s) from %s",
        *counts,
        report.codes,
        report.component_bytes,
        report.seconds,
        speed,
        report.checkpoint_dir,
    )
    if report.requantized_blocks:
        blocks = list(report.requantized_blocks.items())
        names = ", ".join(f"{key} ({count})" for key, count in blocks[:MAX_KEYS])
        more = f" and {len(blocks) - MAX_KEYS} more" if len(blocks) > MAX_KEYS else ""
        _logger.warning("requantized blocks that could not be exact: %s%s", names, more)


def _checked_common_state(hook: Callable[[Any], Any] | None, common_state: Any) -> Any:
    """Common state through the caller's hook, and known to pickle, on every rank.

    Megatron calls this on all ranks, and broadcasts what comes back: a rank that failed there would be waited for.
    """

    def run() -> Any:
        out = common_state if hook is None else hook(common_state)
        check_picklable(out)
        return out

    return attempt(run)


def _pending_barriers(strategy: FP8SaveShardedStrategy, directory: Path, stock_kwargs: Any) -> int:
    """Barriers that the other ranks wait in, where this one failed after the strategy: in Megatron's commit."""
    if not strategy.finished:
        return 0
    committed = (directory / COMMIT_MARKER).exists()
    return int(not committed) + int(bool(stock_kwargs.get("verify_integrity")))


def _together(call: Callable[[], Any], barriers: Callable[[], int] = lambda: 0) -> Any:
    """Run a call of the host on every rank; an error that one rank has alone reaches the others.

    A rank that fails before the strategy's first agreement meets the others there; one that fails after the last, here.
    `barriers` tells in how many barriers of the host the others still are.
    """
    error: BaseException | None = None
    result = None
    try:
        result = call()
    except CHECKPOINT_ERRORS as e:
        if is_agreed(e):
            raise
        error = e
        for _ in range(barriers()):
            barrier()
    agree(error)
    return result


def _with_logical_keys(result: Any) -> Any:
    """The keys that a `strict=` mode returned, components told by the logical key of their tensor."""
    if not isinstance(result, tuple):
        return result
    state_dict, *key_sets = result
    return (state_dict, *({(logical_key(k) or (k,))[0] for k in keys} for keys in key_sets))
