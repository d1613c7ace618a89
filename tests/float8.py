"""The 8-bit element formats from their definition, in NumPy: what the package's numerics are compared with.

Nothing here calls torch's float8 types or the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Format:
    """A sign bit, exponent bits, mantissa bits; subnormals at exponent 0."""

    mantissa_bits: int
    bias: int
    has_infinity: bool
    """IEEE-like: the last exponent is infinity and NaN. Without it (E4M3) only the last code is NaN."""

    def value(self, code: int) -> float:
        """The value of one code."""
        sign = -1 if code & 0x80 else 1
        exponent, mantissa = divmod(code & 0x7F, 1 << self.mantissa_bits)
        if self.has_infinity and exponent == 0x7F >> self.mantissa_bits:
            return float("nan") if mantissa else sign * float("inf")
        if not self.has_infinity and code & 0x7F == 0x7F:
            return float("nan")
        fraction = Fraction(mantissa, 1 << self.mantissa_bits) + (1 if exponent else 0)
        magnitude = float(fraction * Fraction(2) ** (max(exponent, 1) - self.bias))
        return sign * magnitude if magnitude else sign * 0.0

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """Value of every code."""
        return np.array([self.value(code) for code in range(256)])

    @cached_property
    def finite(self) -> NDArray[np.float64]:
        """The finite values without sign, in order; the index is the code."""
        positive = self.table[:128]
        return positive[np.isfinite(positive)]

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float(self.finite[-1])

    def encode(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Codes of values that are not NaN: nearest, ties to the even code, saturating."""
        magnitude = np.minimum(np.abs(values.astype(np.float64)), self.largest)
        # Values and midpoints are short binary fractions, so float64 holds both exactly.
        midpoints = (self.finite[:-1] + self.finite[1:]) / 2
        below = np.searchsorted(midpoints, magnitude, side="left")
        tie = (below < len(midpoints)) & (midpoints[np.minimum(below, len(midpoints) - 1)] == magnitude)
        code = np.where(tie & (below % 2 == 1), below + 1, below)
        return (code + np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)

    def spacing(self, codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Distance between neighbouring values in the binade of each code."""
        exponent = np.maximum((codes & 0x7F) >> self.mantissa_bits, 1).astype(np.int64)
        spacing: NDArray[np.float64] = np.ldexp(1.0, exponent - self.bias - self.mantissa_bits)
        return spacing


FORMATS = {
    "E4M3": Format(mantissa_bits=3, bias=7, has_infinity=False),
    "E5M2": Format(mantissa_bits=2, bias=15, has_infinity=True),
}


def scale_from_amax(amax: np.float32, element: str) -> np.float32:
    """Transformer Engine's rule: largest / amax in float32, at most the largest float32; 1 where amax is unusable."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(FORMATS[element].largest) / amax
    return FLOAT32_MAX if np.isinf(scale) else scale
