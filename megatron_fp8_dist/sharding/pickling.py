"""What a pickle of a value would hold, without its bytes."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, cast

import torch

from ..compat.host import ShardedBase


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Collector(pickle.Pickler):
    """Walks a value as pickle does, and collects tensors and entries instead of going into them."""

    def __init__(self) -> None:
        super().__init__(cast(Any, _Nowhere()), protocol=pickle.HIGHEST_PROTOCOL)
        self.found: list[Any] = []

    def persistent_id(self, obj: Any) -> str | None:
        """Stand in for what is collected."""
        if isinstance(obj, (torch.Tensor, ShardedBase)):
            self.found.append(obj)
            return "collected"
        return None


def check_picklable(value: Any) -> list[Any]:
    """The tensors and entries that a pickle of `value` would hold, at any depth.

    Raises:
        Exception: what pickling raises; anything, for an object that cannot be pickled.
    """
    collector = _Collector()
    collector.dump(value)
    return collector.found


def pickled_parts(value: Any) -> list[Any]:
    """As `check_picklable`; what was found up to the error, for a value that cannot be pickled."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return []
    collector = _Collector()
    with contextlib.suppress(Exception):  # that it cannot be pickled is told where it is pickled
        collector.dump(value)
    return collector.found
