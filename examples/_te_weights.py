"""Weights that are Transformer Engine's Float8Tensors. Importing this module needs Transformer Engine."""

from __future__ import annotations

import torch
from torch import nn
from transformer_engine import __version__
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor

from megatron_fp8_dist import BlockScaledTensor


class Float8Weights:
    """Float8Tensors with the quantizer of delayed scaling; see `_weights.WeightKind`."""

    title = f"Float8Tensor (Transformer Engine {__version__})"

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """A Float8Tensor over the buffers of `values`."""
        components = values.components()
        scale_inv = components["rowwise_scale_inv"].reshape(1)
        weight = Float8Tensor(
            shape=values.shape,
            dtype=values.dtype,
            data=components["rowwise_data"],
            fp8_scale_inv=scale_inv,
            fp8_dtype=DType.kFloat8E4M3,
            quantizer=Float8Quantizer(scale=scale_inv.reciprocal(), amax=torch.zeros(1), fp8_dtype=DType.kFloat8E4M3),
            # Its default is a GPU.
            device=values.device,
        )
        return nn.Parameter(weight)

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is a Float8Tensor."""
        return isinstance(parameter, Float8Tensor)

    def buffers(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes that Transformer Engine's kernels read."""
        assert isinstance(parameter, Float8Tensor)
        return parameter._data, parameter._scale_inv
