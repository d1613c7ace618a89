"""What a save that failed leaves in the process: nothing, so that the next one works. Reports belong to the process."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from megatron_fp8_dist import FP8CheckpointError, FP8SaveShardedStrategy, last_report, load, save
from tests import toy_model

pytestmark = pytest.mark.usefixtures("single")

PLACE = toy_model.Layout().place(0)


class Interrupt(BaseException):
    """What a signal handler raises."""


def gone(*_: object, **__: object) -> None:
    raise OSError(5, "the disk is gone")


def signalled(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGUSR2)


def interrupted(number: int, frame: object) -> None:
    raise Interrupt


FAILURES = {
    "writing": "torch.distributed.checkpoint.FileSystemWriter.write_data",
    ".metadata": "torch.distributed.checkpoint.FileSystemWriter.finish",
    "manifest": "megatron_fp8_dist.strategies.save.write_manifest",
    "marker": "megatron.core.dist_checkpointing.serialization.save_config",
}


def state_of_the_process() -> dict[str, Any]:
    """What a save might leave behind in this process."""
    return {
        "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _open(n)),
        "threads": {t.name for t in threading.enumerate()},
        "warning filters": list(warnings.filters),
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)],
        "writer": dict(vars(FileSystemWriter)),
        "group": dist.group.WORLD,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def _open(number: str) -> bool:
    return Path(f"/proc/self/fd/{number}").exists()


@pytest.mark.parametrize("how", [gone, signalled])
@pytest.mark.parametrize("point", FAILURES.values(), ids=FAILURES.keys())
def test_a_failed_save_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, how: Callable[..., None]
) -> None:
    for name in ("earlier", "here"):
        (tmp_path / name).mkdir()
    stock = signal.signal(signal.SIGUSR2, interrupted)
    model, strategy = toy_model.Toy("block_scaled", PLACE), FP8SaveShardedStrategy()
    entries, state = model.sharded_state_dict(), state_of_the_process()
    before = {name: (p, toy_model.content(p)) for name, p in model.named_parameters()}
    save(entries, tmp_path / "earlier")
    report = last_report()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(point, how)
            with pytest.raises((FP8CheckpointError, Interrupt)):
                save(entries, tmp_path / "here", strategy)
        assert state_of_the_process() == state
    finally:
        signal.signal(signal.SIGUSR2, stock)
    if point != FAILURES["marker"]:  # Megatron's own step, after the strategy has reported
        assert last_report() is report
        assert strategy.report is None
    assert {name: (entries[name].data, toy_model.content(entries[name].data)) for name in before} == before

    save(entries, tmp_path / "here", strategy)
    assert strategy.report is last_report()
    for directory in ("here", "earlier"):
        loaded = toy_model.Toy("block_scaled", PLACE, blank=True)
        load(loaded.sharded_state_dict(), tmp_path / directory)
        assert loaded.wrong() == []


def test_the_last_report_is_that_of_the_process(tmp_path: Path) -> None:
    thread = threading.Thread(target=save, args=(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path))
    thread.start()
    thread.join()
    report = last_report()
    assert report is not None
    assert report.checkpoint_dir == str(tmp_path)
