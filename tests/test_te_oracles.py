"""The numerics against Transformer Engine itself, byte for byte, as far as it computes without a device.

That is its tensors' `dequantize` and the reference quantizers that it ships.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.quantized.scheme import ELEMENT_DTYPES
from megatron_fp8_dist.te import tensors
from tests import formats, te_cpu
from tests.oracles import (
    ALL_CODES,
    EVERY_BF16,
    EVERY_FP16,
    each_dtype,
    each_element,
    each_power,
    parts,
    random_codes,
    random_scales,
    random_values,
    same_bytes,
)
from tests.te_cpu import Kind

pytest_plugins = ["tests.pure"]
pytestmark = [pytest.mark.te, pytest.mark.usefixtures("one_thread")]

# Values of its tensors. (MXFP8 and NVFP4 tensors compute theirs on a device only.)

FLOAT32_MAX = torch.finfo(torch.float32).max
SCALES = [1.0, 0.3, 2.0**-126, 3 * 2.0**-140, 2.0**-149, 1e30, FLOAT32_MAX, 0.0]
"""Finite ones, subnormal and largest too."""


@each_element
@each_dtype
@pytest.mark.parametrize("rowwise", [True, False])
def test_values_of_a_float8_tensor(element: str, dtype: torch.dtype, rowwise: bool) -> None:
    for scale in SCALES:
        tensor = te_cpu.float8(ALL_CODES.view(8, 32), scale, element=element, rowwise=rowwise)
        same_bytes(tensors.wrap(tensor).dequantize(dtype), tensor.dequantize(dtype=dtype))


@each_element
@each_dtype
@pytest.mark.parametrize("name", ["blockwise_2d", "blockwise_1d"])
@pytest.mark.parametrize("use", ["rowwise", "columnwise"])
def test_values_of_a_blockwise_tensor(name: str, element: str, dtype: torch.dtype, use: str) -> None:
    shape, kind = (300, 400), Kind(name, element, power_of_two=False)
    # A derived columnwise direction is made from the rowwise one.
    stored = use if not kind.derived else "rowwise"
    scales = random_scales(formats.grid_of(shape, formats.rule(name, element).blocks[stored]))
    scales.view(-1)[: len(SCALES)] = torch.tensor(SCALES)
    components = {f"{stored}_data": random_codes(shape), f"{stored}_scale_inv": scales}
    ours = BlockScaledTensor.from_components(Scheme.of(name, element, power_of_two=0), components)
    tensor = te_cpu.empty(kind, shape, rowwise=use == "rowwise", columnwise=use == "columnwise")
    tensors.restore(tensor, ours)
    same_bytes(ours.dequantize(dtype), tensor.dequantize(dtype=dtype))
    same_bytes(tensors.wrap(tensor).dequantize(dtype), tensor.dequantize(dtype=dtype))


# Its reference quantizers


@each_element
@each_dtype
def test_per_tensor_codes(element: str, dtype: torch.dtype) -> None:
    """Of an amax so small that its scale overflows only in float32.

    Elsewhere the reference takes the largest value of the input's dtype, the kernel and the package that of float32.
    """
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    reference = CurrentScalingQuantizerRef(ELEMENT_DTYPES[element], columnwise=False)
    overflowing = (2.0**-149, 2.0**-130) if dtype == torch.float32 else ()
    for magnitude in (0.0, 2.0**-24, 1.0, 60000.0, *overflowing):
        values = random_values((40, 66))
        values = (values / values.abs().max() * magnitude).to(dtype)
        codes, scale = parts(BlockScaledTensor.quantize(values, Scheme("per_tensor", element)), "rowwise")
        expected = reference.quantize(values)
        same_bytes(codes, expected.data)
        same_bytes(scale.view(1), expected.scale)


@each_element
@each_power
@pytest.mark.parametrize("values", [EVERY_BF16.float(), EVERY_BF16, EVERY_FP16], ids=["float32", "bfloat16", "float16"])
def test_block_scales_of_every_amax(element: str, power_of_two: int, values: torch.Tensor) -> None:
    """One value per block, so that each is an amax: every one of its dtype that is finite.

    Of an infinite or NaN amax the reference makes a scale of 0 or NaN, the kernels and the package 1.
    """
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

    scheme = Scheme.of("blockwise_1d", element, power_of_two=power_of_two)
    codes, stored = parts(BlockScaledTensor.quantize(values[:, None], scheme), "rowwise")
    how: dict[str, Any] = {"eps": 0.0, "pow_2_scales": bool(power_of_two)}
    kind = ELEMENT_DTYPES[element]
    scale, expected, _ = reference._scale_from_amax_tensor(values.dtype, values.float(), kind, **how)
    same_bytes(stored.view(-1), expected)
    same_bytes(codes.view(-1), (values.float() * scale).to(kind))


@each_element
@each_power
@pytest.mark.parametrize("name", ["blockwise_2d", "blockwise_1d"])
def test_blockwise_codes(name: str, element: str, power_of_two: int) -> None:
    """The per-tensor reference for each block, as if it were a tensor."""
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    how: dict[str, Any] = {"columnwise": False, "pow_2_scales": bool(power_of_two)}
    reference = CurrentScalingQuantizerRef(ELEMENT_DTYPES[element], **how)
    values = random_values((140, 150)).to(torch.bfloat16)
    components = BlockScaledTensor.quantize(values, Scheme.of(name, element, power_of_two=power_of_two)).components()
    for direction, block in formats.rule(name, element).blocks.items():
        codes, scales = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(formats.grid_of((140, 150), block))
        for index, window in formats.windows((140, 150), block):
            expected = reference.quantize(values[window].contiguous())
            codes[window], scales[index] = expected.data.view(torch.uint8), expected.scale.squeeze()
        same_bytes(components[f"{direction}_data"], codes)
        same_bytes(components[f"{direction}_scale_inv"], scales)


NVFP4 = {"nvfp4": (1, 16), "nvfp4_2d": (16, 16), "nvfp4_row_scaled": (1, 16)}
"""Scheme -> tile of the reference."""


def check_nvfp4(values: torch.Tensor, name: str) -> None:
    """Codes, scales and amax are the reference's, of which a negative value that rounds to zero may lose its sign."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    how: dict[str, Any] = {"row_scaled_nvfp4": name == "nvfp4_row_scaled", "columnwise": name == "nvfp4"}
    reference = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=NVFP4[name], **how).quantize(values)
    tensor = BlockScaledTensor.quantize(values, Scheme(name, "E2M1"))
    sides = {"rowwise": (values, reference.data, reference.scale, reference.global_amax_row)}
    if name == "nvfp4":
        sides["columnwise"] = (values.t(), reference.data_t, reference.scale_t, reference.global_amax_col)
    for direction, (oriented, packed, scale, amax) in sides.items():
        codes, scales = parts(tensor, direction)
        expected = formats.unpack(packed.numpy(), 1)
        expected[oriented.signbit().numpy() & (expected == 0)] = 8
        np.testing.assert_array_equal(formats.unpack(codes.numpy(), 1), expected)
        # The reference repeats a tile's scale in each of its rows, those of its padding too.
        same_bytes(scales, scale[:: NVFP4[name][0]][: len(scales)])
        same_bytes(tensor.components()[f"amax_{direction}"].view(-1), amax)


each_nvfp4 = pytest.mark.parametrize("name", NVFP4)


@each_nvfp4
@each_dtype
@pytest.mark.parametrize("shape", [(64, 96), (130, 258)], ids=str)
def test_nvfp4_codes(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_nvfp4(random_values(shape).to(dtype), name)


@each_nvfp4
@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e-35, 1e30, FLOAT32_MAX])
def test_nvfp4_amax_at_the_edges(name: str, amax: float) -> None:
    values = random_values((32, 48))
    check_nvfp4(values / values.abs().max() * amax, name)


@each_nvfp4
def test_nvfp4_of_infinity(name: str) -> None:
    """Not of NaN: its codes are 0 there, and the largest ones here; its scale is NaN in both."""
    values = random_values((32, 48))
    values[3, 5], values[20, 40] = torch.inf, -torch.inf
    check_nvfp4(values, name)
