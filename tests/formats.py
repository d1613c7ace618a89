"""Every scheme's quantization rule in NumPy, block after block: what the package's numerics are compared with.

Written from Transformer Engine's rules. Nothing here calls the package or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests import float8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Block: TypeAlias = tuple[int, int]
ScaleRule: TypeAlias = "Callable[[np.float32, np.float32], tuple[np.float32 | np.uint8, np.float32]]"

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
ONE = np.float32(1)
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = np.array([sign * m for sign in (1.0, -1.0) for m in E2M1_MAGNITUDES], np.float32)
"""Value of each of the 16 codes."""


def largest(element: str) -> np.float32:
    """The largest finite value of an element format."""
    return np.float32(6) if element == "E2M1" else np.float32(float8.FORMATS[element].largest)


def encode(values: Floats, element: str) -> Bytes:
    """One code per value: nearest, ties to the even code, saturating, the sign of zero kept."""
    if element != "E2M1":
        return float8.FORMATS[element].encode(values)
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 6.0)
    distance = np.abs(magnitude[..., None] - np.array(E2M1_MAGNITUDES))
    # Of two codes at one distance the even one: it is looked at first.
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    code = order[np.argmin(distance[..., order], axis=-1)]
    out: Bytes = (code + np.where(np.signbit(values), 8, 0)).astype(np.uint8)
    return out


def decode(codes: Bytes, element: str) -> Floats:
    """Value of each code, without scale."""
    table = E2M1_VALUES if element == "E2M1" else float8.FORMATS[element].table.astype(np.float32)
    return table[codes]


def spacing(codes: Bytes, element: str) -> NDArray[np.float64]:
    """Distance between neighbouring values in the binade of each code."""
    if element != "E2M1":
        return float8.FORMATS[element].spacing(codes)
    out: NDArray[np.float64] = np.array([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0])[codes & 7]
    return out


def pack(codes: Bytes, axis: int) -> Bytes:
    """Two codes per byte along `axis`: the even one in the low nibble."""
    even, odd = (np.take(codes, range(first, codes.shape[axis], 2), axis) for first in (0, 1))
    return (even + 16 * odd).astype(np.uint8)


def unpack(packed: Bytes, axis: int) -> Bytes:
    """The inverse of `pack`."""
    shape = [2 * s if a == axis else s for a, s in enumerate(packed.shape)]
    out = np.zeros(shape, np.uint8)
    even, odd = (tuple(slice(f, None, 2) if a == axis else slice(None) for a in range(packed.ndim)) for f in (0, 1))
    out[even], out[odd] = packed % 16, packed // 16
    return out


def e8m0_value(code: int) -> np.float32:
    """2 ** (code - 127); NaN for 0xFF."""
    return np.float32(np.nan) if code == 0xFF else np.float32(np.ldexp(1.0, int(code) - 127))


E8M0_VALUES = np.array([e8m0_value(code) for code in range(0xFF)])


def e8m0_round_up(value: np.float32) -> int:
    """The smallest code whose value is not below `value`."""
    if np.isnan(value):
        return 0xFF
    return min(int(np.searchsorted(E8M0_VALUES, value, side="left")), 0xFE)


# Rules: (largest magnitude of the block, of the tensor) -> (scale_inv as stored, factor to quantize with)


def float32_scale(
    amax: np.float32, _: np.float32, *, element: str, power_of_two: bool, limit: np.float32
) -> tuple[np.float32, np.float32]:
    """Float32 scales: element_max / amax, its mantissa cleared for a power of two."""
    if amax == 0 or not np.isfinite(amax):
        return ONE, ONE
    with np.errstate(over="ignore"):
        scale = largest(element) / amax
    scale = limit if np.isinf(scale) else scale
    if power_of_two:
        scale = np.float32(np.ldexp(0.5, int(np.frexp(scale)[1])))
    return ONE / scale, scale


def e8m0_scale(amax: np.float32, _: np.float32, *, element: str) -> tuple[np.uint8, np.float32]:
    """E8M0 scales: amax times the float32 reciprocal of element_max, rounded up."""
    code = e8m0_round_up(amax * np.float32(1 / float(largest(element))))
    return np.uint8(code), np.float32(np.ldexp(1.0, 127 - code))


def e4m3_scale(amax: np.float32, whole: np.float32, *, e4m3_max: int) -> tuple[np.uint8, np.float32]:
    """E4M3 scales under the tensor's amax."""
    with np.errstate(over="ignore", divide="ignore"):
        tensor = min(np.float32(6 * e4m3_max) / whole, FLOAT32_MAX) if whole else ONE
        tensor = tensor or ONE
        wanted = min(amax * (tensor * (ONE / np.float32(6))), FLOAT32_MAX)
        code = encode(np.array([wanted], np.float32), "E4M3")
        factor = min(ONE / (decode(code, "E4M3")[0] * (ONE / tensor)), FLOAT32_MAX)
    return code[0], factor


@dataclass(frozen=True, slots=True)
class Rule:
    """A scheme, as its rule sees it."""

    element: str
    scale: ScaleRule
    blocks: dict[str, Block]
    """Direction -> elements that share a scale."""
    scale_dtype: type[np.generic]
    amax: bool = False
    e4m3_max: int = 448

    def multiplier(self, stored: np.generic, whole: np.float32) -> np.float32:
        """What a decoded code is multiplied by."""
        if self.amax:
            constant = np.float32(1 / (6 * self.e4m3_max))
            block = decode(np.array([stored], np.uint8), "E4M3")[0]
            product = block * whole
            # A product that overflows on the way to one that does not is taken in the other order.
            return np.float32(block * (whole * constant) if np.isinf(product) else product * constant)
        return np.float32(stored) if self.scale_dtype is np.float32 else e8m0_value(int(stored))

    def packed_axis(self, direction: str) -> int | None:
        """Axis along which codes are packed."""
        return None if self.element != "E2M1" else {"rowwise": 1, "columnwise": 0}[direction]


def rule(name: str, element: str, *, power_of_two: bool = True, limit: float = np.inf, e4m3_max: int = 448) -> Rule:
    """The rule of a scheme with finite blocks.

    Args:
        name: of the scheme.
        element: its element format.
        power_of_two: of float32 scales.
        limit: largest float32 scale; Transformer Engine takes the largest value of the input's dtype.
        e4m3_max: largest E4M3 scale.
    """
    family, _, square = name.partition("_")
    side = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}[family]
    blocks = {"rowwise": (side, side)} if square == "2d" else {"rowwise": (1, side), "columnwise": (side, 1)}
    if square == "row_scaled":
        del blocks["columnwise"]
    if family == "blockwise":
        cap = np.float32(min(limit, float(FLOAT32_MAX)))
        scale = partial(float32_scale, element=element, power_of_two=power_of_two, limit=cap)
        return Rule(element, scale, blocks, np.float32)
    if family == "mxfp8":
        return Rule(element, partial(e8m0_scale, element=element), blocks, np.uint8)
    return Rule(element, partial(e4m3_scale, e4m3_max=e4m3_max), blocks, np.uint8, True, e4m3_max)


def windows(shape: tuple[int, ...], block: Block) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """(index, elements) of every block."""
    grid = [range(-(-s // b)) for s, b in zip(shape, block, strict=True)]
    for i, j in product(*grid):
        yield (i, j), (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))


def grid_of(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Number of blocks per axis."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def amax_of(values: Floats) -> np.float32:
    """The largest magnitude."""
    return np.float32(np.abs(values).max(initial=0))


def quantize(values: Floats, how: Rule) -> dict[str, NDArray[np.generic]]:
    """Every component of one whole quantized shard of 2-D `values`."""
    whole, out = amax_of(values), dict[str, NDArray[np.generic]]()
    for direction, block in how.blocks.items():
        codes = np.zeros(values.shape, np.uint8)
        scales = np.zeros(grid_of(values.shape, block), how.scale_dtype)
        for index, window in windows(values.shape, block):
            scales[index], factor = how.scale(amax_of(values[window]), whole)
            with np.errstate(over="ignore"):
                codes[window] = encode(values[window] * factor, how.element)
        axis = how.packed_axis(direction)
        out[f"{direction}_data"] = codes if axis is None else pack(codes, axis)
        out[f"{direction}_scale_inv"] = scales
        if how.amax:
            out[f"amax_{direction}"] = np.full((1, 1), whole, np.float32)
    return out


def dequantize(components: dict[str, NDArray[np.generic]], how: Rule, direction: str = "rowwise") -> Floats:
    """Values of one direction, in float32."""
    data = components[f"{direction}_data"].astype(np.uint8)
    axis = how.packed_axis(direction)
    codes = data if axis is None else unpack(data, axis)
    whole = np.float32(components[f"amax_{direction}"][0, 0]) if how.amax else ONE
    values = decode(codes, how.element)
    for index, window in windows(codes.shape, how.blocks[direction]):
        # An infinite amax over a block scale of 0 is NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            values[window] *= how.multiplier(components[f"{direction}_scale_inv"][index], whole)
    return values
