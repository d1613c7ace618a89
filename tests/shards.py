"""BlockScaledTensors to test with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fp8_dist.quantized.grid import Grid
from megatron_fp8_dist.quantized.numerics import Direction
from megatron_fp8_dist.quantized.regrid import destination_edges
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from tests import toyschemes
from tests.elementwise import scaled
from tests.fakemodel import E4M3

SHAPE = (8, 12)
OTHER = torch.linspace(-3, 5, 96, dtype=torch.bfloat16).reshape(SHAPE)
"""Values that nothing here is quantized from."""
SCHEMES = ["per_tensor", *sorted(toyschemes.ROWS)]


def make(name: str, shape: Sequence[int] = SHAPE, element: str = "E4M3", seed: int = 0) -> BlockScaledTensor:
    """A whole quantized shard with random bytes, NaN codes too, and a scale of its own for each block."""
    generator = torch.Generator().manual_seed(seed)
    scheme = Scheme(name, element)
    directions = {}
    for spec in scheme.directions:
        codes = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)
        edges = destination_edges(scheme, spec.scale, tuple(shape))
        scales = torch.rand([len(e) - 1 for e in edges], generator=generator) + 0.5
        directions[spec.name] = Direction(codes, Grid(scales, edges))
    return BlockScaledTensor(scheme, directions)


def pointers(tensor: torch.Tensor) -> dict[str, int]:
    """Where each component's memory begins."""
    return {name: component.data_ptr() for name, component in scaled(tensor).components().items()}


def quantized(scheme: str = "per_tensor", seed: int = 0, shape: Sequence[int] = SHAPE) -> BlockScaledTensor:
    """A whole quantized shard of random values."""
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return BlockScaledTensor.quantize(values.to(torch.bfloat16), Scheme(scheme, "E4M3"))


def random_shard(shape: tuple[int, ...], seed: int, scale: float, scheme: Scheme = E4M3) -> BlockScaledTensor:
    """A whole quantized shard of random finite codes, all of one scale."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7B, shape, dtype=torch.uint8, generator=generator)
    edges = destination_edges(scheme, scheme.directions[0].scale, shape)
    values = torch.full([len(e) - 1 for e in edges], scale)
    return BlockScaledTensor.from_components(scheme, {"rowwise_data": codes, "rowwise_scale_inv": values})
