"""What the ranks hand to the command that started them: small JSON files, one per run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread over ranks."""

    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size. Ranks beyond tp * pp are data-parallel replicas."""

    def __str__(self) -> str:
        """For example "TP2xPP2"."""
        return f"TP{self.tp}xPP{self.pp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What the run that wrote the checkpoint found."""

    tensors: int
    """Whole quantized tensors."""
    codes: int
    """Their codes, in all directions that the checkpoint has."""
    step: int
    """Steps done when it saved."""
    losses: list[float]
    """Losses of the steps that came after the save."""
    quantized_bytes: int
    """Bytes of all files of the model-only checkpoint that `megatron_fp8_dist.save` wrote."""
    bf16_bytes: int
    """Bytes of all files of the model-only checkpoint of the same model in BF16 that Megatron's own `save` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeResult:
    """What a run that loaded the checkpoint found."""

    bit_exact: list[str]
    """Names of the quantized tensors whose every byte was the saved one on every rank."""
    differing: list[str]
    """Names of the others."""
    exact_parameters: int
    """Parameters, summed over all ranks, that the load report counts as exact."""
    requantized_parameters: int
    """Likewise: quantized again."""
    losses: list[float]
    """Losses of the steps after the load."""


def write_result(folder: Path, layout: Layout, result: TrainResult | ResumeResult) -> None:
    """Store the result of the run at `layout`."""
    (folder / f"{layout}.json").write_text(json.dumps(asdict(result)), encoding="utf-8")


def read_train_result(folder: Path, layout: Layout) -> TrainResult:
    """The result of the training run."""
    return TrainResult(**json.loads((folder / f"{layout}.json").read_text(encoding="utf-8")))


def read_resume_result(folder: Path, layout: Layout) -> ResumeResult:
    """The result of the resumed run at `layout`."""
    return ResumeResult(**json.loads((folder / f"{layout}.json").read_text(encoding="utf-8")))
