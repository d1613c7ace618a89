"""Scales: how they are chosen, and what their stored bytes mean.

Rounding rules are Transformer Engine's, in IEEE float32:

- float32 scales (common/recipe/recipe_common.cuh): scale = element_max / amax, 1 where amax is 0, infinite or NaN;
  power-of-two scales clear its mantissa; scale_inv = 1 / scale.
- E8M0 (common/cast/mxfp8): scale_inv is amax * (1 / element_max) rounded up to a power of two.
- E4M3 under an amax (common/cast/nvfp4): the block scale is E4M3 of block_amax * S / 6 with S = 6 * e4m3_max / amax.
"""

from __future__ import annotations

import torch

from .elements import decode, encode, largest
from .scheme import SCALE_DTYPES, GridSpec, Scheme

FLOAT32_MAX = torch.finfo(torch.float32).max
MANTISSA_BITS = (1 << 23) - 1


def scale_from_amax(amax: torch.Tensor, element: str, limit: float = FLOAT32_MAX) -> torch.Tensor:
    """float32 scale (what a value is multiplied by to quantize it) for a largest magnitude of `amax`.

    `limit` is what a scale that overflows becomes.
    """
    amax = amax.to(torch.float32)
    # A tensor over a tensor: a number over a tensor is computed as reciprocal and product, which rounds twice.
    scale = torch.full_like(amax, largest(element)) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, limit), scale)
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def _floor_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return (scale.contiguous().view(torch.int32) & ~MANTISSA_BITS).view(torch.float32)


def e8m0_to_float(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> float32 powers of two: 2 ** (code - 127), NaN for 0xFF."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits)
    return torch.where(codes == 0xFF, torch.full_like(bits, 0x7FC00000), bits).view(torch.float32)


def float_to_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 -> E8M0 bytes, rounded up; 0 -> 0x00, infinity -> 0xFE, NaN -> 0xFF."""
    bits = values.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & MANTISSA_BITS
    # A subnormal up to 2**-127 has code 0, which is that power.
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 1 << 22))
    out = (exponent + up.to(torch.int32)).clamp(max=0xFE)
    return torch.where(values.isnan(), torch.full_like(out, 0xFF), out).to(torch.uint8)


def _tensor_scale(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """NVFP4's S: what brings the largest magnitude to 6 times the largest block scale."""
    top = torch.full_like(amax, 6.0 * scheme.flag("e4m3_max"))
    scale = (top / amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def least_amax(scheme: Scheme) -> float:
    """The smallest NVFP4 amax under which a block scale keeps its precision: S is finite, with room to spare."""
    return 512 * 6.0 * scheme.flag("e4m3_max") / FLOAT32_MAX


def choose_scales(
    block_amax: torch.Tensor,
    spec: GridSpec,
    scheme: Scheme,
    amax: torch.Tensor | None,
    limit: float = FLOAT32_MAX,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales for blocks of largest magnitude `block_amax`.

    Args:
        block_amax: float32, per block.
        spec: the grid of scales.
        scheme: its scheme.
        amax: float32, per block, of the second level; None without one.
        limit: float32 scale in the place of one that overflows.

    Returns:
        (scale_inv as stored, float32 factor that values are multiplied by to quantize them).
    """
    if spec.scale_format == "float32":
        scale = scale_from_amax(block_amax, scheme.element, limit)
        scale = _floor_power_of_two(scale) if scheme.flag("power_of_two") else scale
        return scale.reciprocal(), scale
    if spec.scale_format == "E8M0":
        stored = float_to_e8m0(block_amax * torch.tensor(1.0 / largest(scheme.element), dtype=torch.float32))
        # 2 ** (127 - code) is exact; code 0xFE would need an exponent below the normal range.
        return stored, e8m0_to_float(stored).reciprocal()
    assert amax is not None, "E4M3 scales are relative to an amax"
    tensor_scale = _tensor_scale(amax, scheme)
    sixth = torch.tensor(6.0, dtype=torch.float32).reciprocal()
    stored = encode((block_amax * (tensor_scale * sixth)).clamp(max=FLOAT32_MAX), "E4M3")
    factor = (decode(stored, "E4M3") * tensor_scale.reciprocal()).reciprocal().clamp(max=FLOAT32_MAX)
    return stored, factor


def invalid_scales(values: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Bool, per scale: NaN, infinite or negative, which no quantizer writes for finite values."""
    if values.dtype != SCALE_DTYPES[scale_format]:
        raise TypeError(f"{scale_format} scales are stored as {SCALE_DTYPES[scale_format]}, found {values.dtype}")
    if scale_format == "float32":
        return ~torch.isfinite(values) | (values < 0)
    return values == 0xFF if scale_format == "E8M0" else values >= 0x7F
