"""Every error that this package raises on purpose.

One base class, `FP8CheckpointError`; each subclass is also the builtin that a caller would catch anyway. An error
carries all problems that were found, not the first one, and each problem names its key, what was found, what was
expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """Logical key of the parameter, component key, or file name that the problem is about."""
    found: str
    """What is there."""
    expected: str
    """What should be there."""
    remedy: str = ""
    """What the user can do about it, where that does not follow from the rest."""
    ranks: tuple[int, ...] = ()
    """Global ranks that saw it; empty before the ranks have spoken to each other."""

    def __str__(self) -> str:
        where = f" [rank {', '.join(map(str, self.ranks))}]" if self.ranks else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.key}: found {self.found}, expected {self.expected}.{remedy}{where}"

    def at(self, ranks: Iterable[int]) -> Problem:
        """The same problem, seen by `ranks`."""
        return replace(self, ranks=tuple(ranks))


class FP8CheckpointError(Exception):
    """Base of all errors of this package.

    Attributes:
        problems: all that was found, in order.
    """

    def __init__(self, summary: str, problems: Iterable[Problem] = ()) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__(summary, self.problems)

    def __str__(self) -> str:
        return "\n  ".join([self.summary, *map(str, self.problems)])


class PlanningError(FP8CheckpointError, ValueError):
    """The state dict, the options and the checkpoint do not fit together. Nothing was read or written."""


class ManifestError(FP8CheckpointError, ValueError):
    """`fp8_manifest.json` is damaged, from a newer version, or at odds with the files beside it."""


class IncompleteCheckpointError(FP8CheckpointError, FileNotFoundError):
    """A file that makes the checkpoint complete is not there: the save was interrupted, or files were lost."""


class StorageError(FP8CheckpointError, RuntimeError):
    """Reading or writing failed. After a failed load the model must not be used."""


class HostError(FP8CheckpointError, ImportError):
    """Megatron-core is missing, or too old."""
