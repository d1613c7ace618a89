"""Quantized parameters of random bytes, of the package's class and of Transformer Engine's, and all of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.quantized.regrid import destination_edges
from megatron_fp8_dist.quantized.scheme import GridSpec
from megatron_fp8_dist.te import tensors
from tests import te_cpu
from tests.elementwise import raw
from tests.te_cpu import Kind

SCHEMES = [
    Scheme("per_tensor", "E4M3"),
    Scheme("blockwise_2d", "E4M3"),
    Scheme("blockwise_1d", "E5M2"),
    Scheme("mxfp8", "E4M3"),
    Scheme("mxfp8_2d", "E4M3"),
    Scheme("nvfp4", "E2M1"),
    Scheme("nvfp4_2d", "E2M1"),
    Scheme("nvfp4_row_scaled", "E2M1"),
]
KINDS = [Kind("per_tensor"), Kind("blockwise_2d"), Kind("blockwise_1d"), Kind("mxfp8"), Kind("nvfp4", "E2M1")]

each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=[s.name for s in SCHEMES])
each_kind = pytest.mark.parametrize(
    "of",
    [
        *(pytest.param(scheme, id=scheme.name) for scheme in SCHEMES),
        *(pytest.param(kind, id=f"te-{kind}", marks=pytest.mark.te) for kind in KINDS),
    ],
)


def _values(spec: GridSpec, size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Values of a grid: scales, or amax."""
    if spec.scale_format == "float32":
        return torch.rand(tuple(size), generator=generator) + 0.5
    low, high = {"E8M0": (100, 140), "E4M3": (0x08, 0x70)}[spec.scale_format]
    return torch.randint(low, high, tuple(size), dtype=torch.uint8, generator=generator)


def tensor(scheme: Scheme, seed: int, shape: tuple[int, ...]) -> BlockScaledTensor:
    """A whole quantized shard: every code may be there, NaN too, and each block has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    components = {}
    for spec in scheme.directions:
        codes = torch.randint(0, 256, spec.code_shape(shape), dtype=torch.uint8, generator=generator)
        components[spec.data] = codes
        for grid in spec.grids:
            size = [len(edges) - 1 for edges in destination_edges(scheme, grid, shape)]
            components[grid.component] = _values(grid, size, generator)
    return BlockScaledTensor.from_components(scheme, components)


def parameter(of: Scheme | Kind, seed: int, shape: tuple[int, ...]) -> Any:
    """A quantized parameter. A Float8Tensor has a valid transpose."""
    if isinstance(of, Scheme):
        return nn.Parameter(tensor(of, seed, shape))
    if of.name == "per_tensor":
        codes, scale = tensor(Scheme("per_tensor", of.element), seed, shape).components().values()
        return nn.Parameter(te_cpu.float8(codes, scale.item(), element=of.element, transpose=True))
    empty = te_cpu.empty(of, shape)
    tensors.restore(empty, tensor(tensors.scheme_of(empty), seed, shape))
    return nn.Parameter(empty)


def contents(parameter: Any) -> dict[str, Any]:
    """Every byte of a quantized parameter, and whether the transpose of a Float8Tensor is one."""
    if isinstance(parameter, BlockScaledTensor):
        return {name: raw(part).tobytes() for name, part in parameter.components().items()}
    found: dict[str, Any] = {name: raw(buffer).tobytes() for name, buffer in te_cpu.buffers(parameter).items()}
    return found | {"transpose is stale": getattr(parameter, "_transpose_invalid", None)}
