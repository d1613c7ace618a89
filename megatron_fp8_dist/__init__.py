"""Megatron-core distributed checkpoints whose quantized parameters stay quantized.

Names are imported when they are first used: the root imports neither Megatron nor Transformer Engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.directory import read_manifest
    from .errors import FP8CheckpointError
    from .options import LoadOptions, SaveOptions
    from .quantized.scheme import Scheme
    from .quantized.tensor import BlockScaledTensor
    from .report import last_report
    from .strategies.api import load, save
    from .strategies.expansion import expand_quantized
    from .strategies.load import FP8LoadShardedStrategy
    from .strategies.save import FP8SaveShardedStrategy
    from .te.exact_ops import exact_ops

_HOMES = {
    "BlockScaledTensor": "quantized.tensor",
    "FP8CheckpointError": "errors",
    "FP8LoadShardedStrategy": "strategies.load",
    "FP8SaveShardedStrategy": "strategies.save",
    "LoadOptions": "options",
    "SaveOptions": "options",
    "Scheme": "quantized.scheme",
    "exact_ops": "te.exact_ops",
    "expand_quantized": "strategies.expansion",
    "last_report": "report",
    "load": "strategies.api",
    "read_manifest": "backends.directory",
    "save": "strategies.api",
}
"""Public name -> module that defines it."""

__all__ = [
    "BlockScaledTensor",
    "FP8CheckpointError",
    "FP8LoadShardedStrategy",
    "FP8SaveShardedStrategy",
    "LoadOptions",
    "SaveOptions",
    "Scheme",
    "exact_ops",
    "expand_quantized",
    "last_report",
    "load",
    "read_manifest",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
