"""What a save or a load did, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What one save did. Counts are global: every rank holds the same numbers."""

    checkpoint_dir: str
    tensors: int
    """Quantized tensors; each layer of a stacked key counts as one."""
    codes: int
    """Quantized elements, replicas not counted."""
    component_bytes: int
    """Bytes of codes and scales on disk, replicas not counted."""
    seconds: float
    """Wall time of the strategy's save on rank 0."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did. Counts are sums over all ranks of destination parameters, replicas included.

    A parameter is counted once, under the strongest word that applies to it.
    """

    checkpoint_dir: str
    exact: int = 0
    """Codes and scales are the saved ones, bit for bit."""
    requantized: int = 0
    """At least one block met source blocks of different scale, or changed scheme, and was quantized again."""
    dequantized: int = 0
    """Quantized in the checkpoint, high precision in the model."""
    quantized: int = 0
    """High precision in the checkpoint, quantized in the model."""
    codes: int = 0
    """Quantized elements read."""
    component_bytes: int = 0
    """Bytes of codes and scales read."""
    requantized_blocks: Mapping[str, int] = field(default_factory=dict)
    """Logical key -> number of blocks that were requantized."""
    seconds: float = 0.0
    """Wall time of the load on rank 0; 0 where stock code carried the plan out and nobody measured it."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)


_last: SaveReport | LoadReport | None = None


def record(report: SaveReport | LoadReport) -> None:
    """Make `report` the newest one of this process."""
    global _last  # noqa: PLW0603 - one newest report per process is the contract of last_report()
    _last = report


def last_report() -> SaveReport | LoadReport | None:
    """The newest report of this process, or None before the first save or load.

    A strategy keeps its own in `.report`: use that where several models are saved or loaded.
    """
    return _last
