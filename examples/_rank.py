"""What each rank does: train and save, or load, compare and train on.

`train` and `resume` are the example; the rest of the file serves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

import _byte_record as byte_record
import _cpu_standins as cpu_standins
from _results import Layout, ResumeResult, TrainResult, write_result
from _tiny_gpt import MasterSGD, Text, build_model, train_step
from _weights import WeightKind, choose
from megatron_fp8_dist import last_report, load, save
from megatron_fp8_dist.report import LoadReport

TEXT = Path(__file__).with_name("alice.txt")
TRAIN_SEED = 1
RESUME_SEED = 2
"""Another one than training's, so that nothing is right after a load but what the load brought."""


def train(out: Path, layout: Layout, weights: str, scheme: str, steps: int, steps_after: int) -> None:
    """Train `steps` steps, save, and go `steps_after` steps further, as the run that was never interrupted.

    Writes below `out`: the checkpoint, the record of its bytes, and the model alone, quantized and in BF16.
    """
    kind = choose(weights, scheme)
    with _ranks(layout):
        if cpu_standins.needed():
            _say(cpu_standins.notice())
        _say(f"{layout}: quantized weights are {kind.title}")
        run = _Run(layout, kind, TRAIN_SEED)
        for step in range(1, steps + 1):
            run.step(step)

        state = run.sharded_state_dict()
        save({**state, "step": steps}, _fresh(out / "checkpoint"))
        save({"model": state["model"]}, _fresh(out / "model-quantized"))
        with cpu_standins.active():
            dist_checkpointing.save({"model": _in_bf16(state["model"], kind)}, _fresh(out / "model-bf16"))
        byte_record.write(Path(_fresh(out / "record")), dist.get_rank(), run.fragments())
        _say(f"{layout}: saved after step {steps}")

        losses = [run.step(step) for step in range(steps + 1, steps + steps_after + 1)]
        dist.barrier()
        if dist.get_rank() == 0:
            wholes = byte_record.read(out / "record")
            result = TrainResult(
                tensors=len(wholes),
                codes=sum(w.size for w in wholes.values()) * len(kind.scheme.directions),
                step=steps,
                losses=losses,
                quantized_bytes=_bytes_below(out / "model-quantized"),
                bf16_bytes=_bytes_below(out / "model-bf16"),
            )
            write_result(out, layout, result)


def resume(out: Path, layout: Layout, weights: str, scheme: str, steps_after: int) -> None:
    """Load the checkpoint below `out` into a new model, compare every quantized byte, and train `steps_after` steps."""
    kind = choose(weights, scheme)
    with _ranks(layout):
        run = _Run(layout, kind, RESUME_SEED)
        state = load(run.sharded_state_dict(), str(out / "checkpoint"))
        report = last_report()
        assert isinstance(report, LoadReport)
        run.load_state_dict(state)

        record = byte_record.read(out / "record")
        verdicts = _from_all_ranks(byte_record.compare(run.fragments(), record))
        exact = byte_record.bit_exact(verdicts, record)
        _say(f"{layout}: loaded step {state['step']}; {len(exact)} of {len(record)} quantized tensors are bit-exact")

        losses = [run.step(state["step"] + i) for i in range(1, steps_after + 1)]
        if dist.get_rank() == 0:
            result = ResumeResult(
                bit_exact=sorted(exact),
                differing=sorted(record.keys() - exact),
                exact_parameters=report.exact,
                requantized_parameters=report.requantized,
                losses=losses,
            )
            write_result(out, layout, result)


class _Run:
    """A model in training: what a checkpoint has to bring back."""

    def __init__(self, layout: Layout, kind: WeightKind, seed: int) -> None:
        self._layout, self._kind = layout, kind
        self._text = Text(TEXT)
        with cpu_standins.active():
            self._model = build_model(layout, seed)
            self._optimizer = MasterSGD(self._model, kind)

    def step(self, number: int) -> float:
        """Train one step; steps count from 1 and choose their own data."""
        with cpu_standins.active():
            loss = train_step(self._model, self._optimizer, self._text, number)
        _say(f"{self._layout}: step {number:2d}  loss {loss:.4f}")
        return loss

    def sharded_state_dict(self) -> dict[str, Any]:
        """The entries of model and optimizer, as for any Megatron checkpoint."""
        model = self._model.sharded_state_dict()
        return {"model": model, "optimizer": self._optimizer.sharded_state_dict(model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `load` returned, as after any Megatron load."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def fragments(self) -> list[byte_record.Fragment]:
        """The quantized bytes that this rank holds."""
        entries = self._model.sharded_state_dict().values()
        return byte_record.fragments(entries, self._kind.owns, self._kind.buffers)


@contextmanager
def _ranks(layout: Layout) -> Iterator[None]:
    """Join the other ranks that torchrun started."""
    dist.init_process_group("gloo")
    try:
        parallel_state.initialize_model_parallel(layout.tp, layout.pp)
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _in_bf16(entries: dict[str, Any], kind: WeightKind) -> dict[str, Any]:
    """The model as a stock checkpoint has it.

    Megatron's own writer dequantizes what lies on a GPU; on a CPU that is left to us.
    """
    return {
        key: _dequantized(entry) if isinstance(entry.data, torch.Tensor) and kind.owns(entry.data) else entry
        for key, entry in entries.items()
    }


def _dequantized(entry: Any) -> Any:
    data = entry.data.dequantize()
    # A factory has no dtype of its own.
    dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
    return replace(entry, data=data, **dtype)


def _fresh(folder: Path) -> str:
    """Make a folder, once for all ranks."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return str(folder)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _from_all_ranks(mine: list[byte_record.Verdict]) -> list[byte_record.Verdict]:
    everyone: list[list[byte_record.Verdict]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return list(chain.from_iterable(everyone))


def _say(line: str) -> None:
    """Print from rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)
