"""What a save does with each quantized parameter: which stacks are mixed, and the component leaves of an entry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from ..compat.host import ShardedTensorFactory, is_main_replica
from ..errors import PlanningError, Problem
from ..quantized.grid import Grid
from ..quantized.scales import invalid_scales
from ..quantized.scheme import DirectionSpec, GridSpec, Scheme
from ..quantized.tensor import BlockScaledTensor
from ..te import tensors
from .expand import (
    ComponentShard,
    QuantizedFactory,
    drop_layer_axis,
    global_box,
    is_entry,
    leaves,
    make_factory,
    may_match,
    own,
    quantized_entries,
    rebuild,
    skeleton,
    values_of,
    walk,
)
from .layout import Fragment, component_key, grid_shape, layer_key, phases, slot_count, uneven_key
from .manifest import Manifest
from .records import FragmentRecord, StackRef

Stored = tuple[Scheme, tuple[str, ...]]
"""Scheme and directions: what all fragments of one key have in common."""

StackInfo = dict[str, dict[int, tuple[Stored, int]]]
"""Key -> layer (index on the first prepended axis; -1 without one) -> (how it is stored, number of layers)."""

UNSTACKED = -1


def _layer(leaf: Any) -> int:
    return int(leaf.global_offset[0]) if leaf.prepend_axis_num else UNSTACKED


def _stored(param: Any, directions: str) -> Stored:
    """How a quantized parameter is stored under `SaveOptions.directions`."""
    names = tuple(tensors.directions_of(param))
    # A tensor that has one direction alone is stored in that one, whatever was asked for.
    return tensors.scheme_of(param), ("rowwise",) if directions == "rowwise" and "rowwise" in names else names


def describe(state_dict: Any, directions: str = "both") -> tuple[StackInfo, list[Problem]]:
    """Which layers of which keys are quantized on this rank, and how; what ranks tell each other before a save."""
    info: StackInfo = {}
    problems: list[Problem] = []
    for entry in quantized_entries(state_dict):
        stored = _stored(entry.data, directions)
        for leaf in leaves(skeleton(entry)):
            layers = info.setdefault(leaf.key, {})
            seen = layers.setdefault(_layer(leaf), (stored, int(leaf.global_shape[0])))
            if seen[0] != stored:
                problems.append(_differing(leaf.key, seen[0], stored))
    return info, problems


def _differing(key: str, a: Stored, b: Stored) -> Problem:
    if a[0] == b[0]:
        found = f"directions {'+'.join(a[1])} and {'+'.join(b[1])}"
        remedy = 'Give the parameters one usage, or save with SaveOptions(directions="rowwise").'
        return Problem(key, found, "the same directions for all fragments", remedy)
    names = " and ".join(f"{scheme.name}/{scheme.element}" for scheme, _ in (a, b))
    return Problem(key, f"schemes {names}", "one scheme for all fragments")


def mixed_stacks(infos: Sequence[StackInfo]) -> tuple[frozenset[str], list[Problem]]:
    """The stacked keys whose layers are not all stored alike, from what all ranks told.

    Returns:
        (keys, problems): problems name the ranks where fragments or replicas of one layer differ.
    """
    merged: dict[str, dict[int, tuple[Stored, int, int]]] = {}
    problems: list[Problem] = []
    for rank, info in enumerate(infos):
        for key, layers in info.items():
            for layer, (stored, count) in layers.items():
                first = merged.setdefault(key, {}).setdefault(layer, (stored, count, rank))
                if first[0] != stored:
                    problems.append(_differing(key, first[0], stored).at((first[2], rank)))
    mixed = {
        key
        for key, layers in merged.items()
        if UNSTACKED not in layers
        and (len({s for s, _, _ in layers.values()}) > 1 or len(layers) < next(iter(layers.values()))[1])
    }
    return frozenset(mixed), problems


def check_replicas(state_dict: Any, infos: Sequence[StackInfo], rank: int) -> list[Problem]:
    """High-precision entries of this rank for what another rank holds quantized (tied embeddings, say)."""
    quantized = {(k, layer): r for r, info in enumerate(infos) for k, layers in info.items() for layer in layers}
    keys = {key for key, _ in quantized}
    problems: list[Problem] = []
    for entry in values_of(state_dict) if keys else ():
        if not is_entry(entry) or tensors.is_quantized(entry.data) or not may_match(entry, keys):
            continue
        for leaf in leaves(skeleton(entry)):
            other = quantized.get((leaf.key, _layer(leaf)))
            if other is not None:
                found = f"high precision on rank {rank}, quantized on rank {other}"
                problems.append(Problem(leaf.key, found, "one scheme for all replicas and fragments"))
    return problems


@dataclass(frozen=True, slots=True)
class SaveTask:
    """Saving one parameter, quantized or a high-precision layer of a mixed stack."""

    original: Any
    mixed: frozenset[str]
    directions: str = "both"
    """`SaveOptions.directions`."""

    def build(self, key: str, replica_id: Any) -> Any:
        """Component leaves per ShardedTensor of the original entry."""
        param = self.original.data
        quantized = tensors.is_quantized(param)
        # The original key decides what is mixed: re-keying after expansion renames a stack, it does not change it.
        stacked = [leaf.key in self.mixed for leaf in leaves(skeleton(self.original))]
        built = rebuild(self.original, key, self._wrapped() if quantized else param, replica_id)
        out, cut = {}, self._cut
        for i, (leaf, layered) in enumerate(zip(leaves(built), stacked, strict=True)):
            stack = StackRef(leaf.key, _layer(leaf), int(leaf.global_shape[0])) if layered else None
            single = drop_layer_axis(leaf) if layered else leaf
            out[str(i)] = component_leaves(single, stack, cut) if quantized else single
        return out

    def _wrapped(self) -> BlockScaledTensor:
        """The parameter in the directions that are stored, so that what is left out need not be cut."""
        param = self.original.data
        return tensors.wrap(param).only(_stored(param, self.directions)[1])

    @property
    def _cut(self) -> bool:
        """Whether fragments can start inside a block of their quantized shard; the same on all ranks."""
        param = self.original.data
        part = isinstance(param, BlockScaledTensor) and (param.is_cut or not param.is_whole())
        return part or isinstance(self.original, ShardedTensorFactory)

    def merge(self, loaded: Any) -> Any:
        """A state dict expanded for a save cannot be loaded.

        Raises:
            PlanningError: always.
        """
        raise PlanningError(
            "a state dict that was expanded for a save was given to a load",
            [
                Problem(
                    self.original.key,
                    "an expansion for a save",
                    "one for a load",
                    "Pass checkpoint_dir= to expand_quantized.",
                )
            ],
        )


def component_leaves(leaf: Any, stack: StackRef | None, cut: bool) -> dict[str, ComponentShard]:
    """The components of one ShardedTensor whose data is a BlockScaledTensor.

    Raises:
        PlanningError: the factory that made it has dequantized the parameter.
    """
    data = leaf.data
    if not isinstance(data, BlockScaledTensor):
        found = f"{type(data).__name__} {data.dtype} from the entry's factory"
        raise PlanningError(
            "a factory dequantized a quantized parameter",
            [Problem(leaf.key, found, "exact pieces (narrow, chunk, split, slice, view, cat)")],
        )
    even = leaf.axis_fragmentations is not None
    fragment = Fragment(global_box(leaf), (0,) * leaf.prepend_axis_num + phases(data.scheme, data.origin))
    specs = [spec for spec, _ in data.specs()]
    grids = [grid for spec in specs for grid in spec.grids]
    slots = {g.component: _slots(leaf, g, fragment, cut and even, even) for g in grids}
    record = FragmentRecord(
        key=leaf.key,
        scheme=data.scheme,
        nominal_dtype=str(data.dtype).removeprefix("torch."),
        global_shape=tuple(leaf.global_shape),
        prepended_axes=leaf.prepend_axis_num,
        directions=tuple(spec.name for spec in specs),
        fragment=fragment,
        slots=tuple(sorted(slots.items())) if even else (),
        even=even,
        stack=stack,
    )
    if not even and fragment.box.size == 0 and math.prod(leaf.global_shape):
        # Others fill the tensor. What has no elements stores nothing: it begins where another fragment begins.
        nothing = _codes_leaf(leaf, specs[0], data.directions[specs[0].name].codes, fragment)
        nothing.replica_id = 1
        return {specs[0].data: nothing}
    out = {}
    for spec in specs:
        direction = data.directions[spec.name]
        out[spec.data] = _codes_leaf(leaf, spec, direction.codes, fragment)
        for grid, values in zip(spec.grids, direction.grids, strict=True):
            out[grid.component] = _scale_leaf(leaf, grid, values, fragment, slots[grid.component])
    out[specs[0].data].record = record
    return out


def _slots(leaf: Any, spec: GridSpec, fragment: Fragment, cut: bool, even: bool) -> tuple[int, ...]:
    scheme = leaf.data.scheme
    if not even:
        return grid_shape(scheme, spec, fragment, leaf.prepend_axis_num)
    blocks = scheme.block(spec, len(leaf.local_shape))
    phase = fragment.phase[leaf.prepend_axis_num :]
    counts = tuple(slot_count(s, b, cut, p) for s, b, p in zip(leaf.local_shape, blocks, phase, strict=True))
    return (1,) * int(leaf.prepend_axis_num) + counts


def _codes_leaf(leaf: Any, spec: DirectionSpec, codes: torch.Tensor, fragment: Fragment) -> ComponentShard:
    shape = spec.code_shape(fragment.box.shape)
    return ComponentShard(
        key=component_key(leaf.key, spec.data),
        # Prepended axes as real axes of size 1: irregular reads with prepend_axis_num fail in DCP, and Megatron loops
        # in Python over every shard of a key that has it.
        data=codes[(None,) * leaf.prepend_axis_num],
        dtype=torch.uint8,
        local_shape=shape,
        global_shape=spec.code_shape(tuple(leaf.global_shape)),
        global_offset=spec.code_shape(fragment.box.offset),
        axis_fragmentations=leaf.axis_fragmentations,
        replica_id=leaf.replica_id,
    )


def _scale_leaf(leaf: Any, spec: GridSpec, grid: Grid, fragment: Fragment, slots: tuple[int, ...]) -> ComponentShard:
    expected = grid_shape(leaf.data.scheme, spec, fragment, leaf.prepend_axis_num)[leaf.prepend_axis_num :]
    if tuple(grid.values.shape) != expected:
        found = f"{list(grid.values.shape)} blocks"
        problem = Problem(leaf.key, found, f"{list(expected)}, those of one quantized shard", "Requantize it first.")
        raise PlanningError("a tensor has other blocks than its scheme", [problem])
    data = grid.values.new_zeros(slots)
    filled = grid.values.reshape((1,) * leaf.prepend_axis_num + tuple(grid.values.shape))
    data[tuple(slice(0, n) for n in filled.shape)] = filled
    if leaf.axis_fragmentations is None:
        key = uneven_key(leaf.key, spec.component, fragment.box.offset)
        offset, global_shape, fragmentations = (0,) * len(slots), slots, None
    else:
        key = component_key(leaf.key, spec.component)
        index = [o // s if s else 0 for o, s in zip(fragment.box.offset, fragment.box.shape, strict=True)]
        offset = tuple(i * n for i, n in zip(index, slots, strict=True))
        fragmentations = tuple(leaf.axis_fragmentations)
        global_shape = tuple(f * n for f, n in zip(fragmentations, slots, strict=True))
    return ComponentShard(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=slots,
        global_shape=global_shape,
        global_offset=offset,
        axis_fragmentations=fragmentations,
        replica_id=leaf.replica_id,
        scale_format=spec.scale_format,
    )


def rehearse(expanded: Any) -> tuple[list[FragmentRecord], list[Problem]]:
    """Build every factory of a state dict once.

    Returns:
        (what this rank will save, what keeps it from being saved): problems are cuts that cannot be exact, and scales
        that no load would take.
    """
    built: list[ComponentShard] = []
    problems: list[Problem] = []
    for value in values_of(expanded):
        if not isinstance(value, QuantizedFactory) or not value.is_param:
            continue
        try:
            built += [leaf for leaf in leaves(value.build()) if isinstance(leaf, ComponentShard)]
        except PlanningError as e:
            problems += e.problems
        except ValueError as e:
            problems.append(Problem(value.key, str(e), "a parameter whose fragments can be cut exactly"))
    problems += [p for leaf in built for p in _bad_scales(leaf)]
    return fragment_records(main_components(built)), problems


def plain_layers(expanded: Any) -> set[tuple[str, int]]:
    """The high-precision layers of mixed stacks that this rank saves: (stacked key, layer)."""
    return {
        (leaf.key, _layer(leaf))
        for value in values_of(expanded)
        if isinstance(value, QuantizedFactory) and value.is_param and not tensors.is_quantized(value.param)
        for leaf in leaves(skeleton(value.original))
        if leaf.key in value.work.mixed and is_main_replica(leaf.replica_id)
    }


def missing_layers(manifest: Manifest, plain: AbstractSet[tuple[str, int]]) -> list[Problem]:
    """The layers of mixed stacks that no rank saves."""
    return [
        Problem(layer_key(key, layer), "nothing on any rank", f"one of {stack.num_layers} layers")
        for key, stack in manifest.mixed.items()
        for layer in range(stack.num_layers)
        if layer not in stack.quantized and (key, layer) not in plain
    ]


def main_components(found: Iterable[Any]) -> list[ComponentShard]:
    """The components among `found` that are main replicas."""
    return [leaf for leaf in found if isinstance(leaf, ComponentShard) and is_main_replica(leaf.replica_id)]


def fragment_records(components: Iterable[ComponentShard]) -> list[FragmentRecord]:
    """The records that travel with components."""
    return [leaf.record for leaf in components if leaf.record is not None]


def _bad_scales(leaf: ComponentShard) -> list[Problem]:
    if leaf.scale_format is None or not bool(invalid_scales(leaf.data, leaf.scale_format).any()):
        return []
    found = leaf.data[invalid_scales(leaf.data, leaf.scale_format)][0].item()
    return [Problem(leaf.key, f"scale {found}", "a finite scale that is not negative", "The weight has diverged.")]


def expand_for_save(state_dict: Any, mixed: frozenset[str], directions: str = "both") -> Any:
    """The state dict with every entry that needs it replaced by a factory of components, in new containers."""

    def expand(value: Any) -> Any:
        if not is_entry(value):
            return own(value)
        if tensors.is_quantized(value.data):
            return make_factory(value, SaveTask(value, mixed, directions))
        in_stack = mixed and may_match(value, mixed) and any(leaf.key in mixed for leaf in leaves(skeleton(value)))
        return make_factory(value, SaveTask(value, mixed, directions)) if in_stack else own(value)

    return walk(state_dict, expand)
