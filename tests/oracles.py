"""Inputs for other implementations of the numerics, and how their answers are compared with the package's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_fp8_dist import BlockScaledTensor
from tests import formats
from tests.elementwise import raw

ALL_CODES = torch.arange(256).to(torch.uint8)
EVERY_BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
"""Every one that is finite, without sign."""
EVERY_FP16 = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)

each_element = pytest.mark.parametrize("element", ["E4M3", "E5M2"])
each_power = pytest.mark.parametrize("power_of_two", [1, 0])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both hold the same bytes; of values, every NaN is as good as another."""
    np.testing.assert_array_equal(_bytes(found), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> formats.Bytes:
    if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return raw(tensor)


def random_values(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Values over many binades, some rows of them far below the others, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 6, shape, generator=generator))
    values[::7] *= 2.0**-40
    values[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return values


def random_codes(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Any of the 256."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """float32 scales that are no powers of two, over many binades."""
    return torch.exp2(16 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def codes_by_scales(scales: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) with every code under each of these scales, a row per scale."""
    return ALL_CODES.repeat(len(scales), 1), scales[:, None].expand(-1, 256 // block).contiguous()


def parts(tensor: BlockScaledTensor, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a direction, transposed where that makes its blocks run along rows."""
    found = (tensor.components()[f"{direction}_{name}"] for name in ("data", "scale_inv"))
    codes, scales = (part.t().contiguous() if direction == "columnwise" else part for part in found)
    return codes, scales
