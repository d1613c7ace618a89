"""Quantized tensors of either kind, seen as BlockScaledTensors that share their buffers, and written in place.

A quantized tensor is a `BlockScaledTensor`, or an instance of one of Transformer Engine's classes. Theirs are told by
the module that defines them and by class name, so that nothing here needs the package: where it is not imported, none
of its tensors can exist. The attribute names are stable from TE 2.0 to 2.20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanningError, Problem
from ..quantized.scheme import Scheme
from ..quantized.tensor import BlockScaledTensor

_ELEMENT_NAMES = {"kFloat8E4M3": "E4M3", "kFloat8E5M2": "E5M2"}


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One Transformer Engine class."""

    refusal: Callable[[Any], str | None]
    """Why a tensor cannot be saved or restored exactly, or None."""
    scheme: Callable[[Any], Scheme]
    """Its scheme."""
    components: Callable[[Any], dict[str, torch.Tensor]]
    """Its components in logical orientation, as views of its buffers where the buffers are there."""
    write: Callable[[Any, dict[str, torch.Tensor]], None]
    """Put components into its buffers, in place, and leave the other direction restored or marked invalid."""


def _float8_refusal(tensor: Any) -> str | None:
    if tensor._data is None and (tensor._transpose is None or tensor._transpose_invalid):
        return "without valid codes: _data is None, and _transpose is None or marked invalid"
    return None


def _float8_scheme(tensor: Any) -> Scheme:
    return Scheme(name="per_tensor", element=_ELEMENT_NAMES[tensor._fp8_dtype.name])


def _rowwise_from_transpose(transpose: torch.Tensor) -> torch.Tensor:
    return transpose.permute(*range(1, transpose.dim()), 0)


def _float8_components(tensor: Any) -> dict[str, torch.Tensor]:
    codes = tensor._data
    if codes is None:
        codes = _rowwise_from_transpose(tensor._transpose)
    return {"rowwise_data": codes, "rowwise_scale_inv": tensor._scale_inv.reshape((1,) * tensor.dim())}


def _float8_write(tensor: Any, components: dict[str, torch.Tensor]) -> None:
    codes = components["rowwise_data"]
    tensor._scale_inv.copy_(components["rowwise_scale_inv"].reshape(tensor._scale_inv.shape))
    if tensor._data is None:
        # A tensor that keeps only its transpose has nothing to regenerate it from.
        _rowwise_from_transpose(tensor._transpose).copy_(codes)
        return
    tensor._data.copy_(codes)
    # A transpose that is allocated is stale now; TE makes it again from _data when it needs it.
    tensor._transpose_invalid = True


_ADAPTERS: dict[str, _Adapter] = {
    "Float8Tensor": _Adapter(_float8_refusal, _float8_scheme, _float8_components, _float8_write),
}


def _te_class(value: object) -> str | None:
    """Name of the Transformer Engine tensor class that `value` is an instance of, or None."""
    for cls in type(value).__mro__:
        if cls.__module__.startswith("transformer_engine.") and issubclass(cls, torch.Tensor):
            return cls.__name__
    return None


def is_quantized(value: object) -> bool:
    """Whether `value` is a quantized tensor of either kind, supported or not."""
    return isinstance(value, torch.Tensor) and (isinstance(value, BlockScaledTensor) or _te_class(value) is not None)


def unsupported(value: torch.Tensor, key: str) -> Problem | None:
    """Why the quantized tensor `value` cannot be saved or restored exactly, or None."""
    if isinstance(value, BlockScaledTensor):
        return None
    name = str(_te_class(value))
    adapter = _ADAPTERS.get(name)
    if adapter is not None:
        reason = adapter.refusal(value)
        return None if reason is None else Problem(key, f"a {name} {reason}", f"a {name} that holds its codes")
    return Problem(
        key=key,
        found=f"a quantized tensor of Transformer Engine class {name}",
        expected=f"one of {', '.join(sorted(_ADAPTERS))}",
        remedy="Dequantize it before saving, or keep it out of the checkpoint.",
    )


def unwritable(value: torch.Tensor, key: str) -> Problem | None:
    """Why the quantized tensor `value` cannot be restored in place, or None."""
    if not isinstance(value, BlockScaledTensor):
        return unsupported(value, key)
    if value.is_cut or not value.is_whole():
        found = "a part of another quantized tensor, or several joined"
        return Problem(key, found, "a parameter that is one whole quantized shard")
    return None


def _adapter(value: torch.Tensor) -> _Adapter:
    problem = unsupported(value, "(tensor)")
    if problem is not None:
        raise PlanningError("unsupported quantized tensor", [problem])
    return _ADAPTERS[str(_te_class(value))]


def scheme_of(value: torch.Tensor) -> Scheme:
    """The scheme of a quantized tensor."""
    return value.scheme if isinstance(value, BlockScaledTensor) else _adapter(value).scheme(value)


def wrap(value: torch.Tensor) -> BlockScaledTensor:
    """A BlockScaledTensor over the buffers of a quantized tensor of either kind; nothing is copied.

    Raises:
        PlanningError: a Transformer Engine class that is not supported.
    """
    if isinstance(value, BlockScaledTensor):
        return value.detach()  # type: ignore[return-value]
    adapter = _adapter(value)
    return BlockScaledTensor.from_components(adapter.scheme(value), adapter.components(value), dtype=value.dtype)


def restore(destination: torch.Tensor, source: BlockScaledTensor) -> None:
    """Write codes and scales of `source` into the buffers of `destination`, in place.

    Nothing is quantized or dequantized, no buffer is replaced, and a quantizer's amax and scale stay as they are.

    Args:
        destination: a quantized tensor of either kind.
        source: one whole quantized shard, of the scheme and shape of `destination`.

    Raises:
        ValueError: scheme or shape differ; nothing was written.
    """
    with torch.no_grad():
        if isinstance(destination, BlockScaledTensor):
            destination.write_(source)
            return
        adapter = _adapter(destination)
        scheme = adapter.scheme(destination)
        if source.scheme != scheme or source.shape != destination.shape:
            raise ValueError(
                f"cannot write {source!r} over {type(destination).__name__} of shape {tuple(destination.shape)} "
                f"and scheme {scheme.name}/{scheme.element}"
            )
        adapter.write(destination, source.components())
