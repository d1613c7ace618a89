"""Quantized weights: their schemes, how a shard is quantized, and the kinds of tensor that hold it.

Transformer Engine quantizes on a GPU only, so its tensors too get their codes and scales from
`BlockScaledTensor.quantize`; from there on they are as real as any: their buffers and their place in the checkpoint do
not know where the codes came from.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, Scheme

SCHEMES = {
    # One scale per weight, as Transformer Engine's delayed and current scaling have it.
    "float8": Scheme("per_tensor", "E4M3"),
    # A power of two per tile of 128 x 128.
    "blockwise": Scheme("blockwise_2d", "E4M3"),
    # A power of two per 1 x 32, and another quantization with one per 32 x 1.
    "mxfp8": Scheme("mxfp8", "E4M3"),
    # Four bits; a scale per tile of 16 x 16, and one more for the weight.
    "nvfp4": Scheme("nvfp4_2d", "E2M1"),
}
"""What `--scheme` names: Transformer Engine's recipes for weights."""

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_NVFP4_TILE = 16


def quantize(values: torch.Tensor, scheme: Scheme, amax: torch.Tensor) -> BlockScaledTensor:
    """Quantize one tensor-parallel shard as that part of the whole weight, so that shards can be merged exactly.

    A block that has a scale of its own is the same in the shard and in the whole, since this model is cut on block
    edges only. What is scaled by the largest magnitude of all takes that of the whole weight.

    Args:
        values: the shard, float32.
        scheme: one of `SCHEMES`.
        amax: largest magnitude of the whole weight.
    """
    direction = scheme.directions[0]
    if direction.scale.block == (None, None):
        # A tensor over a tensor: torch computes a number over a tensor as reciprocal and product, which rounds twice.
        return BlockScaledTensor.quantize(values, scheme, scale=torch.full_like(amax, _E4M3_MAX) / amax)
    if direction.amax is None:
        return BlockScaledTensor.quantize(values, scheme)
    # NVFP4's second level is the largest magnitude of what is quantized: one more row of tiles, cut off again, has it.
    tiles = values.new_zeros(_NVFP4_TILE, values.shape[1])
    tiles[0, 0] = amax
    quantized = BlockScaledTensor.quantize(torch.cat([values, tiles]), scheme)
    return cast(BlockScaledTensor, quantized[: len(values)])


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The four-bit codes of bytes that hold two of them each, along the last axis, the first one in the low half."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


class WeightKind(Protocol):
    """What the example needs to know of a kind of quantized weight."""

    title: str
    """For the user to read."""
    scheme: Scheme
    """How the weights are quantized."""

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """A trainable weight with the codes and scales of `values`."""

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is a weight of this kind."""

    def buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Its raw codes and scales, as they lie in memory, by name.

        All in the orientation of the weight and without padding: codes (uint8) one per element, scales and amaxes one
        per block.
        """


class BlockScaledWeights:
    """Weights that are BlockScaledTensors; see `WeightKind`."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.title = f"BlockScaledTensor, {scheme.name}/{scheme.element} (Transformer Engine is not used)"

    def parameter(self, values: BlockScaledTensor) -> nn.Parameter:
        """See `WeightKind`."""
        return nn.Parameter(values)

    def owns(self, parameter: torch.Tensor) -> bool:
        """See `WeightKind`."""
        return isinstance(parameter, BlockScaledTensor)

    def buffers(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `WeightKind`."""
        assert isinstance(parameter, BlockScaledTensor)
        found = parameter.components()
        if self.scheme.element == "E2M1":
            found["rowwise_data"] = nibbles(found["rowwise_data"])
        return found


def choose(kind: str, scheme: str) -> WeightKind:
    """The kind of weight that `--weights` and `--scheme` ask for; "auto" is "te" where Transformer Engine imports."""
    if kind == "block_scaled":
        return BlockScaledWeights(SCHEMES[scheme])
    try:
        from _te_weights import TEWeights
    except ImportError:
        if kind == "te":
            raise
        return BlockScaledWeights(SCHEMES[scheme])
    return TEWeights(SCHEMES[scheme])
