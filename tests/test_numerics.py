"""quantized/numerics.py against an implementation of the formats that knows nothing of torch's float8 types."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fp8_dist.quantized import elements, numerics
from megatron_fp8_dist.quantized.grid import Grid
from megatron_fp8_dist.quantized.numerics import Direction
from megatron_fp8_dist.quantized.scales import invalid_scales, scale_from_amax
from megatron_fp8_dist.quantized.scheme import Scheme
from tests import float8
from tests.elementwise import raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from megatron_fp8_dist.quantized.scheme import Edges

    Conversion = Callable[[], list[torch.Tensor]]

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")

ELEMENTS = sorted(float8.FORMATS)
ALL_CODES = np.arange(256, dtype=np.uint8)

per_element_format = pytest.mark.parametrize("element", ELEMENTS)


def encode(values: NDArray[np.float32], element: str) -> NDArray[np.uint8]:
    return elements.encode(torch.from_numpy(values), element).numpy()


def edges_of(*sizes: int) -> Edges:
    """Edges of blocks of these sizes."""
    return np.cumsum([0, *sizes], dtype=np.int64)


@per_element_format
def test_every_code_has_the_value_of_its_definition(element: str) -> None:
    decoded = elements.decode(torch.from_numpy(ALL_CODES), element).numpy()
    expected = float8.FORMATS[element].table.astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(decoded), nan)
    # Bits, so that -0.0 is not 0.0.
    np.testing.assert_array_equal(decoded[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize(("element", "count"), [("E4M3", 254), ("E5M2", 248)])
def test_every_finite_code_round_trips(element: str, count: int) -> None:
    finite = ALL_CODES[np.isfinite(float8.FORMATS[element].table)]
    assert len(finite) == count
    assert 0x80 in finite
    decoded = elements.decode(torch.from_numpy(finite), element)
    np.testing.assert_array_equal(elements.encode(decoded, element).numpy(), finite)


@per_element_format
def test_nan_stays_nan(element: str) -> None:
    table = float8.FORMATS[element].table
    codes = ALL_CODES[np.isnan(table)]
    again = elements.encode(elements.decode(torch.from_numpy(codes), element), element).numpy()
    assert np.isnan(table[again]).all()


@per_element_format
@pytest.mark.parametrize("factor", [1.0, 1.01, 1.0625, 1.5, 1e6, np.inf])
def test_what_is_too_large_saturates(element: str, factor: float) -> None:
    form = float8.FORMATS[element]
    largest = np.float32(form.largest * factor)
    code = len(form.finite) - 1
    np.testing.assert_array_equal(encode(np.array([largest, -largest], np.float32), element), [code, code | 0x80])


@per_element_format
def test_ties_go_to_the_even_code(element: str) -> None:
    finite = float8.FORMATS[element].finite
    middles = np.array([(a + b) / 2 for a, b in pairwise(finite)], dtype=np.float32)
    nearest = np.arange(len(middles), dtype=np.uint8)
    even = nearest + nearest % 2
    np.testing.assert_array_equal(encode(middles, element), even)
    np.testing.assert_array_equal(encode(-middles, element), even | 0x80)
    np.testing.assert_array_equal(encode(np.nextafter(middles, np.float32(0)), element), nearest)
    np.testing.assert_array_equal(encode(np.nextafter(middles, np.float32(np.inf)), element), nearest + 1)


@per_element_format
@given(values=hnp.arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False)))
def test_rounding_is_to_nearest(element: str, values: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(encode(values, element), float8.FORMATS[element].encode(values))


UNUSABLE = [0.0, np.inf, np.nan]
# The smallest normal, subnormals, and the magnitudes next to where the quotient overflows.
TINY = [2.0**-126, 2.0**-127, 2.0**-149, 448 / float8.FLOAT32_MAX, 57344 / float8.FLOAT32_MAX]


@per_element_format
@pytest.mark.parametrize("amax", [*UNUSABLE, *TINY, 1.0, 3.0, 448.0, 57344.0, 1e30, float(float8.FLOAT32_MAX)])
def test_scale_rule(element: str, amax: float) -> None:
    expected = float8.scale_from_amax(np.float32(amax), element)
    scale = scale_from_amax(torch.tensor([amax], dtype=torch.float32), element)
    assert scale.numpy().view(np.uint32)[0] == expected.view(np.uint32)


@per_element_format
def test_scale_rule_names_its_special_cases(element: str) -> None:
    scale = scale_from_amax(torch.tensor([*UNUSABLE, 2.0**-149], dtype=torch.float32), element)
    assert scale.tolist() == [1.0, 1.0, 1.0, float(float8.FLOAT32_MAX)]


@per_element_format
@given(amax=st.floats(min_value=0, width=32, exclude_min=True, allow_infinity=False))
def test_scale_rule_at_random(element: str, amax: float) -> None:
    scale = scale_from_amax(torch.tensor(amax), element).numpy()
    assert scale.view(np.uint32) == float8.scale_from_amax(np.float32(amax), element).view(np.uint32)


@per_element_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_is_scale_then_round(element: str, dtype: torch.dtype) -> None:
    values = torch.randn(6, 5).to(dtype)
    scheme = Scheme("per_tensor", element)
    found = numerics.quantize(values, scheme.directions[0], scheme)
    wide = values.to(torch.float32).numpy()
    scale = float8.scale_from_amax(np.abs(wide).max(), element)
    np.testing.assert_array_equal(found.codes.numpy(), float8.FORMATS[element].encode(wide * scale))
    np.testing.assert_array_equal(raw(found.scale.values), raw(torch.tensor([[np.float32(1) / scale]])))


def test_quantize_takes_a_given_scale() -> None:
    values = torch.randn(256, 4)
    scheme = Scheme.of("blockwise_2d", "E4M3", power_of_two=0)
    found = numerics.quantize(values, scheme.directions[0], scheme, torch.tensor([[3.0], [0.1]]))
    scale = np.array([[3.0]] * 128 + [[0.1]] * 128, np.float32)
    np.testing.assert_array_equal(found.codes.numpy(), float8.FORMATS["E4M3"].encode(values.numpy() * scale))
    np.testing.assert_array_equal(raw(found.scale.values), raw(torch.tensor([[3.0], [0.1]]).reciprocal()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_scales_that_no_quantizer_writes(bad: float) -> None:
    assert invalid_scales(torch.tensor([[1.0, bad, 0.0]]), "float32").tolist() == [[False, True, False]]


def test_scales_of_another_dtype_are_a_mistake() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        invalid_scales(torch.ones(1, dtype=torch.bfloat16), "float32")


# Chunks


SCHEME = Scheme("per_tensor", "E4M3")


def blocky(rows: int, columns: int) -> Direction:
    """Codes and a grid of four by two blocks of different scale."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 0x78, (rows, columns), dtype=torch.uint8, generator=generator)
    edges = (edges_of(*[rows // 4] * 4), edges_of(*[columns // 2] * 2))
    return Direction(codes, Grid(torch.rand(4, 2, generator=generator) + 0.5, edges))


def dequantize(rows: int, columns: int) -> Conversion:
    source = blocky(rows, columns)
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    return lambda: [numerics.dequantize_into(out, source, SCHEME.directions[0], SCHEME)]


def requantize(rows: int, columns: int) -> Conversion:
    source, spec = blocky(rows, columns), SCHEME.directions[0]

    def run() -> list[torch.Tensor]:
        out, count = numerics.requantize(source, (source, spec, SCHEME), spec, SCHEME, (rows, columns))
        assert count == 1
        return flat(out)

    return run


def high_precision(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)


def quantize(rows: int, columns: int) -> Conversion:
    values = high_precision(rows, columns)
    return lambda: flat(numerics.quantize(values, SCHEME.directions[0], SCHEME))


def quantize_with_scale(rows: int, columns: int) -> Conversion:
    values = high_precision(rows, columns)
    return lambda: flat(numerics.quantize(values, SCHEME.directions[0], SCHEME, torch.full((1, 1), 100.0)))


def flat(quantized: Direction) -> list[torch.Tensor]:
    return [quantized.codes, quantized.scale.values]


CONVERSIONS = [dequantize, requantize, quantize, quantize_with_scale]
each_conversion = pytest.mark.parametrize("prepare", CONVERSIONS, ids=[c.__name__ for c in CONVERSIONS])


@pytest.mark.parametrize("size", [1, 400, 1000, 100_000])
@each_conversion
def test_chunking_changes_nothing(
    prepare: Callable[[int, int], Conversion], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(24, 10)()
    monkeypatch.setattr(numerics, "WORKING_SET_BYTES", size)
    for a, b in zip(whole, prepare(24, 10)(), strict=True):
        np.testing.assert_array_equal(raw(a), raw(b))


class Float32Meter(TorchDispatchMode):
    """Counts the bytes of float32 memory that is alive and was allocated under it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self.alive or not address:
            return
        self.alive[address] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, address, None)
        self.peak = max(self.peak, sum(self.alive.values()))


@each_conversion
def test_float32_working_set_is_bounded(
    prepare: Callable[[int, int], Conversion], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, rows, columns = 1 << 14, 512, 64
    assert limit < 4 * rows * columns
    monkeypatch.setattr(numerics, "WORKING_SET_BYTES", limit)
    convert = prepare(rows, columns)
    with Float32Meter() as meter:
        convert()
    scales = 1024  # the grids themselves
    assert 0 < meter.peak <= limit + scales


@pytest.mark.parametrize("shape", [(1, 1 << 15), (3, 1 << 14), (4, 2, 1 << 12)], ids=str)
def test_float32_working_set_is_bounded_whatever_the_shape(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 14
    monkeypatch.setattr(numerics, "WORKING_SET_BYTES", limit)
    spec = SCHEME.directions[0]
    codes = torch.randint(0, 0x78, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    halves = tuple(edges_of(s) for s in shape[:-1]), edges_of(*[shape[-1] // 2] * 2)
    scales = torch.tensor([0.5, 0.75]).reshape([1] * (len(shape) - 1) + [2])
    source = Direction(codes, Grid(scales, (*halves[0], halves[1])))
    values, out = torch.empty(shape, dtype=torch.bfloat16), []
    with Float32Meter() as meter:
        numerics.dequantize_into(values, source, spec, SCHEME)
        out += [numerics.requantize(source, (source, spec, SCHEME), spec, SCHEME, shape)[0]]
        out += [numerics.quantize(values, spec, SCHEME)]
    assert 0 < meter.peak <= limit + 1024
    monkeypatch.undo()
    whole = numerics.requantize(source, (source, spec, SCHEME), spec, SCHEME, shape)[0]
    assert torch.equal(out[0].codes, whole.codes)
    assert torch.equal(out[1].codes, numerics.quantize(values, spec, SCHEME).codes)
