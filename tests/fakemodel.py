"""Whole weights in NumPy, every element with a scale of its own, and layouts that cut them into ranks' parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_fp8_dist.quantized.regrid import destination_edges
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from tests.elements import Side, Sides
from tests.elementwise import Bits, Bytes, Elements, starts

if TYPE_CHECKING:
    from numpy.typing import NDArray


Index = tuple[int, ...]
"""Layer, or layer and expert."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups."""

    tp: int
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def places(self) -> Iterator[Place]:
        """Every rank's place."""
        for pp, ep, dp, tp in itertools.product(*map(range, (self.pp, self.ep, self.dp, self.tp))):
            yield Place(self, tp, pp, ep, dp)

    def __str__(self) -> str:
        return "".join(f"{n}{s}" for n, s in zip(("tp", "pp", "ep", "dp"), self._sizes, strict=True) if s > 1) or "one"

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.tp, self.pp, self.ep, self.dp


@dataclass(frozen=True, slots=True)
class Place:
    """One rank in its layout."""

    layout: Layout
    tp: int
    pp: int
    ep: int
    dp: int

    def holds(self, index: Index, stack: tuple[int, ...]) -> bool:
        """Whether the rank holds a layer (and expert) of a stack."""
        mine = zip(index, stack, (self.pp, self.ep), (self.layout.pp, self.layout.ep), strict=False)
        return all(i * parts // total == part for i, total, part, parts in mine)


def block_of(size: int, part: int, parts: int) -> NDArray[np.int64]:
    """Indices of one of `parts` equal parts."""
    return np.arange(part * size // parts, (part + 1) * size // parts)


def cut_indices(cut: str, shape: tuple[int, ...], tp: int, parts: int) -> tuple[NDArray[np.int64], ...]:
    """Indices, per axis, of what a tensor-parallel rank holds of a weight of `shape`."""
    everything = [np.arange(s) for s in shape]
    if cut == "column":
        everything[0] = block_of(shape[0], tp, parts)
    elif cut == "row":
        everything[1] = block_of(shape[1], tp, parts)
    elif cut == "swiglu":
        half = block_of(shape[0] // 2, tp, parts)
        everything[0] = np.concatenate([half, half + shape[0] // 2])
    return tuple(everything)


def pick(whole: Sides, indices: Sequence[NDArray[np.int64]]) -> Sides:
    """The elements of a shard, copied."""
    return {direction: side[np.ix_(*indices)] for direction, side in whole.items()}


def put(whole: Sides, shape: Sequence[int], indices: Sequence[NDArray[np.int64]], part: Sides) -> None:
    """Fill in the elements of a shard of a weight of `shape`; what is not known yet is 0."""
    window = np.ix_(*indices)
    for direction, side in part.items():
        parts = side.codes, side.scale, side.amax
        into = whole.setdefault(direction, Side(*(np.zeros(shape, values.dtype) for values in parts)))
        into.codes[window], into.scale[window], into.amax[window] = parts


CUT_AXIS = {"column": 0, "row": 1, "swiglu": 0}


@dataclass(frozen=True)
class Weight:
    """One weight of every layer, whole."""

    name: str
    cut: str
    """"column", "row", "swiglu" or "norm" (replicated)."""
    codes: Bytes
    """(layers, M, K), (layers, experts, M, K) or (layers, M)."""
    scale: Bits
    """Bits of every element's scale."""
    plain: NDArray[np.float32]
    """What the layers hold that are not quantized."""
    schemes: tuple[Scheme | None, ...]
    """Per layer; None: high precision."""

    @property
    def stack(self) -> tuple[int, ...]:
        """Layers, or layers and experts."""
        return self.codes.shape[: self.codes.ndim - (1 if self.cut == "norm" else 2)]

    def local(self, array: NDArray[Any], index: Index, place: Place) -> NDArray[Any]:
        """What a rank holds of one layer of an array that belongs to this weight."""
        whole: NDArray[Any] = array[index]
        return whole[np.ix_(*cut_indices(self.cut, whole.shape, place.tp, place.layout.tp))]

    def elements(self, index: Index, place: Place) -> Elements:
        """Codes and scales that a rank holds of one layer."""
        codes = self.local(self.codes, index, place)
        return Elements(codes, self.local(self.scale, index, place), np.ones(codes.shape, np.bool_))

    def tensor(self, index: Index, place: Place) -> torch.Tensor:
        """A rank's parameter."""
        scheme = self.schemes[index[0]]
        if scheme is None:
            return torch.from_numpy(self.local(self.plain, index, place)).to(torch.bfloat16)
        elements = self.elements(index, place)
        components: dict[str, torch.Tensor] = {}
        for spec in scheme.directions:
            edges = destination_edges(scheme, spec.scale, elements.codes.shape)
            values = elements.scale[np.ix_(*(e[:-1] for e in edges))].view(np.float32)
            components |= {spec.data: torch.from_numpy(elements.codes), spec.scale.component: torch.from_numpy(values)}
        return BlockScaledTensor.from_components(scheme, components)


@dataclass(frozen=True)
class Model:
    """Whole weights."""

    weights: tuple[Weight, ...]
    stacked: bool
    """Whether layers are a prepended axis of one key; otherwise each has its own key."""

    def with_schemes(self, *schemes: Scheme | None) -> Model:
        """The same model with other schemes for its quantized weights, layer by layer."""
        return replace(self, weights=tuple(w if w.cut == "norm" else replace(w, schemes=schemes) for w in self.weights))


E4M3 = Scheme("per_tensor", "E4M3")
E5M2 = Scheme("per_tensor", "E5M2")
SHAPES = {"column": (8, 8), "row": (8, 8), "swiglu": (16, 8)}


def scales(cut: str, shape: tuple[int, ...], scheme: Scheme, shards: int, rng: np.random.Generator) -> Bits:
    """Every element's scale, where each of `shards` tensor-parallel shards was quantized alone."""
    out = np.zeros(shape, np.float32)
    blocks = scheme.block(scheme.directions[0].scale, 2)
    for part in range(shards):
        indices = cut_indices(cut, shape, part, shards)
        for first in itertools.product(*(starts(len(i), b) for i, b in zip(indices, blocks, strict=True))):
            window = [i[f : None if b is None else f + b] for i, f, b in zip(indices, first, blocks, strict=True)]
            out[np.ix_(*window)] = rng.uniform(0.01, 2.0)
    return out.view(np.uint32)


def weight(
    cut: str, stack: tuple[int, ...], schemes: tuple[Scheme | None, ...], shards: int, seed: int, shape: Sequence[int]
) -> Weight:
    """A weight with random bytes (for exact paths all 256 of them) and distinct scales."""
    rng = np.random.default_rng(seed)
    whole = (*stack, *shape)
    kind = next((s for s in schemes if s is not None), E4M3)
    bits = np.zeros(whole, np.uint32)
    if cut != "norm":
        for index in np.ndindex(*stack):
            bits[index] = scales(cut, tuple(shape), kind, shards, rng)
    codes = rng.integers(0, 256, whole, dtype=np.uint8)
    plain = rng.permutation(np.arange(codes.size, dtype=np.float32) - codes.size / 2).reshape(whole)
    return Weight(f"{cut}.weight", cut, codes, bits, plain, schemes)


def make_model(
    *schemes: Scheme | None,
    stacked: bool = True,
    shards: int = 1,
    experts: int = 0,
    finite: bool = False,
    shapes: dict[str, tuple[int, int]] | None = None,
    seed: int = 0,
) -> Model:
    """A model with one layer per scheme.

    Args:
        schemes: per layer; None is high precision.
        stacked: whether layers are a prepended axis.
        shards: how many tensor-parallel shards were quantized apart; 1 gives scales that are equal on all ranks.
        experts: 0, or the size of a second prepended axis.
        finite: leave out NaN and infinite codes, which say nothing about rounding.
        shapes: of the weights by cut.
        seed: of the random values.
    """
    stack = (len(schemes), experts) if experts else (len(schemes),)
    chosen = SHAPES if shapes is None else shapes
    made = [weight(cut, stack, schemes, shards, seed + i, shape) for i, (cut, shape) in enumerate(chosen.items())]
    if finite:
        made = [replace(w, codes=np.where(w.codes & 0x7F >= 0x7B, w.codes & 0x83, w.codes)) for w in made]
    if not experts:
        made.append(weight("norm", stack, (None,) * len(schemes), 1, seed + 99, (8,)))
    return Model(tuple(made), stacked)
