"""Agreement between ranks: an error on one rank is raised on all, so that none is left in a collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..compat.host import CHECKPOINT_ERRORS, CheckpointException, CheckpointingException, host_range
from ..errors import (
    FP8CheckpointError,
    HostError,
    IncompleteCheckpointError,
    ManifestError,
    PlanningError,
    Problem,
    StorageError,
)

T = TypeVar("T")


class HostFailure(StorageError, CheckpointingException):  # type: ignore[misc]  # Megatron has no types
    """Megatron's own code failed on a rank: a StorageError of ours and, to those who catch that, Megatron's error."""


_KINDS: dict[str, type[FP8CheckpointError]] = {
    cls.__name__: cls
    for cls in (
        PlanningError,
        ManifestError,
        IncompleteCheckpointError,
        StorageError,
        HostError,
        HostFailure,
        FP8CheckpointError,
    )
}


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error as it travels between ranks: plain data."""

    kind: str
    summary: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Vote:
    """What a rank says in an agreement."""

    failure: _Failure | None


_ROUNDS = 8
"""Megatron exchanges objects two or three times before it calls a strategy."""


def rank(group: Any = None) -> int:
    """This process's rank in `group`; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def gather_to_first(value: T, group: Any = None) -> list[T] | None:
    """Every rank's value, on the first rank of `group`; None elsewhere."""
    if not dist.is_initialized():
        return [value]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    out: list[Any] | None = [None] * dist.get_world_size(group) if rank(group) == 0 else None
    dist.gather_object(value, out, dst=first, group=group)
    return out


def from_first(value: T, group: Any = None) -> T:
    """The value of the first rank of `group`, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(box, src=first, group=group)
    return box[0]


def _failure(error: BaseException | None, here: int) -> _Failure | None:
    if error is None:
        return None
    if isinstance(error, FP8CheckpointError):
        problems = tuple(p if p.ranks else p.at([here]) for p in error.problems)
        kind = type(error).__name__
        if not problems:
            problems = (Problem("(all)", error.summary, "no error").at([here]),)
        return _Failure(kind if kind in _KINDS else "FP8CheckpointError", error.summary, problems)
    causes: dict[int, BaseException] = {here: error}
    if isinstance(error, CheckpointException):
        failed = {number: cause for number, (cause, _) in error.failures.items()}
        # Without collectives DCP knows one rank, and calls it 0.
        causes = failed if host_range.COLLECTIVE_LOAD else dict.fromkeys([here], next(iter(failed.values())))
    problems = tuple(
        Problem("(rank)", f"{type(cause).__name__}: {cause}", "no error").at([number])
        for number, cause in causes.items()
    )
    return _Failure("HostFailure", "saving or loading failed on a rank", problems)


def _merged(problems: Sequence[Problem]) -> list[Problem]:
    ranks: dict[Problem, set[int]] = defaultdict(set)
    for problem in problems:
        ranks[problem.at(())].update(problem.ranks)
    return [problem.at(sorted(seen)) for problem, seen in ranks.items()]


def agree(error: BaseException | None, group: Any = None) -> None:
    """Raise on every rank if any rank has an error. Collective; every rank must come here.

    Args:
        error: this rank's error, or None.
        group: the ranks that agree.

    Raises:
        FP8CheckpointError: of the kind that the first failing rank saw, with the problems of all ranks and their ranks.
            Its cause is this rank's own error, where there is one.
    """
    here = dist.get_rank() if dist.is_initialized() else 0
    failures = [v.failure for v in _votes(_Vote(_failure(error, here)), group) if v.failure is not None]
    if not failures:
        return
    agreed = _KINDS[failures[0].kind](failures[0].summary, _merged([p for f in failures for p in f.problems]))
    agreed.agreed = True  # type: ignore[attr-defined]
    raise agreed from error


def _votes(mine: _Vote, group: Any) -> list[_Vote]:
    """Every rank's vote.

    A rank that failed inside Megatron's own code comes here while others may still be in a gather of objects of
    Megatron's, as this one is. What comes back then are not votes; those ranks fail on what they got, or go on to the
    strategy, and vote in one of the next rounds. What Megatron does in broadcasts and barriers is checked beforehand.
    """
    for _ in range(_ROUNDS):
        votes = gather(mine, group)
        if all(isinstance(v, _Vote) for v in votes):
            return votes
    raise StorageError(f"the ranks did not come to an agreement in {_ROUNDS} rounds")


def is_agreed(error: BaseException | None) -> bool:
    """Whether `error` was raised by `agree`, so that every rank has it already."""
    return getattr(error, "agreed", False) is True


def attempt(fn: Callable[[], T], group: Any = None) -> T:
    """Run `fn` on every rank, then agree. `fn` must not be left in a collective when another rank's fails.

    Raises:
        FP8CheckpointError: see `agree`.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = fn()
    except CHECKPOINT_ERRORS as e:
        if is_agreed(e):
            raise
        error = e
    agree(error, group)
    return result  # type: ignore[no-any-return]


def refuse(summary: str, problems: Sequence[Problem]) -> None:
    """Raise a PlanningError with `problems`, if there are any.

    Raises:
        PlanningError: there are problems.
    """
    if problems:
        raise PlanningError(summary, dict.fromkeys(problems))
