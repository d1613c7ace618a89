"""A pool of gloo ranks that lives as long as the pytest session.

Starting ranks is dear (each imports torch and Megatron), so each rank is a process that is started once and then runs
functions of the test modules, one after another. Every call finds a fresh default process group of the size it asked
for, and all ranks' values or tracebacks come back to the test. A call that hangs becomes an error with the stacks of
all ranks, and the next call gets a new pool.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Self, overload

ROOT = Path(__file__).resolve().parent.parent

START_TIMEOUT = 120.0
"""Seconds that all ranks together may take to import torch; a cold disk and few cores make this long."""
GRACE_AFTER_FAILURE = 15.0
"""Seconds that the others get once a rank has failed: they may be waiting for it in a collective."""
POLL = 0.5
"""Seconds between two looks at whether the ranks are still alive."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the pool asks of a rank."""

    target: str
    """module:function."""
    args: tuple[Any, ...]
    world_size: int
    """Ranks in the call's default process group."""
    store: str
    """File through which these ranks meet; new for each call."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a call came to on one rank."""

    value: Any = None
    error_type_name: str = ""
    """Class name of the exception that the call raised; empty when it returned."""
    error_text: str = ""
    """str() of that exception."""
    traceback: str = ""


class RankError(RuntimeError):
    """At least one rank raised, died, or did not come back."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """One process of the pool."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    """The rank's stdout and stderr."""
    stacks: Path
    """Where the rank dumps the stacks of its threads when it gets SIGUSR1."""


class RankPool:
    """Ranks 0 .. size-1, started at the first call. Files go under `directory`."""

    def __init__(self, directory: Path, size: int = 4) -> None:
        self.size = size
        self._directory = directory
        self._serial = itertools.count()
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def run(
        self, target: str, *args: Any, n: int | None = None, timeout: float = 120.0, check: Literal[True] = True
    ) -> list[Any]: ...
    @overload
    def run(
        self, target: str, *args: Any, n: int | None = None, timeout: float = 120.0, check: Literal[False]
    ) -> list[RankResult]: ...
    def run(
        self, target: str, *args: Any, n: int | None = None, timeout: float = 120.0, check: bool = True
    ) -> list[Any] | list[RankResult]:
        """Run a function on the first `n` ranks, in a default process group of these.

        Args:
            target: "module:function"; a test names its own module with __name__.
            args: arguments, the same on all ranks; pickled.
            n: number of ranks, all of them by default.
            timeout: seconds that the call may take; the first one on a rank also imports Megatron.
            check: raise what ranks raised as a RankError. If False, give a RankResult per rank.

        Returns:
            One value per rank, in rank order; pickled on the rank.

        Raises:
            RankError: with every rank's traceback; and, whatever `check` is, when a rank died or did not come back.
        """
        __tracebackhide__ = True  # pytest shows the test's line and the ranks' tracebacks, not the pool's code
        size = self.size if n is None else n
        if not 1 <= size <= self.size:
            raise ValueError(f"n is {size}, and the pool has {self.size} ranks")
        try:
            if not self._ranks:
                self._start()
            results = self._call(target, args, size, timeout)
        except BaseException:  # also a pytest timeout or Ctrl-C: the ranks are in the middle of something
            self._kill()
            raise
        if not check:
            return results
        if any(r.error_type_name for r in results):
            raise RankError(_join_reports(f"{target} failed", map(_describe, results)))
        return [r.value for r in results]

    def close(self) -> None:
        """End the ranks. A later call starts new ones."""
        for rank in self._ranks:
            rank.connection.close()  # an idle rank returns from its loop
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        folder = self._directory / f"pool{next(self._serial)}"
        folder.mkdir(parents=True)
        for index in range(self.size):
            self._ranks.append(_spawn(index, folder))
        self._collect(self._ranks, START_TIMEOUT, "starting the ranks")

    def _call(self, target: str, args: tuple[Any, ...], size: int, timeout: float) -> list[RankResult]:
        ranks = self._ranks[:size]
        store = self._directory / f"store{next(self._serial)}"
        message = pickle.dumps(Call(target, args, size, str(store)))
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):  # it died since the last call: _collect says so
                rank.connection.send_bytes(message)
        try:
            return self._collect(ranks, timeout, target)
        finally:
            store.unlink(missing_ok=True)

    def _collect(self, ranks: list[_Rank], timeout: float, what: str) -> list[RankResult]:
        """One answer per rank, or RankError with all that is known about ranks that gave none."""
        started = time.monotonic()
        deadline = started + timeout
        answers: dict[int, RankResult] = {}
        while missing := [i for i in range(len(ranks)) if i not in answers]:
            ready = wait([ranks[i].connection for i in missing], POLL)
            for index in missing:
                if ranks[index].connection in ready and (answer := _receive(ranks[index])):
                    answers[index] = answer
            if any(a.error_type_name for a in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
            died = any(ranks[i].process.poll() is not None for i in missing if i not in answers)
            if died or time.monotonic() > deadline:
                raise RankError(_report_missing(what, ranks, answers, time.monotonic() - started))
        return [answers[i] for i in range(len(ranks))]

    def _kill(self) -> None:
        for rank in self._ranks:
            # Its process group, so that processes which a rank forked (Megatron's writers) end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            rank.connection.close()
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        self._ranks = []


def _spawn(index: int, folder: Path) -> _Rank:
    """Start rank `index`. Its stdin stays open and silent: its end tells the rank that this process is gone."""
    ours, theirs = Pipe()
    log, stacks = folder / f"rank{index}.log", folder / f"rank{index}.stacks"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rankpool_worker", str(theirs.fileno()), str(index), str(stacks)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    theirs.close()
    return _Rank(process, ours, log, stacks)


def _receive(rank: _Rank) -> RankResult | None:
    """The rank's answer; None where the connection ended without one."""
    try:
        result = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None
    assert isinstance(result, RankResult)
    return result


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _describe(result: RankResult) -> str:
    if not result.error_type_name:
        return "returned"
    return f"{result.error_type_name}: {result.error_text}\n{result.traceback}"


def _join_reports(summary: str, reports: Iterable[str]) -> str:
    """One text of a report per rank, in which ranks with the same report share one."""
    groups: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        groups.setdefault(report, []).append(index)
    blocks = [f"--- rank {', '.join(map(str, ranks))}: {report}" for report, ranks in groups.items()]
    return "\n".join([summary, *blocks])


def _report_missing(what: str, ranks: list[_Rank], answers: dict[int, RankResult], seconds: float) -> str:
    """Say what each rank did; of those that still run, the stacks."""
    running = [r for i, r in enumerate(ranks) if i not in answers and r.process.poll() is None]
    for rank in running:
        rank.process.send_signal(signal.SIGUSR1)
    reports = []
    for index, rank in enumerate(ranks):
        if index in answers:
            reports.append(_describe(answers[index]))
        elif rank in running:
            reports.append(f"still running\n{_read_stacks(rank)}{_tail(rank.log)}")
        else:
            reports.append(f"died, exit status {rank.process.wait()}\n{_tail(rank.log)}")
    return _join_reports(f"{what}: after {seconds:.0f} s not every rank has come back", reports)


def _read_stacks(rank: _Rank) -> str:
    """The dump that SIGUSR1 asked for, once it is there and no longer grows."""
    text, deadline = "", time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.2)
        newer = rank.stacks.read_text(errors="replace") if rank.stacks.exists() else ""
        if newer and newer == text:
            return text
        text = newer
    return text or "no stacks: the rank did not answer the signal\n"
