"""Every scheme's numerics, byte for byte, against rules that know nothing of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist import BlockScaledTensor, Scheme
from megatron_fp8_dist.quantized import elements
from megatron_fp8_dist.quantized.scales import e8m0_to_float, float_to_e8m0, invalid_scales
from tests import formats
from tests.elementwise import raw

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SCHEMES = ["blockwise_2d", "blockwise_1d", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_2d"]
SCHEMES = [
    *(
        Scheme.of(name, element, power_of_two=power)
        for name in BLOCK_SCHEMES[:2]
        for element in ("E4M3", "E5M2")
        for power in (1, 0)
    ),
    *(Scheme(name, element) for name in BLOCK_SCHEMES[2:4] for element in ("E4M3", "E5M2")),
    *(Scheme(name, "E2M1") for name in BLOCK_SCHEMES[4:]),
    Scheme.of("nvfp4", "E2M1", e4m3_max=256),
]


def scheme_id(value: Any) -> str:
    return "-".join([value.name, value.element, *(f"{k}={v}" for k, v in value.flags)])


each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)


def rule_of(scheme: Scheme, dtype: torch.dtype) -> formats.Rule:
    return formats.rule(
        scheme.name,
        scheme.element,
        power_of_two=bool(scheme.flag("power_of_two")),
        limit=torch.finfo(dtype).max,
        e4m3_max=scheme.flag("e4m3_max") or 448,
    )


def check(values: torch.Tensor, scheme: Scheme) -> None:
    """The package and the reference agree on every component and on every dequantized value."""
    how = rule_of(scheme, values.dtype)
    tensor = BlockScaledTensor.quantize(values, scheme)
    expected = formats.quantize(values.float().numpy(), how)
    found = tensor.components()
    assert found.keys() == expected.keys()
    for name, component in expected.items():
        assert tuple(found[name].shape) == component.shape, name
        np.testing.assert_array_equal(raw(found[name]).reshape(-1), component.reshape(-1).view(np.uint8), err_msg=name)
    for direction in tensor.directions:
        alone = BlockScaledTensor(scheme, {direction: tensor.directions[direction]}, tensor.dtype)
        old = formats.dequantize(expected, how, direction)
        for dtype in (torch.float32, torch.bfloat16):
            # Every NaN is as good as another.
            found_values, old_values = (
                raw(v.nan_to_num(nan=-12345.0)) for v in (alone.dequantize(dtype), torch.from_numpy(old).to(dtype))
            )
            np.testing.assert_array_equal(found_values, old_values)


def random_values(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Values over many binades, so that every part of the formats is met, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 6, shape, generator=generator))
    values[torch.rand(shape, generator=generator) < 0.05] = 0.0
    values[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return values


SHAPES = [(64, 96), (130, 258), (1, 2)]


@each_scheme
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_values(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if shape[0] % 2 and scheme.name == "nvfp4":
        shape = (2, shape[1])  # its columnwise codes are packed along rows
    check(random_values(shape).to(dtype), scheme)


@each_scheme
def test_odd_shapes(scheme: Scheme) -> None:
    shape = (45, 51)
    if scheme.element == "E2M1":
        with pytest.raises(ValueError, match=r"odd: packed E2M1 codes"):
            BlockScaledTensor.quantize(random_values(shape), scheme)
        shape = (45, 50) if scheme.name == "nvfp4_2d" else (46, 50)
    check(random_values(shape), scheme)


@each_scheme
def test_zero_blocks(scheme: Scheme) -> None:
    check(torch.zeros(130, 132), scheme)
    values = random_values((130, 132))
    values[:64, :64] = 0
    values[1, :] = -0.0
    check(values, scheme)


MAGNITUDES = [2.0**-149, 3 * 2.0**-149, 2.0**-140, 2.0**-127, 1.5 * 2.0**-127, 2.0**-126, 2.0**-120, 1e-30, 1e30, 3e38]


@each_scheme
@pytest.mark.parametrize("magnitude", MAGNITUDES, ids=str)
def test_amax_at_the_edges_of_float32(scheme: Scheme, magnitude: float) -> None:
    values = random_values((34, 36))
    check(values / values.abs().max() * magnitude, scheme)
    if scheme.element != "E2M1":
        # One block that is far below the others.
        values[:1] *= magnitude
        check(values, scheme)


@each_scheme
@pytest.mark.parametrize("exponent", [-120, -3, 0, 8, 100])
def test_amax_around_a_power_of_two(scheme: Scheme, exponent: int) -> None:
    # A block's amax just below, at and just above where its scale changes.
    edge = np.float32(formats.largest(scheme.element)) * np.float32(2.0**exponent)
    steps = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
    for step in steps:
        values = torch.zeros(2, 32)
        values[0, 3], values[1, 20], values[0, 5] = float(step), -float(step) / 3, float(step) / 7
        check(values, scheme)


@each_scheme
def test_infinities(scheme: Scheme) -> None:
    values = random_values((66, 68))
    values[5, 7], values[40, 40] = float("inf"), -float("inf")
    check(values, scheme)


@given(data=st.data(), scheme=st.sampled_from(SCHEMES))
def test_any_values(data: st.DataObject, scheme: Scheme) -> None:
    rows, columns = (2 * data.draw(st.integers(1, 9)) for _ in range(2))
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = data.draw(st.lists(floats, min_size=4, max_size=8))
    tensor = torch.tensor(values, dtype=torch.float32).repeat(rows * columns)[: rows * columns]
    check(tensor.reshape(rows, columns), scheme)


# Element formats


ALL_E2M1 = np.arange(16, dtype=np.uint8)


def float_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)


def test_e2m1_codes() -> None:
    decoded = elements.decode(torch.from_numpy(ALL_E2M1), "E2M1").numpy()
    np.testing.assert_array_equal(float_bits(decoded), float_bits(formats.E2M1_VALUES))
    np.testing.assert_array_equal(elements.encode(torch.from_numpy(decoded), "E2M1").numpy(), ALL_E2M1)


def test_e2m1_rounding() -> None:
    exact = np.array(formats.E2M1_MAGNITUDES, np.float32)
    middles = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate(
        [
            exact,
            middles,
            np.nextafter(middles, np.float32(0)),
            np.nextafter(middles, np.float32(7)),
            [5.5, 6, 7, 1e30, np.inf],
        ]
    ).astype(np.float32)
    values = np.concatenate([values, -values])
    found = elements.encode(torch.from_numpy(values), "E2M1").numpy()
    np.testing.assert_array_equal(found, formats.encode(values, "E2M1"))
    ties = elements.encode(torch.from_numpy(middles), "E2M1").numpy()
    np.testing.assert_array_equal(ties, [0, 2, 2, 4, 4, 6, 6])


@pytest.mark.parametrize("axis", [0, 1])
def test_e2m1_packing(axis: int) -> None:
    pairs = np.stack(np.meshgrid(ALL_E2M1, ALL_E2M1, indexing="ij"), axis=-1).reshape(16, 32)
    packed = elements.pack(torch.from_numpy(pairs), axis)
    np.testing.assert_array_equal(packed.numpy(), formats.pack(pairs, axis))
    np.testing.assert_array_equal(elements.unpack(packed, axis).numpy(), pairs)
    first = (0, 0), ((1, 0) if axis == 0 else (0, 1))
    assert packed[0, 0] == pairs[first[0]] | pairs[first[1]] << 4
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(16, 16)
    np.testing.assert_array_equal(elements.unpack(bytes_, axis).numpy(), formats.unpack(bytes_.numpy(), axis))
    assert torch.equal(elements.pack(elements.unpack(bytes_, axis), axis), bytes_)


def test_e8m0_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = e8m0_to_float(torch.from_numpy(codes)).numpy()
    expected = np.array([formats.e8m0_value(int(c)) for c in codes])
    np.testing.assert_array_equal(np.isnan(found), codes == 0xFF)
    np.testing.assert_array_equal(float_bits(found[:255]), float_bits(expected[:255]))
    assert float(found[0]) == 2.0**-127
    assert float(found[0xFE]) == 2.0**127
    back = float_to_e8m0(torch.from_numpy(found)).numpy()
    np.testing.assert_array_equal(back, codes)


def test_e8m0_rounds_up() -> None:
    powers = np.array([formats.e8m0_value(c) for c in range(255)])
    values = np.concatenate(
        [
            powers,
            np.nextafter(powers, np.float32(0)),
            np.nextafter(powers, np.float32(np.inf)),
            np.array([0, np.inf, np.nan, formats.FLOAT32_MAX, 2.0**-149], np.float32),
        ]
    )
    found = float_to_e8m0(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(found, [formats.e8m0_round_up(v) for v in values])


def test_e8m0_ends_in_a_tensor() -> None:
    codes = torch.full((1, 96), 0x38, dtype=torch.uint8)
    components = {"rowwise_data": codes, "rowwise_scale_inv": torch.tensor([[0x00, 0xFE, 0xFF]], dtype=torch.uint8)}
    tensor = BlockScaledTensor.from_components(Scheme("mxfp8", "E4M3"), components)
    values = tensor.dequantize(torch.float32)[0, ::32].tolist()
    assert values[:2] == [2.0**-127, 2.0**127]
    assert values[2] != values[2]  # NaN
    assert invalid_scales(components["rowwise_scale_inv"], "E8M0").tolist() == [[False, False, True]]


def test_invalid_e4m3_scales() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = formats.decode(codes.numpy(), "E4M3")
    bad = ~np.isfinite(finite) | np.signbit(finite)
    np.testing.assert_array_equal(invalid_scales(codes, "E4M3").numpy(), bad)


def test_scales_chosen_by_the_same_rule_are_kept_whatever_they_are() -> None:
    # A TE tensor without its quantizer does not say whether its scales are powers of two.
    rule = Scheme("blockwise_2d", "E4M3")
    components = {
        "rowwise_data": torch.arange(256, dtype=torch.uint8).view(128, 2),
        "rowwise_scale_inv": torch.tensor([[0.3]]),
    }
    tensor = BlockScaledTensor.from_components(rule, components)
    kept, count = tensor.conform(rule)
    assert count == 0
    assert torch.equal(kept.components()["rowwise_scale_inv"], components["rowwise_scale_inv"])
    plain = BlockScaledTensor.from_components(Scheme.of("blockwise_2d", "E4M3", power_of_two=0), components)
    assert plain.conform(rule)[1] == 1
