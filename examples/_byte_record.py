"""A record of every quantized byte, kept beside the checkpoint and apart from it.

The run that saves writes it with `torch.save`; a run that loads the checkpoint compares what it got with it. Nothing
here uses the package that is being shown: positions come from Megatron's own sharded state dict, bytes from the raw
buffers of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

Buffers = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Raw codes and scale_inv of a weight."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a quantized tensor that one rank holds as one piece."""

    name: str
    """Megatron's key and, for a stacked key, the layer."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the fragment begins in it."""
    codes: torch.Tensor
    """uint8, shape of the fragment."""
    scale: torch.Tensor
    """The four bytes of its scale_inv, uint8."""

    @property
    def window(self) -> tuple[slice, ...]:
        """The fragment's place in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.codes.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole quantized tensor, put together from the fragments of all ranks."""

    codes: torch.Tensor
    """uint8, shape of the whole tensor."""
    scale: torch.Tensor
    """The four bytes of the one scale_inv that all fragments share."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one fragment of a loaded model compares with the record."""

    name: str
    """Name of the whole tensor."""
    offset: tuple[int, ...]
    """Where the fragment begins."""
    elements: int
    """Its size."""
    exact: bool
    """Whether its codes and its scale are the recorded ones, bit for bit."""


def _leaves(entry: ShardedTensor | ShardedTensorFactory, codes: torch.Tensor) -> list[ShardedTensor]:
    """Where Megatron puts each piece of `codes`; a SwiGLU weight is stored as two pieces, gate and up."""
    if isinstance(entry, ShardedTensorFactory):
        built: list[ShardedTensor] = replace(entry, data=codes).build()
        return built
    return [replace(entry, data=codes, dtype=codes.dtype)]


def fragments(entries: Iterable[Any], owns: Callable[[torch.Tensor], bool], buffers: Buffers) -> list[Fragment]:
    """All fragments that this rank holds.

    Args:
        entries: values of the model's sharded state dict, as Megatron made it.
        owns: whether a tensor is a quantized weight.
        buffers: its raw bytes.
    """
    found = []
    for entry in entries:
        if not (isinstance(entry, ShardedTensor | ShardedTensorFactory) and owns(entry.data)):
            continue
        codes, scale_inv = buffers(entry.data)
        scale = scale_inv.detach().reshape(1).clone().view(torch.uint8)
        for leaf in _leaves(entry, codes.detach()):
            layers = leaf.prepend_axis_num
            name = ".".join([leaf.key, *(f"layer_{i}" for i in leaf.global_offset[:layers])])
            shape, offset = tuple(leaf.global_shape[layers:]), tuple(leaf.global_offset[layers:])
            found.append(Fragment(name, shape, offset, leaf.data.clone(), scale))
    return found


def write(folder: Path, rank: int, held: list[Fragment]) -> None:
    """Store the fragments of one rank."""
    torch.save([asdict(f) for f in held], folder / f"rank_{rank}.pt")


def read(folder: Path) -> dict[str, Whole]:
    """Whole tensors from the files of all ranks.

    Raises:
        ValueError: the fragments of a tensor leave a hole, or do not share one scale.
    """
    wholes: dict[str, Whole] = {}
    missing: dict[str, int] = {}
    for path in sorted(folder.glob("rank_*.pt")):
        for fields in torch.load(path, weights_only=True):
            part = Fragment(**fields)
            whole = wholes.setdefault(part.name, Whole(torch.zeros(part.shape, dtype=torch.uint8), part.scale))
            if not torch.equal(whole.scale, part.scale):
                raise ValueError(f"record of {part.name}: shards of one weight have different scales")
            whole.codes[part.window] = part.codes
            missing[part.name] = missing.get(part.name, whole.codes.numel()) - part.codes.numel()
    uncovered = [name for name, elements in missing.items() if elements]
    if uncovered or not wholes:
        raise ValueError(f"record in {folder}: empty, or not covered exactly once: {', '.join(uncovered)}")
    return wholes


def compare(held: Iterable[Fragment], record: Mapping[str, Whole]) -> list[Verdict]:
    """Each fragment of this rank against the record, as bytes."""
    verdicts = []
    for part in held:
        whole = record.get(part.name)
        exact = (
            whole is not None
            and tuple(whole.codes.shape) == part.shape
            and torch.equal(whole.codes[part.window], part.codes)
            and torch.equal(whole.scale, part.scale)
        )
        verdicts.append(Verdict(part.name, part.offset, part.codes.numel(), exact))
    return verdicts


def bit_exact(verdicts: Iterable[Verdict], record: Mapping[str, Whole]) -> set[str]:
    """Names of the tensors that the verdicts of all ranks together cover wholly, and find exact everywhere."""
    sizes: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in record}
    wrong = set()
    for verdict in verdicts:
        if not verdict.exact:
            wrong.add(verdict.name)
        sizes.setdefault(verdict.name, {})[verdict.offset] = verdict.elements
    return {n for n, whole in record.items() if n not in wrong and sum(sizes[n].values()) == whole.codes.numel()}
