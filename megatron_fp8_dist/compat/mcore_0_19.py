"""Megatron-core 0.19: a load strategy takes the name of an async strategy too; common state is a ShardedObject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON_STATE_FIRST = False
"""Whether `save` writes common state before it calls a strategy; here the strategy writes it."""

COLLECTIVE_LOAD = False
"""Whether a load strategy reads through DCP's collectives, which tell the failing rank."""


def load(strategy: Any, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
    """`strategy.load` with this range's arguments."""
    return strategy.load(sharded_state_dict, checkpoint_dir, "mcore")
