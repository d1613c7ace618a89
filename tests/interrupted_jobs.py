"""Saves that are killed at one of their file operations, and what they leave.

The jobs run in a process that has imported everything and holds no process group. It forks the ranks of each save, so
that they cost next to nothing to start, and kills them with SIGKILL.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fp8_dist import BlockScaledTensor, load, save
from megatron_fp8_dist.errors import FP8CheckpointError
from tests import damage, groups, toy_model

LAYOUT = toy_model.Layout(tp=2)
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
JOB_TIMEOUT = 60.0
"""Seconds in which a process must say something: longer than it may wait in a collective."""

ITERATIONS = {"old": 1, "new": 2}
"""Version of the model -> its iteration, which is common state."""

_FORK = get_context("fork")


@dataclass(frozen=True, slots=True)
class Point:
    """Before one change of a file: the nth of its kind on one rank."""

    rank: int
    operation: str
    """What is done to which file: "write .metadata.tmp"."""
    number: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.operation}, {self.number}"


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What a killed save left. Folders are told by what a load from them gives; see `_load`."""

    ends: list[str]
    """Per rank: "killed", "returned", or the class of the error that it ended with."""
    untouched: bool
    """Whether every file of the folder is as it was before."""
    earlier: str
    """The folder of the earlier checkpoint."""
    found: str
    """The folder of the killed save."""
    again: str
    """The same after one more save into it."""


def _toy(version: str, place: toy_model.Place) -> toy_model.Toy:
    """The toy in one of two versions, no byte of whose parameters is the same."""
    model = toy_model.Toy("block_scaled", place)
    for parameter in model.parameters() if version == "new" else ():
        tensor = parameter.detach()
        for part in tensor.components().values() if isinstance(tensor, BlockScaledTensor) else (tensor,):
            part.view(torch.uint8).bitwise_xor_(0x01)
    return model


def _contents(model: toy_model.Toy) -> dict[str, bytes]:
    return {name: toy_model.content(parameter) for name, parameter in model.named_parameters()}


def _save(version: str, directory: Path, place: toy_model.Place) -> None:
    save({**_toy(version, place).sharded_state_dict(), "iteration": ITERATIONS[version]}, directory)


def _load(directory: Path) -> str:
    """The version that a load gives bit for bit, or the error of a load that changed nothing, or what is wrong."""
    place = toy_model.Layout().place(0)
    model = toy_model.Toy("block_scaled", place, blank=True)
    before = _contents(model)
    try:
        loaded = load({**model.sharded_state_dict(), "iteration": 0}, directory)
    except FP8CheckpointError as e:
        return f"{type(e).__name__}: {e}" if _contents(model) == before else f"written in part: {e}"
    iteration = loaded.pop("iteration")
    model.load_state_dict(loaded)
    for version, expected in ITERATIONS.items():
        if (_contents(model), iteration) == (_contents(_toy(version, place)), expected):
            return version
    return f"a mixture of iteration {iteration}"


# In a rank


class _Watched:
    """A file that tells of every write beforehand, and whose writes reach the file at once."""

    def __init__(self, file: Any, tell: Callable[[str], None]) -> None:
        self._file, self._tell = file, tell

    def write(self, data: Any) -> Any:
        self._tell("write")
        written = self._file.write(data)
        self._file.flush()
        return written

    def close(self) -> None:
        if not self._file.closed:
            self._tell("close")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _watching(directory: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` before every change of a file in `directory`. Syncing changes nothing that SIGKILL could undo."""
    stock_open, stock_save = builtins.open, torch.save

    def inside(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).parent == directory

    def told(name: str) -> Callable[..., Any]:
        stock = getattr(os, name)

        def run(path: Any, *args: Any, **how: Any) -> Any:
            if inside(path):
                tell(f"{name} {Path(path).name}")
            return stock(path, *args, **how)

        return run

    def opened(path: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
        if mode.startswith("r") or not inside(path):
            return stock_open(path, mode, *args, **how)
        name = Path(path).name
        tell(f"open {name}")
        return _Watched(stock_open(path, mode, *args, **how), lambda what: tell(f"{what} {name}"))

    def saved(value: Any, file: Any, *args: Any, **how: Any) -> None:
        # A file that is given by its path is written past Python.
        if not inside(file):
            stock_save(value, file, *args, **how)
            return
        with opened(file, "wb") as stream:
            stock_save(value, stream, *args, **how)

    with ExitStack() as stack:
        for name in ("unlink", "remove", "rename", "replace"):
            stack.enter_context(mock.patch.object(os, name, told(name)))
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))
        stack.enter_context(mock.patch.object(torch, "save", saved))
        yield


def _saving_rank(rank: int, version: str, directory: Path, point: Point | None, parent: Connection) -> None:
    """Save. Every point is told to the parent, which answers at the one that is asked for; at last how it ended."""
    seen: Counter[str] = Counter()

    def tell(operation: str) -> None:
        here = Point(rank, operation, seen[operation])
        seen[operation] += 1
        parent.send(here)
        if here == point:
            parent.recv()

    end = "returned"
    try:
        store = dist.FileStore(str(_store(directory)), LAYOUT.size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=LAYOUT.size, timeout=COLLECTIVE_TIMEOUT)
        with _watching(directory, tell):
            _save(version, directory, LAYOUT.place(rank))
    except BaseException as e:  # any error will do, and torch's CheckpointException is no Exception
        end = type(e).__name__
    parent.send(end)
    # Without a goodbye to ranks that may be dead.
    os._exit(0)


def _checking_process(earlier: Path, directory: Path, parent: Connection) -> None:
    """Load from both folders, save into the second one, and load from it again."""
    groups.join(dist.HashStore(), 0, 1)
    parent.send(_load(earlier))
    parent.send(_load(directory))
    _save("new", directory, toy_model.Layout().place(0))
    parent.send(_load(directory))
    os._exit(0)


# In the process that forks


def _store(directory: Path) -> Path:
    """The file through which the ranks of a save meet."""
    return directory.with_suffix(".store")


@contextmanager
def _forked(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """A child process and the connection to it; it is dead afterwards."""
    # The group of the pool's call: children make their own.
    groups.leave()
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _kill(processes: list[Any]) -> None:
    """Kill processes so that none of them sees another one die."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            os.kill(process.pid, number)
    for process in processes:
        process.join()


def _save_on_ranks(
    version: str, directory: Path, point: Point | None = None, victims: tuple[int, ...] = ()
) -> tuple[list[str], list[Point]]:
    """Save on all ranks, and kill the victims at the point.

    Returns:
        How each rank ended, and every point that was passed, those of one rank in their order.
    """
    ends, passed = ["no answer"] * LAYOUT.size, list[Point]()
    with ExitStack() as stack:
        stack.callback(_store(directory).unlink, missing_ok=True)
        children = [
            stack.enter_context(_forked(_saving_rank, rank, version, directory, point)) for rank in range(LAYOUT.size)
        ]
        running = {connection: rank for rank, (_, connection) in enumerate(children)}
        while running:
            ready = wait(list(running), JOB_TIMEOUT)
            assert ready, f"{point}: hung with {victims} killed; the ranks ended {ends}"
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    said = connection.recv()
                except (EOFError, ConnectionResetError):
                    del running[connection]
                    continue
                if isinstance(said, str):
                    ends[running[connection]] = said
                    continue
                passed.append(said)
                if said == point:
                    _kill([children[victim][0] for victim in victims])
                    with suppress(BrokenPipeError):
                        connection.send(None)
        for victim in victims:
            if children[victim][0].exitcode == -signal.SIGKILL:
                ends[victim] = "killed"
    return ends, passed


@contextmanager
def _to_save_into(earlier: Path, over: bool) -> Iterator[Path]:
    """A folder with a copy of the earlier checkpoint in it, or with nothing."""
    with TemporaryDirectory(dir=earlier.parent) as directory:
        if over:
            shutil.copytree(earlier, directory, dirs_exist_ok=True)
        yield Path(directory)


def prepare(folder: str) -> None:
    """Write the earlier checkpoint."""
    earlier = Path(folder, "earlier")
    earlier.mkdir()
    assert _save_on_ranks("old", earlier)[0] == ["returned"] * LAYOUT.size


def points(folder: str, over: bool) -> list[Point]:
    """The points of a save into an empty folder, or over a copy of the earlier checkpoint; each rank's in their order.

    Of the many writes of one file: the first, the middle and the last one.
    """
    with _to_save_into(Path(folder, "earlier"), over) as directory:
        ends, passed = _save_on_ranks("new", directory)
    assert ends == ["returned"] * LAYOUT.size
    found: list[Point] = []
    for _, same in groupby(sorted(passed, key=lambda p: p.rank), lambda p: (p.rank, p.operation)):
        row = list(same)
        found += dict.fromkeys((row[0], row[len(row) // 2], row[-1]))
    return found


def interrupt(folder: str, over: bool, point: Point, victims: tuple[int, ...]) -> Aftermath:
    """Kill the victims when a save is at a point, and look at what is left, in a process of its own."""
    earlier = Path(folder, "earlier")
    with _to_save_into(earlier, over) as directory:
        before = damage.snapshot(directory)
        ends, _ = _save_on_ranks("new", directory, point, victims)
        untouched = damage.snapshot(directory) == before
        with _forked(_checking_process, earlier, directory) as (_, connection):
            found = [connection.recv() if connection.poll(JOB_TIMEOUT) else "hung" for _ in range(3)]
    return Aftermath(ends, untouched, *found)
