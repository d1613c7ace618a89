"""Quantized tensors of either kind, seen as BlockScaledTensors that share their buffers, and written in place.

A quantized tensor is a `BlockScaledTensor`, or an instance of one of Transformer Engine's classes. Theirs are told by
the module that defines them and by class name, so that nothing here needs the package: where it is not imported, none
of its tensors can exist. The attribute names are stable from TE 2.0 (blockwise 2.3, NVFP4 2.8) to 2.20.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..errors import PlanningError, Problem
from ..quantized.scheme import Scheme
from ..quantized.tensor import BlockScaledTensor
from .blocks import MXFP8, NVFP4, Blockwise, Components, element_of, present


class _Adapter(Protocol):
    """One Transformer Engine class."""

    def refusal(self, tensor: Any) -> str | None:
        """Why a tensor cannot be saved or restored exactly, or None."""

    def scheme(self, tensor: Any) -> Scheme:
        """The scheme of a tensor."""

    def directions(self, tensor: Any) -> list[str]:
        """Names of the scheme's directions that the tensor has, or that follow exactly from what it has."""

    def components(self, tensor: Any) -> Components:
        """Components in logical orientation."""

    def buffers(self, tensor: Any) -> Components:
        """Attribute -> buffer, of those that are there."""

    def write(self, tensor: Any, components: Components) -> None:
        """Put components into the buffers, in place; every direction is restored, derived or marked invalid."""


class _Float8:
    """Float8Tensor: per-tensor scaling, delayed or current."""

    def refusal(self, tensor: Any) -> str | None:
        if tensor._data is None and (tensor._transpose is None or tensor._transpose_invalid):
            return "without valid codes: _data is None, and _transpose is None or marked invalid"
        codes = tensor._data if tensor._data is not None else tensor._transpose
        if codes.dtype != torch.uint8 or codes.numel() != tensor.numel():
            return f"with codes of {codes.dtype} {tuple(codes.shape)}"
        scale = tensor._scale_inv
        if scale is None or scale.dtype != torch.float32 or scale.numel() != 1:
            return f"with scale_inv {scale!r}"
        return None

    def scheme(self, tensor: Any) -> Scheme:
        return Scheme("per_tensor", element_of(tensor._fp8_dtype))

    def directions(self, tensor: Any) -> list[str]:
        return ["rowwise"]

    def components(self, tensor: Any) -> Components:
        codes = tensor._data if tensor._data is not None else _untranspose(tensor._transpose)
        return {
            "rowwise_data": codes,
            "rowwise_scale_inv": tensor._scale_inv.reshape((1,) * tensor.dim()),
        }

    def buffers(self, tensor: Any) -> Components:
        return present(tensor, ["_data", "_transpose", "_scale_inv"])

    def write(self, tensor: Any, components: Components) -> None:
        codes = components["rowwise_data"]
        tensor._scale_inv.copy_(components["rowwise_scale_inv"].reshape(tensor._scale_inv.shape))
        if tensor._data is None:
            # A tensor that keeps only its transpose has nothing to regenerate it from.
            _untranspose(tensor._transpose).copy_(codes)
            return
        tensor._data.copy_(codes)
        if tensor._transpose is not None:
            # Aliases have validity flags of their own, over the same memory.
            _untranspose(tensor._transpose).copy_(codes)
        # TE makes it again from _data when it needs it.
        tensor._transpose_invalid = True


def _untranspose(transpose: torch.Tensor) -> torch.Tensor:
    return transpose.permute(*range(1, transpose.dim()), 0)


_ADAPTERS: dict[str, _Adapter] = {
    "Float8Tensor": _Float8(),
    "Float8BlockwiseQTensor": Blockwise(),
    "MXFP8Tensor": MXFP8(),
    "NVFP4Tensor": NVFP4(),
}

CUT_REMEDY = "Take the state dict inside of megatron_fp8_dist.exact_ops(): cuts are exact there."

_REMEDIES = {
    "GroupedTensor": "Map its members, from split_into_quantized_tensors(), one entry each.",
    "HybridQuantizedTensor": "Build the module with one recipe for both directions, or dequantize it before saving.",
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
    if adapter is None:
        expected = f"one of {', '.join(sorted(_ADAPTERS))}"
        remedy = _REMEDIES.get(name, "Dequantize it before saving, or keep it out of the checkpoint.")
        return Problem(
            key,
            f"a quantized tensor of Transformer Engine class {name}",
            expected,
            remedy,
        )
    reason = adapter.refusal(value)
    if reason is None:
        return None
    return Problem(key, f"a {name} {reason}", f"a {name} that holds its codes, 2-D with compact scales if in blocks")


def unwritable(value: torch.Tensor, key: str) -> Problem | None:
    """Why the quantized tensor `value` cannot be restored in place, or None."""
    if not isinstance(value, BlockScaledTensor):
        return unsupported(value, key)
    if value.is_cut or not value.is_whole():
        found = "a part of another quantized tensor, or several joined"
        return Problem(key, found, "a parameter that is one whole quantized shard", CUT_REMEDY)
    return None


def bad_cut(value: torch.Tensor, key: str) -> Problem | None:
    """Why `value` cannot stand for a part of a quantized parameter that it was cut from, or None.

    Transformer Engine's classes dequantize in most operations, and in the others share scales with the whole. A view
    remembers in `_base` what it is a view of, whatever its class.
    """
    whole = value._base
    if whole is None or not is_quantized(whole) or isinstance(value, BlockScaledTensor):
        return None
    if is_quantized(value) and value.numel() == whole.numel():
        return None
    kind = f"{type(value).__name__} {tuple(value.shape)}"
    found = f"a {kind} that was cut from a quantized {type(whole).__name__} of shape {tuple(whole.shape)}"
    return Problem(key, found, "the parameter itself, or an exact part of it", CUT_REMEDY)


def _adapter(value: torch.Tensor) -> _Adapter:
    problem = unsupported(value, "(tensor)")
    if problem is not None:
        raise PlanningError("unsupported quantized tensor", [problem])
    return _ADAPTERS[str(_te_class(value))]


def scheme_of(value: torch.Tensor) -> Scheme:
    """The scheme of a quantized tensor."""
    return value.scheme if isinstance(value, BlockScaledTensor) else _adapter(value).scheme(value)


def directions_of(value: torch.Tensor) -> list[str]:
    """Names of the scheme's directions that a quantized tensor has, or that follow exactly from what it has."""
    return list(value.directions) if isinstance(value, BlockScaledTensor) else _adapter(value).directions(value)


def buffers(value: torch.Tensor) -> Components:
    """Name -> memory of a quantized tensor of either kind, as it lies: all that a restore writes."""
    return value.components() if isinstance(value, BlockScaledTensor) else _adapter(value).buffers(value)


def exact_part(value: torch.Tensor) -> BlockScaledTensor:
    """All of a quantized parameter as a BlockScaledTensor whose parts remember it. Writes go through the parameter.

    Raises:
        PlanningError: a Transformer Engine class that is not supported.
    """
    whole = wrap(value)
    if isinstance(value, BlockScaledTensor) and value.is_whole():
        whole.origin = (0,) * value.dim()  # a clone of a part remembers where that part began
    whole.is_cut, whole.part_of = True, value
    return whole


def wrap(value: torch.Tensor) -> BlockScaledTensor:
    """A BlockScaledTensor over the buffers of a quantized tensor of either kind; codes are not copied.

    Raises:
        PlanningError: a Transformer Engine class that is not supported.
    """
    if isinstance(value, BlockScaledTensor):
        return value.detach()  # type: ignore[return-value]
    adapter = _adapter(value)
    return BlockScaledTensor.from_components(adapter.scheme(value), adapter.components(value), dtype=value.dtype)


def alias(value: torch.Tensor) -> torch.Tensor:
    """A quantized tensor of the same class over the same buffers, without autograd history.

    On a CPU not by detach(): Transformer Engine copies the quantizer then, and NVFP4's asks CUDA for its device.
    """
    if isinstance(value, BlockScaledTensor) or value.device.type != "cpu":
        return value.detach()
    tensor: Any = value
    out = type(tensor)(
        shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **(tensor.get_metadata() | {"quantizer": None})
    )
    out._quantizer = tensor._quantizer
    return out  # type: ignore[no-any-return]


def restore(destination: torch.Tensor, source: BlockScaledTensor) -> None:
    """Write codes and scales of `source` into the buffers of `destination`, in place.

    Nothing is quantized or dequantized, no buffer is replaced, and a quantizer's amax and scale stay as they are.

    Args:
        destination: a quantized tensor of either kind.
        source: one whole quantized shard, of the scheme, the shape and the directions of `destination`.

    Raises:
        ValueError: scheme, shape or directions differ; nothing was written.
    """
    # What was made in inference mode can be written in it alone.
    with torch.no_grad(), torch.inference_mode(destination.is_inference()):
        if isinstance(destination, BlockScaledTensor):
            destination.write_(source)
            return
        adapter = _adapter(destination)
        scheme, names = adapter.scheme(destination), adapter.directions(destination)
        if source.scheme != scheme or source.shape != destination.shape or not set(names) <= set(source.directions):
            raise ValueError(
                f"cannot write {source!r} over {type(destination).__name__} of shape {tuple(destination.shape)}, "
                f"scheme {scheme} and directions {', '.join(names)}"
            )
        adapter.write(destination, source.components())
