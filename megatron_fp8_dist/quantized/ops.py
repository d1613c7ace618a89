"""What BlockScaledTensor makes of torch's operations: a table of exact ones; the others see dequantized values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from .tensor import BlockScaledTensor, join

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer of `BlockScaledTensor.__torch_dispatch__`."""
    if torch.is_inference_mode_enabled() and not any(t.is_inference() for t in _scaled((args, kwargs))):
        # A view of a tensor that was made outside of inference mode can only be made outside of it.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(func, args, kwargs)
    exact = _EXACT.get(func)
    if exact is not None:
        out = exact(*args, **kwargs)
        if out is not NotImplemented:
            return out
    if func._schema.is_mutable:
        return _in_place(func, args, kwargs)
    # In inference mode composite operations (narrow, chunk, to) come here whole; their parts may be in the table.
    out = func.decompose(*args, **kwargs) if isinstance(func, torch._ops.OpOverload) else NotImplemented
    if out is not NotImplemented:
        return out
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _scaled(values: Any) -> list[BlockScaledTensor]:
    return [t for t in tree_leaves(values) if isinstance(t, BlockScaledTensor)]


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, BlockScaledTensor) else value


def _axis(t: torch.Tensor, dim: int, extra: int = 0) -> int:
    """`dim` counted from the front; `extra` axes more than the tensor has are allowed."""
    axes = t.dim() + extra
    if not -axes <= dim < axes:
        raise IndexError(f"dimension {dim} of a tensor with {axes} axes")
    return dim + axes if dim < 0 else dim


def _slice(t: BlockScaledTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    axis = _axis(t, dim)
    low, high, _ = slice(start, end).indices(t.shape[axis])
    part = t._narrow(axis, low, max(0, high - low))
    return part if step == 1 else part._every(axis, step)


def _select(t: BlockScaledTensor, dim: int, index: int) -> Any:
    axis = _axis(t, dim)
    size = t.shape[axis]
    if not -size <= index < size:
        raise IndexError(f"index {index} of dimension {dim} with size {size}")
    row = t._narrow(axis, index % size, 1)
    return _view(row, [*t.shape[:axis], *t.shape[axis + 1 :]])


def _unbind(t: BlockScaledTensor, dim: int = 0) -> Any:
    rows = [_select(t, dim, i) for i in range(t.shape[dim])]
    return NotImplemented if any(row is NotImplemented for row in rows) else rows


def _split(t: BlockScaledTensor, size: int | Sequence[int], dim: int = 0) -> list[BlockScaledTensor]:
    axis = _axis(t, dim)
    total = t.shape[axis]
    sizes = [min(size, total - o) for o in range(0, total, size)] if isinstance(size, int) else list(size)
    if sum(sizes) != total:
        raise RuntimeError(f"split sizes {sizes} do not add up to {total}, the size of dimension {dim}")
    starts = np.cumsum([0, *sizes])
    return [t._narrow(axis, int(o), s) for o, s in zip(starts, sizes, strict=False)]


def _rejoined(tensors: Sequence[BlockScaledTensor], axis: int) -> torch.Tensor | None:
    """The parameter that `tensors` are all of, cut along `axis` and in order, or None."""
    whole = tensors[0].part_of
    if whole is None or any(t.part_of is not whole for t in tensors):
        return None
    starts = np.cumsum([0, *(t.shape[axis] for t in tensors)])
    in_place = all(
        t.origin == tuple(int(start) if a == axis else 0 for a in range(t.dim()))
        for t, start in zip(tensors, starts[:-1], strict=True)
    )
    joined = (*tensors[0].shape[:axis], int(starts[-1]), *tensors[0].shape[axis + 1 :])
    return whole if in_place and joined == tuple(whole.shape) else None


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    scaled = [t for t in tensors if isinstance(t, BlockScaledTensor)]
    if len(scaled) != len(tensors) or len({(t.scheme, *t.directions) for t in scaled}) != 1:
        return NotImplemented
    axis = _axis(scaled[0], dim)
    whole = _rejoined(scaled, axis)
    # The parameter under an alias, not a copy: Transformer Engine's tensors can be copied onto their like alone.
    return join(scaled, axis) if whole is None else whole.detach()


def _view(t: BlockScaledTensor, shape: Sequence[int]) -> Any:
    out = t._view(shape)
    return NotImplemented if out is None else out


def _unsqueeze(t: BlockScaledTensor, dim: int) -> Any:
    axis = _axis(t, dim, extra=1)
    return _view(t, [*t.shape[:axis], 1, *t.shape[axis:]])


def _squeeze(t: BlockScaledTensor, dim: int | Sequence[int] | None = None) -> Any:
    dims = range(t.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = {_axis(t, d) for d in dims}
    return _view(t, [s for a, s in enumerate(t.shape) if a not in axes or s != 1])


def _clone(t: BlockScaledTensor, *, memory_format: torch.memory_format | None = None) -> BlockScaledTensor:
    return t._copied(torch.clone if memory_format is None else lambda x: x.clone(memory_format=memory_format))


def _to_copy(t: BlockScaledTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype != t.dtype:
        return aten._to_copy.default(t.dequantize(dtype), **kwargs)
    target = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
    return t._copied(lambda x: aten._to_copy.default(x, **target))


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(destination, BlockScaledTensor):
        return destination.copy_(_plain(source), non_blocking=non_blocking)
    destination._refuse_cut()
    if destination.shape != source.shape:
        source = source.expand(destination.shape)
    if isinstance(source, BlockScaledTensor):
        destination.write_(source.conform(destination.scheme, list(destination.directions))[0])
    else:
        moved = source.detach().to(destination.device)
        destination.write_(BlockScaledTensor.quantize(moved, destination.scheme))
    return destination


_EXACT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: BlockScaledTensor._alias,
    aten.alias.default: BlockScaledTensor._alias,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a mutating operation on dequantized values and write the quantized tensors that it changed back."""
    plain: dict[int, torch.Tensor] = {}

    def substitute(value: Any) -> Any:
        if not isinstance(value, BlockScaledTensor):
            return value
        return plain.setdefault(id(value), value.dequantize())

    out = func(*tree_map(substitute, args), **tree_map(substitute, kwargs))
    written: list[BlockScaledTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += _scaled(value)
    for destination in written:
        _copy(destination, plain[id(destination)])
    by_plain = {id(plain[id(t)]): t for t in written}
    return tree_map(lambda t: by_plain.get(id(t), t), out)
