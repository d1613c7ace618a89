"""Element formats: codes to float32 values and back, without scales."""

from __future__ import annotations

import torch

from .scheme import E2M1, ELEMENT_DTYPES

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
"""Midpoints between neighbours, and whether a tie goes up, to the even mantissa."""


_REPACKED = 1 << 20
"""Elements that are unpacked at a time."""


def largest(element: str) -> float:
    """The largest finite value of an element format."""
    return _E2M1_VALUES[-1] if element == E2M1 else float(torch.finfo(ELEMENT_DTYPES[element]).max)


def unpack(codes: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Packed bytes -> one code per element along `axis`, the low nibble first; the codes themselves if not packed."""
    if axis is None:
        return codes
    pairs = torch.stack((codes & 0xF, codes >> 4), axis + 1)
    return pairs.flatten(axis, axis + 1)


def pack(codes: torch.Tensor, axis: int | None) -> torch.Tensor:
    """The inverse of `unpack`."""
    if axis is None:
        return codes
    pairs = codes.unflatten(axis, (-1, 2))
    return torch.bitwise_or(pairs.select(axis + 1, 0), pairs.select(axis + 1, 1) << 4)


def repack(codes: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Codes of a 2-D tensor that are packed along axis `source`, packed along axis `target`: few rows at a time."""
    rows, columns = (2 * s if a == source else s for a, s in enumerate(codes.shape))
    out = torch.empty(
        (rows, columns // 2) if target == 1 else (rows // 2, columns), dtype=codes.dtype, device=codes.device
    )
    step = max(2, _REPACKED // max(1, columns) // 2 * 2)
    for start in range(0, rows, step):
        whole, halved = slice(start, start + step), slice(start // 2, (start + step) // 2)
        part = unpack(codes[halved if source == 0 else whole], source)
        out[halved if target == 0 else whole] = pack(part, target)
    return out


def decode(codes: torch.Tensor, element: str) -> torch.Tensor:
    """One uint8 code per element -> float32 values, without scale."""
    if element == E2M1:
        magnitudes = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=codes.device)
        values = magnitudes[(codes & 0x7).long()]
        return torch.where(codes & 0x8 != 0, -values, values)
    return codes.view(ELEMENT_DTYPES[element]).to(torch.float32)


def encode(values: torch.Tensor, element: str) -> torch.Tensor:
    """float32 values -> one uint8 code per element: round to nearest even, saturate, keep the sign of zero.

    Infinity saturates too. NaN stays NaN; E2M1 has none and gets its largest value.
    """
    if element == E2M1:
        magnitude = values.abs()
        codes = torch.zeros_like(magnitude, dtype=torch.uint8)
        for middle, up in _E2M1_TIES:
            codes += magnitude >= middle if up else magnitude > middle
        codes = torch.where(magnitude.isnan(), torch.full_like(codes, len(_E2M1_VALUES) - 1), codes)
        return codes | (torch.signbit(values).to(torch.uint8) << 3)
    limit = largest(element)
    return values.clamp(-limit, limit).to(ELEMENT_DTYPES[element]).view(torch.uint8)


def encode_non_finite(values: torch.Tensor, element: str) -> torch.Tensor:
    """As `encode`, but infinity stays infinity where the format has it (E5M2): for values that were codes before."""
    if element != "E5M2":
        return encode(values, element)
    return values.to(ELEMENT_DTYPES[element]).view(torch.uint8)
