"""Reads ahead: parameters are restored one at a time, but read several at a time where they are small."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from ..sharding.layout import Region

LEAST_WINDOW = 1 << 20
MOST_WINDOW = 64 << 20
"""Elements of components (one byte each, scales apart) that are read ahead of their turn."""


def window_for(total: int) -> int:
    """How much to read ahead of a load of `total` elements: 5 %, so that what is held twice stays small."""
    return min(max(total // 20, LEAST_WINDOW), MOST_WINDOW)


class Prefetch:
    """Serves regions in about the order that was announced, reading a window of them at once."""

    def __init__(
        self, read: Callable[[Sequence[Region]], list[torch.Tensor]], announced: Iterable[Region], window: int
    ) -> None:
        """Set up.

        Args:
            read: reads regions into host memory.
            announced: what will be asked for, in order. Other regions are served too.
            window: elements that are read in one go, if what is asked for has not more.
        """
        self._read, self._window = read, window
        self._queue = deque(announced)
        self._held: dict[Region, torch.Tensor] = {}
        self._ahead: Counter[Region] = Counter()
        """Regions that were read before their turn, and are still in the queue."""

    def __call__(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        """The tensors of `regions`; each is held here until it is served once."""
        missing = [r for r in regions if r not in self._held]
        if missing:
            batch = self._batch(missing)
            self._held.update(zip(batch, self._read(batch), strict=True))
        return [self._held.pop(r) for r in regions]

    def _batch(self, missing: Sequence[Region]) -> list[Region]:
        batch = dict.fromkeys(missing)
        self._ahead.update(batch.keys())
        size = sum(r.box.size for r in batch)
        while self._queue and (self._ahead[self._queue[0]] or size + self._queue[0].box.size <= self._window):
            region = self._queue.popleft()
            if self._ahead[region]:
                self._ahead[region] -= 1
            elif region not in batch and region not in self._held:
                batch[region] = None
                size += region.box.size
        return list(batch)
