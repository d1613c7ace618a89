"""Weights that are Transformer Engine's own tensors. Importing this module needs Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformer_engine import __version__
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
)

from _weights import nibbles
from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.te.tensors import restore

_E4M3 = DType.kFloat8E4M3


def _float8(values: BlockScaledTensor) -> Any:
    """A Float8Tensor over the buffers of `values`, with the quantizer of delayed scaling."""
    components = values.components()
    scale_inv = components["rowwise_scale_inv"].reshape(1)
    return Float8Tensor(
        shape=values.shape,
        dtype=values.dtype,
        data=components["rowwise_data"],
        fp8_scale_inv=scale_inv,
        fp8_dtype=_E4M3,
        quantizer=Float8Quantizer(scale=scale_inv.reciprocal(), amax=torch.zeros(1), fp8_dtype=_E4M3),
        # Its default is a GPU.
        device=values.device,
    )


def _in_blocks(quantizer: Callable[[], Any]) -> Callable[[BlockScaledTensor], Any]:
    """Tensors with the buffers that `quantizer` allocates, in both directions, and the bytes of what they are given."""

    def make(values: BlockScaledTensor) -> Any:
        tensor = quantizer().make_empty(values.shape, dtype=values.dtype, device=values.device)
        restore(tensor, values)
        return tensor

    return make


# What a class keeps where. Scale buffers are padded, and what is stored transposed is turned back.


def _float8_buffers(tensor: Any) -> dict[str, torch.Tensor]:
    return {"rowwise_data": tensor._data, "rowwise_scale_inv": tensor._scale_inv.reshape(1, 1)}


def _blockwise_buffers(tensor: Any) -> dict[str, torch.Tensor]:
    rows, columns = (size // 128 for size in tensor.shape)
    return {
        "rowwise_data": tensor._rowwise_data,
        "rowwise_scale_inv": tensor._rowwise_scale_inv[:rows, :columns],
        "columnwise_data": tensor._columnwise_data.t(),
        "columnwise_scale_inv": tensor._columnwise_scale_inv[:columns, :rows].t(),
    }


def _mxfp8_buffers(tensor: Any) -> dict[str, torch.Tensor]:
    rows, columns = tensor.shape
    return {
        "rowwise_data": tensor._rowwise_data,
        "rowwise_scale_inv": tensor._rowwise_scale_inv[:rows, : columns // 32],
        "columnwise_data": tensor._columnwise_data,
        "columnwise_scale_inv": tensor._columnwise_scale_inv[: rows // 32, :columns],
    }


def _nvfp4_buffers(tensor: Any) -> dict[str, torch.Tensor]:
    rows, columns = tensor.shape
    return {
        "rowwise_data": nibbles(tensor._rowwise_data),
        "rowwise_scale_inv": tensor._rowwise_scale_inv[:rows, : columns // 16],
        "amax_rowwise": tensor._amax_rowwise.reshape(1, 1),
        "columnwise_data": nibbles(tensor._columnwise_data).t(),
        "columnwise_scale_inv": tensor._columnwise_scale_inv[:columns, : rows // 16].t(),
        "amax_columnwise": tensor._amax_columnwise.reshape(1, 1),
    }


@dataclass(frozen=True, slots=True)
class _Row:
    """One of Transformer Engine's classes."""

    tensor: type[torch.Tensor]
    make: Callable[[BlockScaledTensor], Any]
    """A tensor with the codes and scales of another."""
    buffers: Callable[[Any], dict[str, torch.Tensor]]
    """See `WeightKind.buffers`."""


_CLASSES = {
    "per_tensor": _Row(Float8Tensor, _float8, _float8_buffers),
    "blockwise_2d": _Row(
        Float8BlockwiseQTensor,
        _in_blocks(lambda: Float8BlockQuantizer(_E4M3, rowwise=True, columnwise=True)),
        _blockwise_buffers,
    ),
    "mxfp8": _Row(MXFP8Tensor, _in_blocks(lambda: MXFP8Quantizer(_E4M3)), _mxfp8_buffers),
    "nvfp4_2d": _Row(
        NVFP4Tensor,
        _in_blocks(lambda: NVFP4Quantizer(with_2d_quantization=True)),
        _nvfp4_buffers,
    ),
}


class TEWeights:
    """Weights of the class that Transformer Engine has for a scheme; see `_weights.WeightKind`."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._class = _CLASSES[scheme.name]
        self.title = f"{self._class.tensor.__name__} (Transformer Engine {__version__})"

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """See `WeightKind`."""
        return nn.Parameter(self._class.make(values))

    def owns(self, parameter: torch.Tensor) -> bool:
        """See `WeightKind`."""
        return isinstance(parameter, self._class.tensor)

    def buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `WeightKind`: the bytes that Transformer Engine's kernels read."""
        return self._class.buffers(parameter)
