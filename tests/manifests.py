"""A manifest with one tensor of every kind."""

from __future__ import annotations

from itertools import pairwise

from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.sharding.layout import Box, EvenGrid, Fragment, TensorEntry
from megatron_fp8_dist.sharding.manifest import Manifest, MixedStack

E4M3 = Scheme("per_tensor", "E4M3")
E5M2 = Scheme("per_tensor", "E5M2")
SCALE = "rowwise_scale_inv"
ROWWISE = ("rowwise",)


def manifest() -> Manifest:
    """An even tensor, a stacked one with blocks, an uneven one, and a mixed stack of three layers."""
    row = EvenGrid((4, 6), {SCALE: (1, 1)}, (((2, 0),), ((1, 0),)))
    blocks = EvenGrid((1, 6, 8), {SCALE: (1, 3, 2)}, (((2, 0),), ((1, 0), (1, 2)), ((1, 0),)))
    uneven = tuple(Fragment(Box((a, 0), (b - a, 4)), (0, 0)) for a, b in pairwise((0, 5, 8, 16)))
    return Manifest(
        tensors={
            "even": TensorEntry(E4M3, "bfloat16", (8, 6), 0, ROWWISE, row),
            "blocks": TensorEntry(Scheme("toy_block", "E4M3"), "float16", (2, 12, 8), 1, ROWWISE, blocks),
            "uneven": TensorEntry(E5M2, "bfloat16", (16, 4), 0, ROWWISE, None, uneven),
            "mixed.layer_1": TensorEntry(E4M3, "bfloat16", (8, 6), 0, ROWWISE, row),
        },
        mixed={"mixed": MixedStack(3, (1,))},
        digest="sha256:0",
        writer={"torch": "2.13.0", "transformer-engine": None},
    )
