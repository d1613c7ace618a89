"""Parameters that `exact_ops` cut: the entries of their parts, which stand for the parameter together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Problem
from ..quantized.tensor import BlockScaledTensor, assemble
from .layout import Box, tiles


@dataclass(eq=False, slots=True)
class Cut:
    """One parameter and its parts."""

    param: torch.Tensor
    entries: list[Any]
    """The entries of its parts."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index of an entry -> what a load read for it, until all are there."""
    high_precision: bool = False
    """Whether the checkpoint holds a part in high precision, so that the model's own code has to quantize the whole."""
    done: bool = False
    """Whether the parameter was restored."""

    @property
    def key(self) -> str:
        """The keys of all parts."""
        return ", ".join(str(entry.key) for entry in self.entries)

    def add(self, entry: Any, value: torch.Tensor) -> bool:
        """Take one part's value; whether that was the last of them."""
        self.values[next(i for i, e in enumerate(self.entries) if e is entry)] = value
        return len(self.values) == len(self.entries)

    def join(self) -> torch.Tensor | Problem:
        """All values as the one quantized shard that they were cut from; one in high precision stands for all."""
        plain = [value for value in self.values.values() if not isinstance(value, BlockScaledTensor)]
        placed = [(self.entries[i].data.origin, value) for i, value in self.values.items()]
        self.values.clear()
        if plain:
            return plain[0]
        parts = [value for _, value in placed if isinstance(value, BlockScaledTensor)]
        schemes = {part.scheme for part in parts}
        common = set[str].intersection(*(set(part.directions) for part in parts))
        if len(schemes) > 1 or not common:
            found = "parts saved as " + ", ".join(
                sorted({f"{p.scheme.name} ({', '.join(p.directions)})" for p in parts})
            )
            return Problem(self.key, found, "one scheme for all parts of a parameter")
        first = parts[0]
        return assemble(
            self.param.shape,
            list(zip((o for o, _ in placed), parts, strict=True)),
            first.scheme,
            first.dtype,
            first.device,
            sorted(common),
        )


def find_cuts(entries: Iterable[Any]) -> list[Cut]:
    """The parameters whose parts are among `entries`."""
    cuts: dict[int, Cut] = {}
    for entry in entries:
        whole = entry.data.part_of if isinstance(entry.data, BlockScaledTensor) else None
        if whole is not None:
            cuts.setdefault(id(whole), Cut(whole, [])).entries.append(entry)
    return list(cuts.values())


def check_cuts(entries: Iterable[Any]) -> list[Problem]:
    """Parameters that are cut badly: with a part that no entry carries, or that two carry."""
    problems = []
    for cut in find_cuts(entries):
        boxes = [Box(tuple(e.data.origin), tuple(e.data.shape)) for e in cut.entries]
        if not tiles(boxes, tuple(cut.param.shape)):
            found = "parts " + ", ".join(f"{list(b.shape)} at {list(b.offset)}" for b in boxes)
            expected = f"entries for all of a {type(cut.param).__name__} {list(cut.param.shape)}, each part once"
            problems.append(Problem(cut.key, found, expected))
    return problems
