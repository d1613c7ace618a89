"""Megatron-core 0.14 to 0.16: a load strategy takes two arguments; common state is `common.pt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON_STATE_FIRST = True
"""Whether `save` writes common state (`common.pt`) before it calls a strategy."""

COLLECTIVE_LOAD = True
"""Whether a load strategy reads through DCP's collectives, which tell the failing rank."""


def load(strategy: Any, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
    """`strategy.load` with this range's arguments."""
    return strategy.load(sharded_state_dict, checkpoint_dir)
