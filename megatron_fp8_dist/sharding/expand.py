"""Entries of a sharded state dict that hold quantized parameters -> entries of plain components, and back.

Everything is decided here. Each such entry becomes a `QuantizedFactory`, whose `.data` is still the parameter, so that
optimizers find it by identity before and after; what it builds and merges is the task that was planned for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..compat.host import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from ..errors import Problem, StorageError
from ..te import tensors
from .cuts import check_cuts, find_cuts
from .layout import Box, layer_key, logical_key
from .pickling import pickled_parts
from .records import FragmentRecord

RESERVED = "megatron_fp8_dist"
"""The one key of the dict that a model entry builds; merging tells its own build by it."""


@dataclass(eq=False)
class ComponentShard(ShardedTensor):  # type: ignore[misc]  # Megatron has no types
    """A component on its way to or from storage: a plain tensor, and plain data that says what it is.

    Copies of it without tensor data are pickled to all ranks by Megatron, so it must never hold a parameter.
    """

    record: FragmentRecord | None = None
    """For the codes of a save: the fragment they are."""
    scale_format: str | None = None
    """For the scales of a save: their format."""
    planned_for: str | None = None
    """For a load: the directory whose manifest was read."""


class Task(Protocol):
    """What is to be done for one parameter."""

    def build(self, key: str, replica_id: Any) -> Any:
        """The leaves that stand for the parameter in the checkpoint."""

    def merge(self, loaded: Any) -> Any:
        """The value that goes back into the state dict, from the leaves' loaded data."""


@dataclass(eq=False)
class QuantizedFactory(ShardedTensorFactory):  # type: ignore[misc]  # Megatron has no types
    """Stands for an entry of a quantized parameter, and for what optimizers make of it.

    An optimizer re-uses a model entry through `dataclasses.replace(entry, key=..., data=state)`. That runs
    `__post_init__` again, which sees that `data` is no longer the parameter; such an entry builds and merges what the
    original entry would have. Keys are not looked at: a chained optimizer's begin with neither "optimizer" nor K.
    `param` is kept apart from `data` because Megatron's `load` replaces `.data` by a BF16 copy on most versions.
    """

    original: Any = None
    """The entry that this one stands for."""
    param: Any = field(default=None, repr=False)
    """The parameter."""
    work: Any = field(default=None, repr=False)
    """The `Task` for the parameter."""
    is_param: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Tell a model entry from an optimizer entry, by identity."""
        self.is_param = self.param is not None and self.data is self.param

    def build(self) -> Any:
        """Components for the model's entry; for an optimizer's, what the original entry gives."""
        if self.is_param:
            return {RESERVED: outside_autograd(self.work.build, self.key, self.replica_id)}
        return rebuild(self.original, self.key, self.data, self.replica_id, self.flattened_range)


def outside_autograd(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` without gradients, and out of inference mode, whose tensors cannot be used elsewhere."""
    with torch.inference_mode(False), torch.no_grad():
        return fn(*args)


def make_factory(original: Any, work: Task) -> QuantizedFactory:
    """A factory that stands for `original` and does `work` for its parameter."""
    param = original.data

    def build_fn(key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        if t is param:
            return {RESERVED: outside_autograd(work.build, key, replica_id)}
        return rebuild(original, key, t, replica_id, flattened_range)

    def merge_fn(loaded: Any) -> Any:
        if isinstance(loaded, dict) and RESERVED in loaded:
            if len(loaded) > 1:
                others = ", ".join(str(k) for k in loaded if k != RESERVED)
                problem = Problem(original.key, f"its components merged with {others}", "its components alone")
                raise StorageError("Megatron merged other values into a parameter's components", [problem])
            return outside_autograd(work.merge, loaded[RESERVED])
        return original.merge_fn(loaded) if isinstance(original, ShardedTensorFactory) else loaded

    return QuantizedFactory(
        original.key, param, build_fn, merge_fn, original.replica_id, None, original=original, param=param, work=work
    )


def rebuild(original: Any, key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
    """What the original entry gives for tensor `t` under `key`."""
    if isinstance(original, ShardedTensorFactory):
        return original.build_fn(key, t, replica_id, flattened_range)
    return replace(original, key=key, data=t, dtype=t.dtype, replica_id=replica_id)


def leaves(structure: Any) -> Iterator[Any]:
    """The ShardedTensors of what a build function returned, in a fixed order."""
    if isinstance(structure, dict):
        for value in structure.values():
            yield from leaves(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from leaves(value)
    else:
        yield structure


def refill(structure: Any, values: Iterator[Any]) -> Any:
    """The same structure with its leaves replaced, in the order of `leaves`."""
    if isinstance(structure, dict):
        return {k: refill(v, values) for k, v in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [refill(v, values) for v in structure]
    return next(values)


def skeleton(entry: Any) -> Any:
    """What `entry` builds, on the meta device: keys, shapes and offsets without data."""
    return rebuild(
        entry, entry.key, torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta"), entry.replica_id
    )


def global_box(leaf: Any) -> Box:
    """The region of the global tensor that a ShardedTensor is, prepended axes included."""
    return Box(tuple(leaf.global_offset), (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape))


def drop_layer_axis(leaf: Any) -> Any:
    """A ShardedTensor of a stack as one of its layer: under the layer's key, without the first prepended axis."""
    fragmentations = leaf.axis_fragmentations
    return replace(
        leaf,
        key=layer_key(leaf.key, leaf.global_offset[0]),
        global_shape=tuple(leaf.global_shape[1:]),
        global_offset=tuple(leaf.global_offset[1:]),
        axis_fragmentations=None if fragmentations is None else tuple(fragmentations[1:]),
        prepend_axis_num=leaf.prepend_axis_num - 1,
    )


def walk(state_dict: Any, fn: Callable[[Any], Any]) -> Any:
    """A state dict in new containers, with `fn` applied to every value that is no container."""
    if isinstance(state_dict, dict):
        return {k: walk(v, fn) for k, v in state_dict.items()}
    if isinstance(state_dict, list):
        return [walk(v, fn) for v in state_dict]
    return fn(state_dict)


def own(value: Any) -> Any:
    """A sharded value as an object of our own, with the same data: Megatron writes into the ones that it is given."""
    return replace(value) if isinstance(value, ShardedBase) else value


def build_factories(state_dict: Any) -> Any:
    """The state dict with what its factories build in their place, for a save: one that fails does so here."""
    return walk(state_dict, lambda v: v.build() if isinstance(v, ShardedTensorFactory) else v)


def values_of(state_dict: Any) -> Iterator[Any]:
    """All values of a state dict that are no containers, as Megatron sees it: containers are dicts and lists."""
    if isinstance(state_dict, dict):
        for value in state_dict.values():
            yield from values_of(value)
    elif isinstance(state_dict, list):
        for value in state_dict:
            yield from values_of(value)
    else:
        yield state_dict


def is_entry(value: Any) -> bool:
    """Whether a value maps a tensor: a ShardedTensor or a factory, with data, that is not ours already."""
    mapped = isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None
    return mapped and not isinstance(value, (QuantizedFactory, ComponentShard))


def unexpanded(state_dict: Any) -> Any:
    """The state dict with the model's entries as they were before an earlier expansion."""

    def original(value: Any) -> Any:
        if isinstance(value, QuantizedFactory) and value.is_param:
            return replace(value.original, key=value.key, replica_id=value.replica_id)
        return value

    return walk(state_dict, original)


def quantized_entries(state_dict: Any) -> Iterator[Any]:
    """The entries that hold a quantized parameter and are not expanded."""
    return (v for v in values_of(state_dict) if is_entry(v) and tensors.is_quantized(v.data))


def check_entries(state_dict: Any) -> list[Problem]:
    """Everything that keeps a state dict from being expanded: unsupported classes, reserved keys, loose tensors."""
    problems = check_cuts(v for v in values_of(state_dict) if is_entry(v))
    for value in values_of(state_dict):
        cut = tensors.bad_cut(value.data, value.key) if is_entry(value) else None
        if cut is not None:
            problems.append(cut)
        elif is_entry(value) and tensors.is_quantized(value.data):
            problem = tensors.unsupported(value.data, value.key)
            problems += [problem] if problem else []
            if value.data.dim() == 0:
                problems.append(Problem(value.key, "a quantized tensor without axes", "one axis or more"))
            if logical_key(value.key) is not None:
                suffix = logical_key(value.key)[1]  # type: ignore[index]
                problems.append(Problem(value.key, f"a key that ends in .{suffix}", "a key without component suffix"))
        elif isinstance(value, ShardedTensor) and not isinstance(value, ComponentShard) and logical_key(value.key):
            problems.append(Problem(value.key, "a tensor under a component's key", "a key without component suffix"))
        problems += _loose(value)
    return problems


def _loose(value: Any) -> list[Problem]:
    """Quantized tensors and entries where Megatron does not look: they would be pickled with the common state."""
    if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        return []
    if isinstance(value, ShardedObject):
        key, inside = value.key, pickled_parts(value.data)
    else:
        key, inside = "(state dict)", pickled_parts(value)
    remedy = "Map it with a ShardedTensor, in dicts and lists alone, or dequantize it."
    problems = []
    for item in inside:
        if tensors.is_quantized(item):
            found = f"a quantized {type(item).__name__} of shape {tuple(item.shape)} outside of any sharded entry"
            problems.append(Problem(key, found, "a ShardedTensor that maps it", remedy))
        elif isinstance(item, ShardedBase) and item is not value:
            found = f"an entry inside a {type(value).__name__}"
            problems.append(Problem(item.key, found, "entries in dicts and lists alone", remedy))
    return problems


def check_model(state_dict: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> list[Problem]:
    """The quantized parameters of a model that no entry of its state dict carries, by identity."""
    mapped = [v for v in values_of(state_dict) if isinstance(v, (ShardedTensor, ShardedTensorFactory))]
    carried = {id(v.data) for v in mapped} | {id(cut.param) for cut in find_cuts(mapped)}
    return [
        Problem(
            name,
            "a quantized parameter that no entry of the state dict carries",
            "an entry whose .data is the parameter itself, or exact parts of it",
            f"Pass keep_vars=True. {tensors.CUT_REMEDY}",
        )
        for name, parameter in parameters
        if tensors.is_quantized(parameter) and id(parameter) not in carried
    ]


def may_match(entry: Any, keys: Collection[str]) -> bool:
    """Whether a key of `keys` can be one that `entry` builds; a factory's keys begin with its own."""
    if isinstance(entry, ShardedTensor) or entry.key in keys:
        return entry.key in keys
    return any(key.startswith(entry.key) for key in keys)
