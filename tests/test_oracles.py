"""The numerics against torchao and compressed-tensors, byte for byte, wherever those follow the same rule.

A docstring says on which inputs an oracle has another rule, and what is compared there.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.quantized import elements
from megatron_fp8_dist.quantized.scales import choose_scales, e8m0_to_float
from megatron_fp8_dist.quantized.scheme import ELEMENT_DTYPES
from tests import formats
from tests.oracles import (
    ALL_CODES,
    EVERY_BF16,
    codes_by_scales,
    each_dtype,
    each_element,
    each_power,
    parts,
    random_codes,
    random_scales,
    random_values,
    same_bytes,
)

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")


def quietly(name: str) -> Any:
    """A module of a package that warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


# torchao


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    mx, nvfp4, kernels, config = (
        quietly(f"torchao.prototype.mx_formats.{name}") for name in ("mx_tensor", "nvfp4_tensor", "kernels", "config")
    )
    return SimpleNamespace(
        mx=mx,
        nvfp4=nvfp4,
        kernels=kernels,
        float8=quietly("torchao.float8.float8_utils"),
        round_up=config.ScaleCalculationMode.RCEIL,
    )


def to_mx(torchao: SimpleNamespace, values: torch.Tensor, element: str, block: int = 32) -> tuple[torch.Tensor, ...]:
    """(codes, scales) by torchao, with the rule that rounds scales up."""
    scales, codes = torchao.mx.to_mx(values.contiguous(), ELEMENT_DTYPES[element], block, torchao.round_up)
    return codes.view(torch.uint8), scales.view(torch.uint8)


@each_element
def test_mxfp8_of_every_bfloat16_amax(torchao: SimpleNamespace, element: str) -> None:
    """The largest magnitude of a block is every bfloat16: 0, subnormal, on and around every edge of a scale, the last.

    Where the scale is 0x00, torchao multiplies by 1 and Transformer Engine by 2 ** 127: there torchao only casts.
    """
    amax = EVERY_BF16.double()[:, None]
    values = (amax * torch.cat([torch.linspace(-1, 1, 31), torch.zeros(1)])).to(torch.bfloat16)
    codes, scales = parts(BlockScaledTensor.quantize(values, Scheme("mxfp8", element)), "rowwise")
    expected, expected_scales = to_mx(torchao, values, element)
    same_bytes(scales, expected_scales)
    lowest = scales == 0
    assert lowest.sum() > 1000
    cast = torchao.float8.to_fp8_saturated(values.float() * 2.0**127, ELEMENT_DTYPES[element]).view(torch.uint8)
    same_bytes(codes, torch.where(lowest, cast, expected))


@each_element
@pytest.mark.parametrize("steps", [-3, -1, 0, 1000])
def test_mxfp8_of_amax_where_a_scale_changes(torchao: SimpleNamespace, element: str, steps: int) -> None:
    """A float32 amax as many steps from every largest element * 2 ** n, subnormal ones too.

    torchao takes a float32 logarithm, which is the whole number also for some 20 steps above a power of two: there its
    scale is one too small.
    """
    edges = np.ldexp(1.75, np.arange(-149, 128)).astype(np.float32)
    amax = (torch.from_numpy(edges).view(torch.int32) + steps).clamp(min=0).view(torch.float32)
    amax = amax[torch.isfinite(amax)]
    values = torch.zeros(len(amax), 32)
    values[:, 3], values[:, 7] = -amax, amax / 3
    found = BlockScaledTensor.quantize(values, Scheme("mxfp8", element))
    same_bytes(parts(found, "rowwise")[1], to_mx(torchao, values, element)[1])


@each_element
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp8_in_both_directions(torchao: SimpleNamespace, element: str, dtype: torch.dtype) -> None:
    values = random_values((160, 224)).to(dtype)
    tensor = BlockScaledTensor.quantize(values, Scheme("mxfp8", element))
    for direction, oriented in (("rowwise", values), ("columnwise", values.t())):
        for found, expected in zip(parts(tensor, direction), to_mx(torchao, oriented, element), strict=True):
            same_bytes(found, expected)


@each_element
def test_mxfp8_in_tiles(torchao: SimpleNamespace, element: str) -> None:
    """Each tile is a row of 1024 elements to torchao, which has no 32 x 32 blocks."""
    values = random_values((96, 128))
    codes, scales = parts(BlockScaledTensor.quantize(values, Scheme("mxfp8_2d", element)), "rowwise")
    tiles = [t.view(3, 32, 4, 32).transpose(1, 2).reshape(12, 1024) for t in (values, codes)]
    expected, expected_scales = to_mx(torchao, tiles[0], element, 1024)
    same_bytes(tiles[1], expected)
    same_bytes(scales.reshape(12, 1), expected_scales)


@each_element
def test_mxfp8_of_nan_and_infinity(torchao: SimpleNamespace, element: str) -> None:
    """A NaN makes its block NaN (scale 0xFF), infinity gives the largest scale (0xFE) and saturates."""
    values = random_values((4, 64), 3)
    values[0, 5], values[1, 40], values[2, 3] = torch.nan, torch.inf, -torch.inf
    found = parts(BlockScaledTensor.quantize(values, Scheme("mxfp8", element)), "rowwise")
    for ours, expected in zip(found, to_mx(torchao, values, element), strict=True):
        same_bytes(ours, expected)
    scales = found[1]
    assert [int(s) for s in (scales[0, 0], scales[1, 1], scales[2, 0])] == [0xFF, 0xFE, 0xFE]


@each_element
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_mxfp8_values(torchao: SimpleNamespace, element: str, dtype: torch.dtype, direction: str) -> None:
    """Every code under every scale. Not in float16, to which torchao rounds the scale first."""
    codes, scales = codes_by_scales(ALL_CODES, 32)
    kind = ELEMENT_DTYPES[element]
    expected = torchao.mx.to_dtype(codes.view(kind), scales.view(torch.float8_e8m0fnu), kind, 32, dtype)
    if direction == "columnwise":
        codes, scales, expected = codes.t(), scales.t(), expected.t()
    components = {f"{direction}_data": codes, f"{direction}_scale_inv": scales}
    same_bytes(BlockScaledTensor.from_components(Scheme("mxfp8", element), components).dequantize(dtype), expected)


def test_e2m1_codes(torchao: SimpleNamespace) -> None:
    """Every bfloat16 of either sign, the midpoints among them, infinity, and any float32. Not NaN: torchao has none."""
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    near = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 3
    magnitudes = EVERY_BF16.float()
    values = torch.cat(
        [magnitudes, -magnitudes, torch.tensor([torch.inf, -torch.inf]), torch.from_numpy(anything), near]
    )
    values = values[~values.isnan()]
    same_bytes(elements.encode(values, "E2M1"), torchao.kernels.f32_to_f4_unpacked(values.clone()))


def test_e2m1_bytes(torchao: SimpleNamespace) -> None:
    packed = ALL_CODES.view(16, 16)
    codes = elements.unpack(packed, 1)
    same_bytes(codes, torchao.kernels.unpack_uint4(packed))
    same_bytes(elements.pack(codes, 1), torchao.kernels.pack_uint4(codes))
    same_bytes(elements.decode(codes, "E2M1"), torchao.kernels.f4_unpacked_to_f32(codes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [-30, -7, 0, 40])
def test_nvfp4_in_both_directions(torchao: SimpleNamespace, dtype: torch.dtype, exponent: int) -> None:
    """The tensor's amax is 6 * 448 * 2 ** n, so that its scale is exact.

    Otherwise torchao rounds in another order, (block amax / 6) / (amax / 2688), which can tip a scale over to its
    neighbour. It gives no scale below 2 ** -6, the smallest normal one.
    """
    values = random_values((96, 160), 5)
    values = (values / values.abs().max() * 2.0 ** (exponent + 11)).to(dtype)
    values[50, 70] = -2688 * 2.0**exponent
    tensor = BlockScaledTensor.quantize(values, Scheme("nvfp4", "E2M1"))
    per_tensor = values.abs().max().float() / 2688
    for direction, oriented in (("rowwise", values), ("columnwise", values.t())):
        codes, scales = parts(tensor, direction)
        expected_scales, expected = torchao.nvfp4.nvfp4_quantize(oriented.contiguous(), 16, per_tensor)
        same_bytes(scales.clamp(min=0x08), expected_scales.view(torch.uint8))
        normal = scales >= 0x08
        assert normal.any()
        known = normal.repeat_interleave(8, 1)
        same_bytes(codes[known], expected[known])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amax", [0.0, 1.0, 2.0**-60, 2.0**20, 2.625, 2688.0])
def test_nvfp4_values(torchao: SimpleNamespace, dtype: torch.dtype, amax: float) -> None:
    """Every pair of codes under every scale, E4M3's NaN too.

    torchao multiplies the scale by (amax / 2688), Transformer Engine (scale * amax) by 1 / 2688: the same where one of
    them is exact, a last bit of float32 apart elsewhere.
    """
    codes, scales = codes_by_scales(ALL_CODES, 8)
    per_tensor = torch.tensor(amax) * torch.tensor(1 / 2688)
    args = (codes, scales.view(torch.float8_e4m3fn), 16, torch.bfloat16, per_tensor)
    components = {"rowwise_data": codes, "rowwise_scale_inv": scales, "amax_rowwise": torch.tensor([[amax]])}
    tensor = BlockScaledTensor.from_components(Scheme("nvfp4", "E2M1"), components)
    same_bytes(tensor.dequantize(dtype), torchao.nvfp4.NVFP4Tensor(*args).dequantize(dtype))


@each_element
@each_power
def test_float32_scales(torchao: SimpleNamespace, element: str, power_of_two: int) -> None:
    """Of every bfloat16 amax, and without powers of two of random float32 ones.

    torchao takes no amax below 1e-12; its powers of two come from a float32 logarithm, which is off right below one.
    """
    amax = EVERY_BF16.float()
    if not power_of_two:
        some = torch.exp2(torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 166 - 39)
        amax = torch.cat([amax, some])
    amax = amax[amax >= 1e-12]
    scheme = Scheme.of("blockwise_2d", element, power_of_two=power_of_two)
    stored, scale = choose_scales(amax, scheme.directions[0].scale, scheme, None)
    expected = torchao.float8.amax_to_scale(amax, ELEMENT_DTYPES[element], bool(power_of_two))
    same_bytes(scale, expected)
    same_bytes(stored, 1.0 / expected)


# compressed-tensors


class _StandIn(ModuleType):
    """A module that is imported from and never called: any name in it is a class."""

    __path__: list[str] = []  # noqa: RUF012  # a package, as the import system wants it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def compressed() -> SimpleNamespace:
    """Its numerics.

    Importing them imports transformers and huggingface_hub too, for models and downloads, which they do not call: where
    those are absent, as the requirements leave them, stand-ins are imported.
    """
    absent = [name for name in ("transformers", "huggingface_hub") if find_spec(name) is None]
    modules = ("file_utils", "masking_utils", "modeling_utils", "utils")
    names = [n for package in absent for n in (package, *(f"{package}.{module}" for module in modules))]
    sys.modules.update({name: _StandIn(name) for name in names})
    try:
        quietly("compressed_tensors")
        convert, mx, packed = (
            quietly(f"compressed_tensors.{name}")
            for name in ("entrypoints.convert", "compressors.mx_utils", "compressors.nvfp4")
        )
        quantization = quietly("compressed_tensors.quantization")
    finally:
        for name in names:
            del sys.modules[name]
    return SimpleNamespace(convert=convert, mx=mx, nvfp4=packed, quantization=quantization)


BLOCKS = [
    ("blockwise_2d", "rowwise", (128, 128)),
    ("blockwise_1d", "rowwise", (1, 128)),
    ("blockwise_1d", "columnwise", (128, 1)),
]


@each_element
@pytest.mark.parametrize(("name", "direction", "block"), BLOCKS)
@each_dtype
def test_blockwise_values(
    compressed: SimpleNamespace, name: str, direction: str, block: tuple[int, int], element: str, dtype: torch.dtype
) -> None:
    """What reads a published block-scaled checkpoint: codes and `weight_scale_inv`, any shape."""
    shape = (200, 300)
    codes, scales = random_codes(shape), random_scales(formats.grid_of(shape, block))
    components = {f"{direction}_data": codes, f"{direction}_scale_inv": scales}
    tensor = BlockScaledTensor.from_components(Scheme.of(name, element, power_of_two=0), components)
    stored = {"proj.weight": codes.view(ELEMENT_DTYPES[element]), "proj.weight_scale_inv": scales}
    reader = compressed.convert.FP8BlockDequantizer(targets=["proj"], weight_block_size=block, dtype=dtype)
    same_bytes(tensor.dequantize(dtype), reader.process(stored)["proj.weight"])


def test_codes_of_given_scales(compressed: SimpleNamespace) -> None:
    """Scales that make values saturate, infinite ones too, and NaN.

    compressed-tensors divides by scale_inv, where Transformer Engine multiplies by the scale: the same for powers of
    two.
    """
    values = random_values((200, 300))
    values[3, 4], values[130, 5], values[150, 200] = torch.inf, -torch.inf, torch.nan
    scales = torch.tensor([[2.0**20, 1.0, 2.0**-3], [2.0**-30, 2.0**9, 2.0**50]])
    codes = parts(BlockScaledTensor.quantize(values, Scheme("blockwise_2d", "E4M3"), scales), "rowwise")[0]
    args = compressed.quantization.QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True
    )
    expected = compressed.quantization.quantize(values, 1 / scales, None, args, dtype=torch.float8_e4m3fn)
    same_bytes(codes, expected)
    assert {0x7E, 0xFE, 0x7F} <= set(codes.flatten().tolist())


def test_e8m0_scales(compressed: SimpleNamespace) -> None:
    """0xFF is infinite there; it is NaN by the format."""
    found, expected = e8m0_to_float(ALL_CODES), compressed.mx.decompress_mx_scale(ALL_CODES)
    same_bytes(found[:0xFF], expected[:0xFF].float())
    assert found[0xFF].isnan()


def test_e2m1_bytes_of_a_published_checkpoint(compressed: SimpleNamespace) -> None:
    packed = ALL_CODES.view(16, 16)
    values = compressed.nvfp4.unpack_fp4_from_uint8(packed, 16, 32, torch.float32)
    same_bytes(elements.decode(elements.unpack(packed, 1), "E2M1"), values)
    same_bytes(elements.pack(elements.encode(values, "E2M1"), 1), compressed.nvfp4.pack_fp4_to_uint8(values))


@pytest.mark.parametrize("amax", [2688.0, 2.625, 2688 * 2.0**9])
def test_nvfp4_values_of_a_published_checkpoint(compressed: SimpleNamespace, amax: float) -> None:
    """Every pair of codes under every finite scale, in bfloat16 (it has no other), with an exact global scale."""
    codes, scales = codes_by_scales(ALL_CODES[:0x7F], 8)
    quantization = compressed.quantization
    weights = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )
    stored = {
        "weight_packed": codes,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([2688 / amax]),
    }
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    expected = compressed.nvfp4.NVFP4PackedCompressor.decompress(stored, scheme)["weight"]
    components = {"rowwise_data": codes, "rowwise_scale_inv": scales, "amax_rowwise": torch.tensor([[amax]])}
    tensor = BlockScaledTensor.from_components(Scheme("nvfp4", "E2M1"), components)
    same_bytes(tensor.dequantize(torch.bfloat16), expected)
