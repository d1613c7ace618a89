"""BlockScaledTensor on a destination's grid: exact, or requantized once; cuts, joins and holes against the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.quantized.numerics import Direction
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor, assemble, join
from tests import toyschemes
from tests.elementwise import (
    Elements,
    component_bytes,
    conform,
    elements_of,
    error_in_bound,
    float_bits,
    joined,
    same,
    scaled,
    windows,
)
from tests.shards import SCHEMES, make, quantized

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

each_scheme = pytest.mark.parametrize("name", SCHEMES)


def blocks_of(scheme: Scheme, direction: str) -> tuple[int | None, ...]:
    return next(d.scale.block for d in scheme.directions if d.name == direction)


def check_conform(source: BlockScaledTensor, target: Scheme, directions: Sequence[str] = (toyschemes.ROWWISE,)) -> int:
    """Compare with the model; returns the number of blocks that were quantized again."""
    result, count = source.conform(target)
    expected_count = 0
    for direction in directions:
        before = elements_of(source, direction)
        codes, scale, blocks = conform(before, source.scheme.element, target.element, blocks_of(target, direction))
        expected_count += blocks
        part = result.directions[direction]
        np.testing.assert_array_equal(part.codes.numpy(), codes)
        np.testing.assert_array_equal(float_bits(part.scale.values), scale)
    assert count == expected_count
    assert result.scheme == target
    assert result.origin == (0,) * source.dim()
    return count


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_conform_to_its_own_scheme_is_exact(name: str) -> None:
    tensor = make(name)
    assert check_conform(tensor, tensor.scheme, list(tensor.directions)) == 0


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_cut_and_joined_again_is_exact(name: str) -> None:
    tensor = make(name)
    again = torch.cat([torch.cat([part[:, :5], part[:, 5:]], dim=1) for part in tensor.split([1, 4, 3])])
    assert isinstance(again, BlockScaledTensor)
    conformed, count = again.conform(tensor.scheme)
    assert count == 0
    assert component_bytes(conformed) == component_bytes(tensor)


@pytest.mark.usefixtures("no_arithmetic")
def test_equal_scales_of_different_shards_merge_exactly() -> None:
    a, b = make("per_tensor", seed=1), make("per_tensor", seed=2)
    b.components()["rowwise_scale_inv"].copy_(a.components()["rowwise_scale_inv"])
    assert check_conform(join([a, b], 0), a.scheme) == 0


def test_scales_that_differ_in_the_last_bit_are_not_equal() -> None:
    a, b = quantized(seed=1), quantized(seed=2)
    scale = a.components()["rowwise_scale_inv"]
    b.components()["rowwise_scale_inv"].copy_(torch.nextafter(scale, torch.tensor(torch.inf)))
    assert check_conform(join([a, b], 0), a.scheme) == 1


@pytest.mark.parametrize("element", ["E4M3", "E5M2"])
@pytest.mark.parametrize("target", ["per_tensor", "toy_flat"])
def test_requantized_elements_stay_inside_the_bound(element: str, target: str) -> None:
    parts = [quantized("toy_block", seed=i) for i in range(3)]
    for i, part in enumerate(parts):
        part.components()["rowwise_scale_inv"].mul_(3.7**i)
    source = join(parts, 0)
    result, count = source.conform(Scheme(target, element))
    assert count > 0
    after = elements_of(result)
    old = elements_of(source).values("E4M3")
    assert error_in_bound(old, after.codes, after.scale.view(np.float32), element)


NOT_FINITE = [("E4M3", 0x7F), ("E4M3", 0xFF), ("E5M2", 0x7F), ("E5M2", 0xFF), ("E5M2", 0x7C), ("E5M2", 0xFC)]


@pytest.mark.parametrize(("element", "code"), NOT_FINITE)
@pytest.mark.parametrize("target", ["per_tensor", "toy_flat"])
def test_a_code_that_is_not_finite_costs_no_other_element_its_value(element: str, code: int, target: str) -> None:
    # Weights far below 1: with a scale of 1, which an amax of infinity or NaN gives, all of them would become 0.
    scheme = Scheme("per_tensor", element)
    parts = [BlockScaledTensor.quantize(torch.randn(8, 12) * size, scheme) for size in (1e-5, 3e-5)]
    parts[0].components()["rowwise_data"][1, 1] = code
    source = join(parts, 0)
    result, count = source.conform(Scheme(target, element))
    assert count > 0
    old, after = elements_of(source).values(element), elements_of(result)
    finite = np.isfinite(old)
    assert np.argwhere(~finite).tolist() == [[1, 1]]
    assert after.codes[1, 1] == code
    kept = np.where(finite, after.codes, 0).astype(np.uint8)
    assert error_in_bound(np.where(finite, old, np.float32(0)), kept, after.scale.view(np.float32), element)
    assert np.count_nonzero(kept & 0x7F) > 0.9 * kept.size


def test_an_infinity_saturates_where_the_element_format_has_none() -> None:
    tensor = BlockScaledTensor.quantize(torch.randn(8, 12), Scheme("per_tensor", "E5M2"))
    tensor.components()["rowwise_data"][0, 0] = 0x7C
    result, _ = tensor.conform(Scheme("per_tensor", "E4M3"))
    old, after = elements_of(tensor).values("E5M2"), elements_of(result)
    assert after.codes[0, 0] == 0x7E
    old[0, 0] = after.codes[0, 0] = 0
    assert error_in_bound(old, after.codes, after.scale.view(np.float32), "E4M3")


def test_an_amax_without_room_for_the_other_directions_values_is_not_kept() -> None:
    """A columnwise block that is cut gets rowwise values, and they may be larger than the columnwise amax allows."""
    scheme = Scheme("nvfp4", "E2M1")
    parts = BlockScaledTensor.quantize(torch.randn(48, 16), scheme).components()
    parts["amax_rowwise"].fill_(1.25)
    parts["amax_columnwise"].fill_(0.5)
    parts["rowwise_scale_inv"].fill_(0x7E)
    parts["columnwise_scale_inv"][:] = torch.tensor([[0x7E], [0x38], [0x30]], dtype=torch.uint8)
    cut = BlockScaledTensor.from_components(scheme, parts).narrow(0, 8, 32)
    assert isinstance(cut, BlockScaledTensor)
    found, blocks = cut.conform(scheme)
    assert blocks == found.components()["columnwise_scale_inv"].numel()
    assert found.components()["amax_columnwise"].item() == 1.25
    rowwise, columnwise = (found.only([name]).dequantize(torch.float32) for name in ("rowwise", "columnwise"))
    # Half a step of the largest E2M1 values, and the rounding of the E4M3 scale.
    assert float((rowwise - columnwise).abs().max()) <= 1.25 / 6 * (1 + 6 / 16)
    # On block edges nothing is quantized again, and each direction keeps its own.
    kept, blocks = BlockScaledTensor.from_components(scheme, parts).conform(scheme)
    assert (blocks, kept.components()["amax_columnwise"].item()) == (0, 0.5)


def test_another_element_format_quantizes_every_block() -> None:
    assert check_conform(quantized("toy_block"), Scheme("toy_block", "E5M2")) == 6


def test_conform_on_meta_counts_alike() -> None:
    source = join([quantized(seed=1), quantized(seed=2)], 0)
    meta = BlockScaledTensor(
        source.scheme, {n: Direction(d.codes.to("meta"), d.scale) for n, d in source.directions.items()}
    )
    for target in (Scheme("per_tensor", "E4M3"), Scheme("toy_block", "E4M3"), Scheme("toy_flat", "E5M2")):
        assert meta.conform(target)[1] == source.conform(target)[1]


sizes = st.integers(0, 9)


@st.composite
def patchwork(draw: st.DrawFn, schemes: Sequence[str] = ("per_tensor", "toy_block", "toy_flat")) -> BlockScaledTensor:
    """Whole shards of few different scales, cut somewhere and joined in another order: any grid may come of it."""
    name = draw(st.sampled_from(schemes))
    rows, columns = draw(sizes), draw(sizes)
    parts = []
    for seed in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        part = quantized(name, seed, (rows + seed, columns))
        scale = part.components()["rowwise_scale_inv"]
        scale.copy_((scale * 4).round().clamp(min=1) / 4)
        start = draw(st.integers(0, rows))
        parts.append(part[start : draw(st.integers(start, rows + seed))])
    if draw(st.booleans()):
        return scaled(torch.cat([p[:, :columns] for p in parts]))
    height = min(len(p) for p in parts)
    return scaled(torch.cat([p[:height] for p in parts], 1))


@given(source=patchwork(), target=st.sampled_from(["per_tensor", "toy_block", "toy_flat"]), recast=st.booleans())
def test_conform_agrees_with_the_model(source: BlockScaledTensor, target: str, recast: bool) -> None:
    check_conform(source, Scheme(target, "E5M2" if recast else "E4M3"))


@st.composite
def cut_points(draw: st.DrawFn, total: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, total), max_size=4)))


@given(data=st.data(), name=st.sampled_from(SCHEMES))
def test_any_cuts_and_joins_agree_with_the_model(data: st.DataObject, name: str) -> None:
    tensor = make(name, (data.draw(sizes), data.draw(sizes)), seed=data.draw(st.integers(0, 5)))
    models = {d: elements_of(tensor, d) for d in tensor.directions}
    for _ in range(data.draw(st.integers(1, 3))):
        axis = data.draw(st.integers(0, 1))
        cuts = [0, *data.draw(cut_points(tensor.shape[axis])), tensor.shape[axis]]
        order = data.draw(st.permutations(list(pairwise(cuts))))
        tensor = torch.cat([tensor.narrow(axis, a, b - a) for a, b in order], axis)  # type: ignore[assignment]
        windows_ = [(*[slice(None)] * axis, slice(a, b)) for a, b in order]
        models = {d: joined([m[w] for w in windows_], axis) for d, m in models.items()}
    assert isinstance(tensor, BlockScaledTensor)
    for direction, model in models.items():
        assert same(elements_of(tensor, direction), model)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], BlockScaledTensor]]]:
    """(shape, pieces): tensors that cover some regions of it."""
    shape = [draw(st.integers(0, 8)), draw(st.integers(0, 8))]
    cuts = [draw(cut_points(s)) for s in shape]
    name = draw(st.sampled_from(["per_tensor", "toy_block"]))
    pieces = []
    for i, window in enumerate(windows(shape, cuts)):
        extent = [w.stop - w.start for w in window]
        if math.prod(extent) and draw(st.booleans()):
            pieces.append(([w.start for w in window], quantized(name, i % 3, extent)))
    return shape, pieces


@given(drawn=scattered(), target=st.sampled_from(["per_tensor", "toy_block", "toy_flat"]))
def test_assembled_with_holes_agrees_with_the_model(
    drawn: tuple[list[int], list[tuple[list[int], BlockScaledTensor]]], target: str
) -> None:
    shape, pieces = drawn
    model = Elements(np.zeros(shape, np.uint8), np.zeros(shape, np.uint32), np.zeros(shape, np.bool_))
    for offset, piece in pieces:
        window = tuple(slice(o, o + s) for o, s in zip(offset, piece.shape, strict=True))
        part = elements_of(piece)
        model.codes[window], model.scale[window], model.known[window] = part.codes, part.scale, part.known
    scheme = pieces[0][1].scheme if pieces else Scheme("per_tensor", "E4M3")
    whole = assemble(shape, pieces, scheme, torch.bfloat16, torch.device("cpu"), [d.name for d in scheme.directions])
    assert same(elements_of(whole), model)
    check_conform(whole, Scheme(target, "E4M3"))
