"""Fake ranks of a cut that Megatron makes: filled, saved, loaded, and every parameter held against its elements.

Saves and loads are those of fakeranks.py. What a load must give is computed element by element, for every scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.sharding.manifest import Manifest
from tests import elements, formats, te_cpu
from tests.elements import Answer, Side, Sides, random_sides, rule_of
from tests.elementwise import elements_of, raw
from tests.fakemodel import Layout, pick, put
from tests.fakeranks import DIRECTORY, Rank, Recorder, blank, load, save
from tests.megatron_cuts import Cut, Part, WeightId

# Elements of any scheme; elements.py knows those with finite blocks


def rule(scheme: Scheme) -> formats.Rule:
    """The reference rule of a scheme."""
    if scheme.name != "per_tensor":
        return rule_of(scheme)
    element, limit = scheme.element, formats.FLOAT32_MAX
    scale = partial(formats.float32_scale, element=element, power_of_two=False, limit=limit)
    return formats.Rule(element, scale, {"rowwise": (1, 1)}, np.float32)


def draw(
    scheme: Scheme, shape: tuple[int, int], rng: np.random.Generator, choices: int = 8, amax: float | None = None
) -> Sides:
    """One whole quantized shard of random finite codes, in every direction.

    Args:
        scheme: how it is quantized.
        shape: its shape.
        rng: of the random values.
        choices: how many scales there are to choose from.
        amax: of NVFP4; by default random, and both directions of a shard have one, as Transformer Engine's do.
    """
    if scheme.name != "per_tensor":
        one = amax or (float(rng.choice([0.5, 0.75, 1.25])) if scheme.name in ("nvfp4", "nvfp4_2d") else None)
        return random_sides(scheme, shape, rng, rule(scheme).blocks, choices=choices, amax=one)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes = np.where(codes & 0x7F >= 0x7B, codes & 0x83, codes)
    scale = np.float32(rng.choice(np.linspace(0.5, 0.95, choices)))
    return {"rowwise": Side(codes, np.full(shape, scale), np.ones(shape, np.float32))}


def tensor_of(sides: Sides, scheme: Scheme) -> BlockScaledTensor:
    """The whole quantized shard with these elements."""
    if scheme.name != "per_tensor":
        return elements.tensor_of(sides, scheme)
    codes, scale = sides["rowwise"].codes.copy(), sides["rowwise"].scale[:1, :1].copy()
    components = {"rowwise_data": torch.from_numpy(codes), "rowwise_scale_inv": torch.from_numpy(scale)}
    return BlockScaledTensor.from_components(scheme, components)


def sides_of(tensor: torch.Tensor) -> Sides:
    """The elements of a whole quantized shard."""
    if not isinstance(tensor, BlockScaledTensor) or tensor.scheme.name != "per_tensor":
        return elements.sides_of(tensor)
    found = elements_of(tensor)
    return {"rowwise": Side(found.codes, found.scale.view(np.float32), np.ones(found.codes.shape, np.float32))}


def conform(source: Sides, scheme: Scheme) -> Answer:
    """What a destination of one shard holds after a load from `source`."""
    if scheme.name != "per_tensor":
        return elements.conform(source, scheme, list(source), list(source))
    side, how = source["rowwise"], rule(scheme)
    old = side.values(how)
    again = len(np.unique(side.scale.view(np.uint32))) > 1
    if again:
        scale, factor = how.scale(formats.amax_of(old), np.float32(1))
        side = Side(formats.encode(old * factor, how.element), np.full(old.shape, scale, np.float32), side.amax)
    return Answer({"rowwise": side}, {"rowwise": np.full(old.shape, again)}, int(again), old)


# Kinds of quantized parameters


@dataclass(frozen=True)
class Params:
    """A kind of quantized parameter."""

    make: Callable[[Sides, Scheme], torch.Tensor]
    """The parameter with these elements."""
    empty: Callable[[tuple[int, int], Scheme], torch.Tensor]
    """One whose bytes no test saves."""
    read: Callable[[torch.Tensor, Scheme], Sides]
    """Its elements."""
    directions: tuple[str, ...] = ("rowwise", "columnwise")
    """Those of a scheme's that it has."""


def _blank(shape: tuple[int, int], scheme: Scheme, directions: tuple[str, ...]) -> torch.Tensor:
    sides = draw(scheme, shape, np.random.default_rng(99), 1)
    return blank(tensor_of({d: side for d, side in sides.items() if d in directions}, scheme))


def _block_scaled(*directions: str) -> Params:
    return Params(tensor_of, partial(_blank, directions=directions), lambda tensor, _: sides_of(tensor), directions)


def _te_kind(scheme: Scheme) -> te_cpu.Kind:
    return te_cpu.Kind(scheme.name, scheme.element, bool(scheme.flag("power_of_two")))


def _te_empty(shape: tuple[int, int], scheme: Scheme) -> Any:
    if scheme.name == "per_tensor":
        return te_cpu.float8(torch.full(shape, 0x55, dtype=torch.uint8), 55.5, element=scheme.element)
    kind = _te_kind(scheme)
    return te_cpu.empty(kind, shape, columnwise=not kind.derived)


def _te_make(sides: Sides, scheme: Scheme) -> Any:
    if scheme.name == "per_tensor":
        side = sides["rowwise"]
        return te_cpu.float8(torch.from_numpy(side.codes.copy()), float(side.scale[0, 0]), element=scheme.element)
    codes = sides["rowwise"].codes
    tensor = _te_empty((codes.shape[0], codes.shape[1]), scheme)
    for direction, side in sides.items():
        te_cpu.Places(tensor, _te_kind(scheme), direction).write(side.codes, side.scale)
        if rule(scheme).amax:
            getattr(tensor, f"_amax_{direction}").fill_(float(side.amax[0, 0]))
    return tensor


def _te_read(tensor: Any, scheme: Scheme) -> Sides:
    ones = np.ones(tuple(tensor.shape), np.float32)
    if scheme.name == "per_tensor":
        return {"rowwise": Side(tensor._data.numpy(), ones * tensor._scale_inv.numpy(), ones)}
    out = {}
    for direction in rule(scheme).blocks:
        places = te_cpu.Places(tensor, _te_kind(scheme), direction)
        amax = ones * getattr(tensor, f"_amax_{direction}").numpy() if rule(scheme).amax else ones
        out[direction] = Side(places.codes(), places.scales(), amax)
    return out


BLOCK_SCALED = _block_scaled("rowwise", "columnwise")
ROWWISE = _block_scaled("rowwise")
TRANSFORMER_ENGINE = Params(_te_make, _te_empty, _te_read)


# Saves and loads

Schemes: TypeAlias = Callable[[Part], Scheme | None]
"""The scheme of a parameter; None: high precision."""


def by_layer(*schemes: Scheme | None) -> Schemes:
    """One scheme per layer; the last one for all that follow."""
    return lambda part: schemes[min(part.layer, len(schemes) - 1)]


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what every element of it is."""

    schemes: Schemes
    whole: dict[WeightId, Any]
    """Whole weight -> its elements; an array of float32 where it is in high precision."""
    backend: Recorder
    manifest: Manifest

    def sides(self, part: Part) -> Sides:
        """The elements of a quantized parameter."""
        return pick(self.whole[part.weight], part.indices)

    def values(self, part: Part) -> NDArray[np.float32]:
        """The values of a parameter in high precision."""
        found: NDArray[np.float32] = self.whole[part.weight][np.ix_(*part.indices)]
        return found


def _rank(cut: Cut, number: int, tensors: Mapping[str, torch.Tensor]) -> Rank:
    parameters: dict[str, torch.Tensor] = {name: torch.nn.Parameter(t) for name, t in tensors.items()}
    return Rank(next(Layout(1).places()), cut.entries(number, parameters), parameters)


def filled(
    cut: Cut,
    schemes: Schemes,
    params: Params = BLOCK_SCALED,
    *,
    choices: int = 8,
    amax: float | None = None,
    seed: int = 0,
) -> tuple[list[Rank], dict[WeightId, Any]]:
    """All ranks, each parameter quantized alone, and the whole weights; `choices` and `amax` as in `draw`."""
    rng, whole = np.random.default_rng(seed), dict[WeightId, Any]()
    ranks = []
    for number, parts in enumerate(cut.ranks()):
        tensors: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            scheme = schemes(part)
            if scheme is None:
                values = whole.setdefault(part.weight, np.zeros(part.shape, np.float32))
                values[np.ix_(*part.indices)] = rng.integers(-128, 128, part.size)
                tensors[name] = torch.from_numpy(values[np.ix_(*part.indices)]).to(torch.bfloat16)
                continue
            drawn = draw(scheme, part.size, rng, choices, amax)
            sides = {d: side for d, side in drawn.items() if d in params.directions}
            put(whole.setdefault(part.weight, {}), part.shape, part.indices, sides)
            tensors[name] = params.make(sides, scheme)
        ranks.append(_rank(cut, number, tensors))
    return ranks, whole


def _arrays(side: Side) -> tuple[NDArray[Any], ...]:
    return side.codes, side.scale, side.amax


def empty(cut: Cut, schemes: Schemes, params: Params = BLOCK_SCALED) -> list[Rank]:
    """All ranks, to be loaded."""
    ranks = []
    for number, parts in enumerate(cut.ranks()):
        tensors: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            scheme = schemes(part)
            high_precision = torch.full(part.size, -0.125, dtype=torch.bfloat16)
            tensors[name] = high_precision if scheme is None else params.empty(part.size, scheme)
        ranks.append(_rank(cut, number, tensors))
    return ranks


def save_cut(cut: Cut, schemes: Schemes, params: Params = BLOCK_SCALED, **how: Any) -> Saved:
    """Save a model with random bytes; `how` as in `filled`."""
    ranks, whole = filled(cut, schemes, params, **how)
    backend = Recorder()
    return Saved(schemes, whole, backend, save(ranks, backend, DIRECTORY))


def load_cut(
    saved: Saved, cut: Cut, schemes: Schemes | None = None, params: Params = BLOCK_SCALED, **options: Any
) -> list[Rank]:
    """Load at a cut, compare every parameter with what it must hold, and return the ranks."""
    wanted = schemes or saved.schemes
    ranks = empty(cut, wanted, params)
    load(ranks, saved.backend, DIRECTORY, saved.manifest, LoadOptions(**options))
    for number, name, part in held(cut):
        check(ranks[number], name, part, saved, wanted(part), params)
    return ranks


def held(cut: Cut) -> Iterator[tuple[int, str, Part]]:
    """All parameters of all ranks: rank, name and what it is."""
    for number, parts in enumerate(cut.ranks()):
        yield from ((number, name, part) for name, part in parts.items())


def check(rank: Rank, name: str, part: Part, saved: Saved, wanted: Scheme | None, params: Params) -> None:
    """Compare a parameter, or the value that was loaded for it, byte for byte with what the whole weight says."""
    source, outcome = saved.schemes(part), rank.outcomes.get(name)
    if source is None or wanted is None:
        values = saved.values(part) if source is None else saved.sides(part)["rowwise"].values(rule(source))
        expected = torch.from_numpy(values).to(torch.bfloat16)
        np.testing.assert_array_equal(raw(rank.loaded[name]), raw(expected), err_msg=name)
        kind = "quantized" if wanted is not None else "dequantized" if source is not None else ""
        assert kind == (outcome.kind if outcome else ""), name
        return
    answer, found = conform(saved.sides(part), wanted), params.read(rank.tensors[name], wanted)
    assert list(found) == list(answer.sides)
    for direction, side in answer.sides.items():
        for mine, its in zip(_arrays(found[direction]), _arrays(side), strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=f"{name} {direction}")
        again = answer.again[direction]
        assert elements.error_in_bound(answer.old[again], found[direction][again], rule(wanted))
    assert outcome is not None
    kind = "requantized" if answer.blocks else "exact"
    assert (outcome.kind, outcome.requantized_blocks) == (kind, answer.blocks), name
