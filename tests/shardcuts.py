"""One weight of any scheme, cut in any way: saved and loaded on fake ranks, beside a model that knows only elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist import Scheme
from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.options import LoadOptions
from tests import elements
from tests.elements import Sides, conform, random_sides, sides_of, tensor_of
from tests.fakemodel import Layout, pick, put
from tests.fakeranks import DIRECTORY, Rank, Recorder, blank, load, save

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "layers.weight"
SCHEMES = [
    Scheme("blockwise_2d", "E4M3"),
    Scheme.of("blockwise_2d", "E5M2", power_of_two=0),
    Scheme("blockwise_1d", "E4M3"),
    Scheme.of("blockwise_1d", "E4M3", power_of_two=0),
    Scheme("mxfp8", "E4M3"),
    Scheme("mxfp8", "E5M2"),
    Scheme("mxfp8_2d", "E4M3"),
    Scheme("nvfp4", "E2M1"),
    Scheme("nvfp4_2d", "E2M1"),
    Scheme("nvfp4_row_scaled", "E2M1"),
    Scheme.of("nvfp4_2d", "E2M1", e4m3_max=256, use_4over6=1),
]


def scheme_id(value: Any) -> str | None:
    """A scheme's name in test ids."""
    if isinstance(value, Scheme):
        return "-".join([value.name, value.element, *(f"{k}={v}" for k, v in value.flags)])
    return None


each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)


def side_of(scheme: Scheme) -> int:
    """The longer side of a block."""
    return max(max(b) for b in elements.rule_of(scheme).blocks.values())


@dataclass(frozen=True)
class Cut:
    """How a weight of `shape` is cut into shards."""

    kind: str
    """"rows", "columns" or "swiglu"."""
    edges: tuple[int, ...]
    """From 0 to the size of the axis; of a half, for SwiGLU."""
    even: bool = True

    @property
    def axis(self) -> int:
        """The axis that is cut."""
        return 1 if self.kind == "columns" else 0

    @property
    def parts(self) -> int:
        """Number of shards."""
        return len(self.edges) - 1

    def indices(self, shape: tuple[int, int], part: int) -> list[NDArray[np.int64]]:
        """Indices, per axis, of one shard."""
        out = [np.arange(s) for s in shape]
        own = np.arange(self.edges[part], self.edges[part + 1])
        out[self.axis] = np.concatenate([own, own + shape[0] // 2]) if self.kind == "swiglu" else own
        return out

    def entry(self, tensor: torch.Tensor, shape: tuple[int, int], part: int, stack: Stack, index: Stack) -> Any:
        """The entry that maps one shard of one weight of a stack."""
        offsets = tuple((a, i, n) for a, (i, n) in enumerate(zip(index, stack, strict=True)))
        if self.even:
            where = (*offsets, (len(offsets) + self.axis, part, self.parts))
            sharded = ShardedTensor.from_rank_offsets(KEY, tensor, *where, prepend_axis_num=len(offsets))
            return apply_swiglu_sharded_factory(sharded, offsets) if self.kind == "swiglu" else sharded
        first = [0, 0]
        first[self.axis] = self.edges[part]
        return ShardedTensor(
            KEY, tensor, tensor.dtype, tuple(tensor.shape), (*stack, *shape), (*index, *first), None, 0, len(stack)
        )


Stack = tuple[int, ...]
"""Number of layers, or layers and experts; or an index into them."""


def even(kind: str, size: int, parts: int) -> Cut:
    """Equal parts of an axis of `size` (of a half, for SwiGLU)."""
    return Cut(kind, tuple(range(0, size + 1, size // parts)))


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what every element of it is."""

    scheme: Scheme
    shape: tuple[int, int]
    stack: Stack
    whole: dict[Stack, Sides]
    backend: Recorder
    manifest: Any
    stored: list[str]


def one_rank() -> Rank:
    """A rank that holds nothing yet."""
    return Rank(next(Layout(1).places()))


def hold(rank: Rank, name: str, entry: Any, tensor: torch.Tensor) -> None:
    """Give a rank an entry."""
    rank.state_dict[name], rank.tensors[name] = entry, tensor


def saved(
    scheme: Scheme,
    shape: tuple[int, int],
    cut: Cut,
    *,
    stack: Stack = (1,),
    directions: Sequence[str] | None = None,
    choices: int = 8,
    amax: float | None = None,
    seed: int = 0,
) -> Saved:
    """Save a stack of weights, each shard of them quantized alone."""
    rng, stored = np.random.default_rng(seed), list(directions or elements.rule_of(scheme).blocks)
    ranks, whole = [one_rank() for _ in range(cut.parts)], dict[Stack, Sides]()
    for index in itertools.product(*map(range, stack)):
        for part, rank in enumerate(ranks):
            indices = cut.indices(shape, part)
            size = tuple(len(i) for i in indices)
            sides = random_sides(scheme, size, rng, stored, choices=choices, amax=amax)
            put(whole.setdefault(index, {}), shape, indices, sides)
            tensor = torch.nn.Parameter(tensor_of(sides, scheme))
            hold(rank, str(index), cut.entry(tensor, shape, part, stack, index), tensor)
    backend = Recorder()
    return Saved(scheme, shape, stack, whole, backend, save(ranks, backend, DIRECTORY), stored)


def empty(scheme: Scheme, size: tuple[int, ...], directions: Sequence[str] | None = None) -> torch.nn.Parameter:
    """A destination, with bytes that no test saves."""
    names = directions or elements.rule_of(scheme).blocks
    sides = random_sides(scheme, size, np.random.default_rng(99), names, choices=1)
    return torch.nn.Parameter(blank(tensor_of(sides, scheme)))


def destinations(source: Saved, cut: Cut, directions: Sequence[str] | None = None) -> list[Rank]:
    """The ranks of another cut, to be loaded."""
    ranks = [one_rank() for _ in range(cut.parts)]
    for (part, rank), index in itertools.product(enumerate(ranks), source.whole):
        tensor = empty(source.scheme, tuple(len(i) for i in cut.indices(source.shape, part)), directions)
        hold(rank, str(index), cut.entry(tensor, source.shape, part, source.stack, index), tensor)
    return ranks


def loaded(source: Saved, cut: Cut, directions: Sequence[str] | None = None, **options: Any) -> list[Rank]:
    """Load a checkpoint at another cut, and compare every destination with the model's answer."""
    ranks = destinations(source, cut, directions)
    load(ranks, source.backend, DIRECTORY, source.manifest, LoadOptions(**options))
    for (part, rank), index in itertools.product(enumerate(ranks), source.whole):
        region = pick(source.whole[index], cut.indices(source.shape, part))
        check(rank, str(index), region, source, list(directions or elements.rule_of(source.scheme).blocks))
    return ranks


def check(rank: Rank, name: str, region: Sides, source: Saved, wanted: list[str]) -> None:
    """One destination holds what the model says, byte for byte, and what was quantized again is inside the bound."""
    answer = conform(region, source.scheme, source.stored, wanted)
    found, outcome = sides_of(rank.tensors[name]), rank.outcomes[name]
    assert list(found) == wanted
    for direction, side in answer.sides.items():
        np.testing.assert_array_equal(found[direction].scale, side.scale, err_msg=direction)
        np.testing.assert_array_equal(found[direction].amax, side.amax, err_msg=direction)
        np.testing.assert_array_equal(found[direction].codes, side.codes, err_msg=direction)
        changed = answer.again[direction]
        assert elements.error_in_bound(answer.old[changed], found[direction][changed], elements.rule_of(source.scheme))
    assert (outcome.kind, outcome.requantized_blocks) == ("requantized" if answer.blocks else "exact", answer.blocks)
