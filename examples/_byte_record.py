"""A record of every quantized byte, kept beside the checkpoint and apart from it.

The run that saves writes it with `torch.save`; a run that loads the checkpoint compares what it got with it. Nothing
here uses the package that is being shown: positions come from Megatron's own sharded state dict, bytes from the raw
buffers of the weights. What is recorded is what each element has: its code and the bits of its scales, however many
elements share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

Buffers = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Raw codes and scales of a weight by name, one value per element or per block; see `WeightKind.buffers`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a quantized tensor that one rank holds as one piece."""

    name: str
    """Megatron's key and, for a stacked key, the layer."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the fragment begins in it."""
    elements: dict[str, torch.Tensor]
    """Name of a buffer -> what each element has in it, as integers in the shape of the fragment."""

    @property
    def window(self) -> tuple[slice, ...]:
        """The fragment's place in the whole tensor."""
        sizes = next(iter(self.elements.values())).shape
        return tuple(slice(o, o + s) for o, s in zip(self.offset, sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(w.stop - w.start for w in self.window)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole quantized tensor, put together from the fragments of all ranks."""

    shape: tuple[int, ...]
    """Its shape."""
    elements: dict[str, torch.Tensor]
    """Name of a buffer -> what each element has in it, as integers in the shape of the whole."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


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
    """Whether its codes and its scales are the recorded ones, bit for bit."""


def _per_element(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The bits that each element of a tensor of `shape` has in `values`, where blocks divide `shape`."""
    values = values.detach().contiguous()
    if values.is_floating_point():
        values = values.view(torch.int32)
    for axis, size in enumerate(shape):
        values = values.repeat_interleave(size // values.shape[axis], dim=axis)
    return values


def _leaves(entry: ShardedTensor | ShardedTensorFactory, elements: torch.Tensor) -> list[ShardedTensor]:
    """Where Megatron puts each piece of `elements`; a SwiGLU weight is stored as two pieces, gate and up."""
    if isinstance(entry, ShardedTensorFactory):
        built: list[ShardedTensor] = replace(entry, data=elements).build()
        return built
    return [replace(entry, data=elements, dtype=elements.dtype)]


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
        held = buffers(entry.data)
        pieces = [_leaves(entry, _per_element(values, entry.data.shape)) for values in held.values()]
        for leaves in zip(*pieces, strict=True):
            first = leaves[0]
            layers = first.prepend_axis_num
            name = ".".join([first.key, *(f"layer_{i}" for i in first.global_offset[:layers])])
            shape, offset = tuple(first.global_shape[layers:]), tuple(first.global_offset[layers:])
            found.append(Fragment(name, shape, offset, {n: p.data.clone() for n, p in zip(held, leaves, strict=True)}))
    return found


def write(folder: Path, rank: int, held: list[Fragment]) -> None:
    """Store the fragments of one rank."""
    torch.save([asdict(f) for f in held], folder / f"rank_{rank}.pt")


def read(folder: Path) -> dict[str, Whole]:
    """Whole tensors from the files of all ranks.

    Raises:
        ValueError: the fragments of a tensor leave a hole, or overlap.
    """
    wholes: dict[str, Whole] = {}
    missing: dict[str, int] = {}
    for path in sorted(folder.glob("rank_*.pt")):
        for fields in torch.load(path, weights_only=True):
            part = Fragment(**fields)
            empty = {name: values.new_zeros(part.shape) for name, values in part.elements.items()}
            whole = wholes.setdefault(part.name, Whole(part.shape, empty))
            for name, values in part.elements.items():
                whole.elements[name][part.window] = values
            missing[part.name] = missing.get(part.name, whole.size) - part.size
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
            and whole.shape == part.shape
            and whole.elements.keys() == part.elements.keys()
            and all(torch.equal(whole.elements[name][part.window], part.elements[name]) for name in part.elements)
        )
        verdicts.append(Verdict(part.name, part.offset, part.size, exact))
    return verdicts


def bit_exact(verdicts: Iterable[Verdict], record: Mapping[str, Whole]) -> set[str]:
    """Names of the tensors that the verdicts of all ranks together cover wholly, and find exact everywhere."""
    sizes: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in record}
    wrong = set()
    for verdict in verdicts:
        if not verdict.exact:
            wrong.add(verdict.name)
        sizes.setdefault(verdict.name, {})[verdict.offset] = verdict.elements
    return {n for n, whole in record.items() if n not in wrong and sum(sizes[n].values()) == whole.size}
