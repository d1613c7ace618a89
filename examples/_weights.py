"""FP8 weights of two kinds: Transformer Engine's Float8Tensor, and BlockScaledTensor where that is not installed.

Transformer Engine quantizes on a GPU only, so both kinds are quantized by `BlockScaledTensor.quantize`; from there on a
Float8Tensor is as real as any: its forward, its buffers and its place in the checkpoint do not know where its codes
came from.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, Scheme

SCHEME = Scheme(name="per_tensor", element="E4M3")
"""One scale per weight, as Transformer Engine's delayed scaling has it."""


class WeightKind(Protocol):
    """What the example needs to know of a kind of FP8 weight."""

    title: str
    """For the user to read."""

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """A trainable weight with the codes and the scale of `values`."""

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is a weight of this kind."""

    def buffers(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Its raw codes (uint8) and its scale_inv (one float32), as they lie in memory."""


class BlockScaledWeights:
    """Weights that are BlockScaledTensors."""

    title = "BlockScaledTensor (Transformer Engine is not used)"

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """See `WeightKind`."""
        return nn.Parameter(values)

    def owns(self, parameter: torch.Tensor) -> bool:
        """See `WeightKind`."""
        return isinstance(parameter, BlockScaledTensor)

    def buffers(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `WeightKind`."""
        assert isinstance(parameter, BlockScaledTensor)
        components = parameter.components()
        return components["rowwise_data"], components["rowwise_scale_inv"]


def choose(kind: str) -> WeightKind:
    """The kind of weight that `--weights` asks for; "auto" is "te" where Transformer Engine imports."""
    if kind == "block_scaled":
        return BlockScaledWeights()
    try:
        from _te_weights import Float8Weights
    except ImportError:
        if kind == "te":
            raise
        return BlockScaledWeights()
    return Float8Weights()
