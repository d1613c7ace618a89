"""BlockScaledTensor: bytes through every exact operation; every other operation on values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from tests.elementwise import component_bytes, elements_of, joined, raw, same, scaled
from tests.shards import OTHER, SCHEMES, SHAPE, make, pointers, quantized

if TYPE_CHECKING:
    from collections.abc import Mapping

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

each_scheme = pytest.mark.parametrize("name", SCHEMES)
Operation = Callable[[torch.Tensor], Any]

CUTS: dict[str, Operation] = {
    "narrow rows": lambda t: t.narrow(0, 1, 6),
    "narrow columns": lambda t: t.narrow(1, 3, 5),
    "narrow to nothing": lambda t: t.narrow(0, 4, 0),
    "narrow a negative axis": lambda t: t.narrow(-1, 2, 4),
    "narrow twice": lambda t: t.narrow(0, 3, 5).narrow(0, 2, 3),
    "slice": lambda t: t[2:7],
    "slice both axes": lambda t: t[2:7, 3:],
    "slice from the end": lambda t: t[-3:],
    "slice past the end": lambda t: t[6:100],
    "every second row": lambda t: t[::2],
    "every third row of some": lambda t: t[1:7:3],
    "every fifth column": lambda t: t[:, 2::5],
    "step past the end": lambda t: t[3::100],
    "step through nothing": lambda t: t[5:2:2],
    "steps of steps": lambda t: t[1::2][::2],
    "select": lambda t: t[3],
    "select from the end": lambda t: t.select(0, -2),
    "select a column": lambda t: t[:, 5],
    "select an element": lambda t: t[3, 5],
    "unbind": torch.Tensor.unbind,
    "unbind columns": lambda t: t.unbind(-1),
    "chunk": lambda t: t.chunk(2),
    "chunk unevenly": lambda t: t.chunk(3, dim=0),
    "chunk columns": lambda t: torch.chunk(t, 5, dim=1),
    "split": lambda t: t.split(3),
    "split sizes": lambda t: t.split([1, 5, 2]),
    "split columns": lambda t: torch.split(t, [5, 0, 7], dim=-1),
    "split_with_sizes": lambda t: torch.split_with_sizes(t, [3, 5]),
    "cat of cuts": lambda t: torch.cat([t[5:], t[:5]]),
    "cat of column cuts": lambda t: torch.cat([t[:, 7:], t[:, :7]], dim=1),
    "cat on a negative axis": lambda t: torch.cat([t, t], dim=-1),
    "cat of one": lambda t: torch.cat([t]),
}
COPIES: dict[str, Operation] = {
    "detach": torch.Tensor.detach,
    "data": lambda t: t.data,
    "view_as": lambda t: t.view_as(t),
    "clone": torch.Tensor.clone,
    "deepcopy": copy.deepcopy,
    "contiguous": torch.Tensor.contiguous,
    "to the same": lambda t: t.to("cpu", t.dtype),
    "to a copy": lambda t: t.to("cpu", copy=True),
    "cpu": torch.Tensor.cpu,
    "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}
VIEWS: dict[str, Operation] = {
    "unsqueeze": lambda t: t.unsqueeze(0),
    "unsqueeze in the middle": lambda t: t.unsqueeze(1),
    "unsqueeze the last": lambda t: t.unsqueeze(-1),
    "squeeze": lambda t: t[3:4].squeeze(0),
    "squeeze what is no unit": lambda t: t.squeeze(0),
    "squeeze all": lambda t: t.unsqueeze(0).squeeze(),
    "squeeze axes": lambda t: t.view(1, 8, 1, 12).squeeze((0, 2)),
    "view": lambda t: t.view(1, 8, 1, 12),
    "reshape": lambda t: t.reshape(8, 12, 1),
    "view with -1": lambda t: t.view(1, -1, 12),
    "view of a cut": lambda t: t[:, 2:9].view(1, 8, 7),
}
EXACT = CUTS | COPIES | VIEWS


def parts_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def plain_parts(operation: Operation, array: Any) -> list[Any]:
    return [part.numpy() for part in parts_of(operation(torch.from_numpy(array)))]


@each_scheme
@pytest.mark.parametrize("operation", EXACT.values(), ids=EXACT.keys())
@pytest.mark.usefixtures("no_arithmetic")
def test_bytes_through_exact_operations(name: str, operation: Operation) -> None:
    tensor = make(name)
    results = parts_of(operation(tensor))
    for direction in tensor.directions:
        before = elements_of(tensor, direction)
        codes = plain_parts(operation, before.codes)
        scales = plain_parts(operation, before.scale.view(np.int32))
        for result, code, scale in zip(results, codes, scales, strict=True):
            assert isinstance(result, BlockScaledTensor)
            assert result.shape == code.shape
            assert (result.dtype, result.scheme) == (tensor.dtype, tensor.scheme)
            after = elements_of(result, direction)
            np.testing.assert_array_equal(after.codes, code)
            np.testing.assert_array_equal(after.scale.view(np.int32), scale)


@pytest.mark.parametrize("operation", EXACT.values(), ids=EXACT.keys())
@pytest.mark.usefixtures("no_arithmetic")
def test_bytes_through_exact_operations_in_inference_mode(operation: Operation) -> None:
    # Composite operations (narrow, chunk, to) reach a tensor class whole in this mode.
    expected = [component_bytes(part) for part in parts_of(operation(make("toy_pair")))]
    tensor = make("toy_pair")
    with torch.inference_mode():
        found = [parts_of(operation(t)) for t in (tensor, make("toy_pair"))]
    for parts in found:
        assert [component_bytes(scaled(part)) for part in parts] == expected


@pytest.mark.parametrize("shape", [(-1,), (96,), (2, 48), (2, 4, 12), (8, 3, 4)])
@pytest.mark.usefixtures("no_arithmetic")
def test_one_scale_survives_any_view(shape: tuple[int, ...]) -> None:
    tensor = make("per_tensor")
    view = tensor.view(shape)
    assert isinstance(view, BlockScaledTensor)
    codes = tensor.components()["rowwise_data"].view(shape)
    np.testing.assert_array_equal(view.components()["rowwise_data"].numpy(), codes.numpy())
    np.testing.assert_array_equal(elements_of(view).scale, elements_of(tensor).scale.reshape(codes.shape))


FLATTEN: dict[str, Operation] = {
    "reshape": lambda t: t[:, :5].reshape(-1),
    "flatten": lambda t: t[:, :5].flatten(),
    "contiguous, view": lambda t: t[:, :5].contiguous().view(-1),
    "clone, view": lambda t: t[:, :5].clone().view(-1),
}


@pytest.mark.parametrize("operation", FLATTEN.values(), ids=FLATTEN.keys())
@pytest.mark.usefixtures("no_arithmetic")
def test_a_column_cut_flattens_like_any_tensor(operation: Operation) -> None:
    tensor = make("per_tensor")
    flat = operation(tensor)
    assert isinstance(flat, BlockScaledTensor)
    codes = tensor.components()["rowwise_data"]
    np.testing.assert_array_equal(flat.components()["rowwise_data"].numpy(), operation(codes).numpy())


@each_scheme
def test_a_view_that_breaks_blocks_is_plain(name: str) -> None:
    tensor = make(name)
    view = tensor.view(12, 8)
    assert isinstance(view, BlockScaledTensor) == (name == "per_tensor")
    np.testing.assert_array_equal(raw(plain(view)), raw(tensor.dequantize().view(12, 8)))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, BlockScaledTensor) else tensor


@pytest.mark.parametrize("alias", ["detach", "data", "view_as", "Parameter"])
def test_aliases_share_their_bytes(alias: str) -> None:
    tensor = make("toy_block")
    assert pointers(EXACT[alias](tensor)) == pointers(tensor)


@pytest.mark.parametrize("copied", ["clone", "deepcopy", "to a copy"])
def test_copies_do_not(copied: str) -> None:
    tensor = make("toy_block")
    assert not set(pointers(EXACT[copied](tensor)).values()) & set(pointers(tensor).values())


ORIGINS: dict[str, tuple[Callable[[BlockScaledTensor], Any], tuple[int, ...]]] = {
    "whole": (lambda t: t, (0, 0)),
    "narrow": (lambda t: t.narrow(0, 3, 2), (3, 0)),
    "narrow twice": (lambda t: t.narrow(0, 3, 5).narrow(1, 2, 4).narrow(0, 1, 2), (4, 2)),
    "second chunk": (lambda t: t.chunk(2)[1], (4, 0)),
    "last split": (lambda t: t.split([1, 5, 2])[2], (6, 0)),
    "column chunk": (lambda t: t.chunk(3, dim=1)[2], (0, 8)),
    "select": (lambda t: t[3:, 2:][4], (2,)),
    "select a column": (lambda t: t[3:, 2:][:, 4], (3,)),
    "unsqueeze": (lambda t: t[5:].unsqueeze(0), (0, 5, 0)),
    "view": (lambda t: t[5:, 4:].view(3, 1, 8, 1), (5, 0, 4, 0)),
    "squeeze": (lambda t: t[2:, 4:].unsqueeze(1).squeeze(1), (2, 4)),
    "clone": (lambda t: t[2:].clone(), (2, 0)),
    "detach": (lambda t: t[2:].detach(), (2, 0)),
    "deepcopy": (lambda t: copy.deepcopy(t[2:]), (2, 0)),
    "cat": (lambda t: torch.cat([t[2:4], t[4:]]), (2, 0)),
}


@pytest.mark.parametrize(("cut", "origin"), ORIGINS.values(), ids=ORIGINS.keys())
def test_origin_is_where_the_cut_begins(
    cut: Callable[[BlockScaledTensor], BlockScaledTensor], origin: tuple[int, ...]
) -> None:
    assert cut(make("toy_block")).origin == origin


@pytest.mark.usefixtures("no_arithmetic")
def test_cat_keeps_both_scales() -> None:
    a, b = make("per_tensor", seed=1), make("per_tensor", (3, 12), seed=2)
    whole = torch.cat([a, b])
    assert isinstance(whole, BlockScaledTensor)
    assert same(elements_of(whole), joined([elements_of(a), elements_of(b)], 0))
    assert whole.components()["rowwise_scale_inv"].numel() == 2


def test_cat_of_two_element_formats_is_plain() -> None:
    a, b = make("per_tensor"), make("per_tensor", element="E5M2")
    whole = torch.cat([a, b])
    assert not isinstance(whole, BlockScaledTensor)
    np.testing.assert_array_equal(raw(whole), raw(torch.cat([a.dequantize(), b.dequantize()])))


def test_cat_with_a_plain_tensor_is_plain() -> None:
    a, b = make("per_tensor"), torch.ones(2, 12, dtype=torch.bfloat16)
    np.testing.assert_array_equal(raw(torch.cat([a, b])), raw(torch.cat([a.dequantize(), b])))


MISTAKES: dict[str, Operation] = {
    "select past the end": lambda t: torch.select(t, 0, 8),
    "select before the start": lambda t: torch.select(t, 0, -9),
    "select of nothing": lambda t: torch.select(t[:0], 0, 0),
    "index past the end": lambda t: t[8],
    "narrow past the end": lambda t: t.narrow(0, 5, 4),
    "no such axis": lambda t: t.narrow(2, 0, 1),
    "no such axis to chunk": lambda t: t.chunk(2, dim=2),
    "no such axis to unsqueeze": lambda t: t.unsqueeze(4),
    "no such axis to squeeze": lambda t: t.squeeze(2),
    "no such axis to unbind": lambda t: t.unbind(2),
    "sizes that are too small": lambda t: t.split([3, 4]),
    "sizes that are too large": lambda t: t.split([3, 6]),
    "a size below zero": lambda t: t.split([-1, 9]),
    "split of size 0": lambda t: t.split(0),
    "view of another size": lambda t: t.view(7, 12),
    "cat of other widths": lambda t: torch.cat([t, t[:, :3]]),
    "no such axis to cat": lambda t: torch.cat([t, t], 2),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_errors_as_on_any_tensor(mistake: Operation) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        mistake(torch.zeros(SHAPE))
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        mistake(make("per_tensor"))


# Everything else

PLAIN: dict[str, Operation] = {
    "add": lambda t: t + 1,
    "multiply": lambda t: 2 * t,
    "negative": lambda t: -t,
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "matmul": lambda t: t @ torch.ones(12, 3, dtype=torch.bfloat16),
    "sum": lambda t: t.sum(),
    "mask": lambda t: t[torch.tensor([True] * 3 + [False] * 5)],
    "stack": lambda t: torch.stack([t, t]),
    "expand": lambda t: t.expand(2, 8, 12),
    "abs max": lambda t: t.abs().amax(),
    "repeat": lambda t: t.repeat(2, 1),
}


@pytest.mark.parametrize("scheme", ["per_tensor", "toy_block"])
@pytest.mark.parametrize("operation", PLAIN.values(), ids=PLAIN.keys())
def test_everything_else_works_on_values(scheme: str, operation: Operation) -> None:
    tensor = quantized(scheme)
    result, expected = operation(tensor), operation(tensor.dequantize())
    assert type(result) is torch.Tensor
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(raw(result), raw(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_dequantize_is_code_times_scale_in_float32(dtype: torch.dtype) -> None:
    tensor = quantized("toy_flat")
    expected = torch.from_numpy(elements_of(tensor).values("E4M3")).to(dtype)
    np.testing.assert_array_equal(raw(tensor.dequantize(dtype)), raw(expected))


def test_an_element_has_its_value() -> None:
    tensor = quantized("toy_block")
    found = [[tensor[row, column].item() for column in range(SHAPE[1])] for row in range(SHAPE[0])]
    assert found == tensor.dequantize().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_another_dtype_is_dequantized_without_a_detour(dtype: torch.dtype) -> None:
    tensor = quantized()
    converted = tensor.to(dtype)
    assert type(converted) is torch.Tensor
    np.testing.assert_array_equal(raw(converted), raw(tensor.dequantize(dtype)))


@pytest.mark.parametrize("scheme", ["per_tensor", "toy_block"])
def test_linear_forward_and_backward(scheme: str) -> None:
    weight = torch.nn.Parameter(quantized(scheme))
    dense = torch.nn.Parameter(quantized(scheme).dequantize())
    results = []
    for w in (weight, dense):
        x = torch.linspace(-1, 1, 36, dtype=torch.bfloat16).reshape(3, 12).requires_grad_()
        y = torch.nn.functional.linear(x, w)
        (y * y).sum().backward()
        assert w.grad is not None
        results.append([y, x.grad, w.grad])
    for ours, reference in zip(*results, strict=True):
        assert type(ours) is torch.Tensor
        np.testing.assert_array_equal(raw(ours), raw(reference))


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_step_is_quantized_in_place(foreach: bool) -> None:
    weight = torch.nn.Parameter(quantized())
    before, values = pointers(weight), quantized().dequantize()
    weight.grad = OTHER.clone()
    torch.optim.SGD([weight], lr=0.5, foreach=foreach).step()
    expected = BlockScaledTensor.quantize(values.add(OTHER, alpha=-0.5), scaled(weight).scheme)
    assert component_bytes(weight) == component_bytes(expected)
    assert pointers(weight) == before


def test_repr_is_one_line_of_facts() -> None:
    assert repr(make("per_tensor")) == (
        "BlockScaledTensor(shape=(8, 12), scheme=per_tensor/E4M3, dtype=torch.bfloat16, device=cpu)"
    )


# Construction


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_components_round_trip(name: str) -> None:
    tensor = make(name)
    again = BlockScaledTensor.from_components(tensor.scheme, tensor.components(), dtype=torch.float16)
    assert pointers(again) == pointers(tensor)
    assert (again.dtype, again.shape, again.origin) == (torch.float16, SHAPE, (0, 0))


def replaced(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {**make("toy_block").components(), name: value}


MALFORMED: dict[str, tuple[Callable[[], Mapping[str, torch.Tensor]], str]] = {
    "no codes": (lambda: {"rowwise_scale_inv": torch.ones(2, 3)}, "rowwise_data is missing"),
    "no scales": (lambda: {"rowwise_data": torch.zeros(SHAPE, dtype=torch.uint8)}, "rowwise_scale_inv is missing"),
    "codes of another dtype": (lambda: replaced("rowwise_data", torch.zeros(SHAPE)), "uint8, found torch.float32"),
    "scales of another dtype": (lambda: replaced("rowwise_scale_inv", torch.ones(2, 3).half()), "found torch.float16"),
    "scales of another shape": (
        lambda: replaced("rowwise_scale_inv", torch.ones(3, 2)),
        r"found torch.float32 \(3, 2\)",
    ),
}


@pytest.mark.parametrize(("components", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_components(components: Callable[[], Mapping[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockScaledTensor.from_components(Scheme("toy_block", "E4M3"), components())


def test_quantize_keeps_the_dtype_as_nominal() -> None:
    scheme = Scheme("per_tensor", "E4M3")
    found = {d: BlockScaledTensor.quantize(torch.ones(2, 2, dtype=d), scheme).dtype for d in NOMINAL}
    assert found == NOMINAL


NOMINAL = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, torch.float32: torch.bfloat16}
