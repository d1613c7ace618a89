"""BlockScaledTensor: bytes through every exact operation, one requantization where a grid asks for it."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.quantized import numerics
from megatron_fp8_dist.quantized.grid import Grid
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor, Direction, assemble, join
from tests import toyschemes
from tests.elementwise import (
    Elements,
    component_bytes,
    conform,
    elements_of,
    error_in_bound,
    float_bits,
    joined,
    raw,
    same,
    scaled,
    windows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

SHAPE = (8, 12)
SCHEMES = ["per_tensor", *sorted(toyschemes.ROWS)]

each_scheme = pytest.mark.parametrize("name", SCHEMES)


def make(name: str, shape: Sequence[int] = SHAPE, element: str = "E4M3", seed: int = 0) -> BlockScaledTensor:
    """A whole quantized shard with random bytes, NaN codes too, and a scale of its own for each block."""
    generator = torch.Generator().manual_seed(seed)
    scheme = Scheme(name, element)
    directions = {}
    for spec in scheme.directions:
        codes = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)
        edges = numerics.destination_edges(scheme, spec, tuple(shape))
        scales = torch.rand([len(e) - 1 for e in edges], generator=generator) + 0.5
        directions[spec.data] = Direction(codes, Grid(scales, edges))
    return BlockScaledTensor(scheme, directions)


def pointers(tensor: torch.Tensor) -> dict[str, int]:
    return {name: component.data_ptr() for name, component in scaled(tensor).components().items()}


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


# A module's life


def module_with(tensor: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=torch.bfloat16)
    module.weight = torch.nn.Parameter(tensor)
    return module


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_parameter_and_state_dict(name: str) -> None:
    tensor = make(name)
    module = module_with(tensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.requires_grad
    assert pointers(module.state_dict()["weight"]) == pointers(tensor)


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_load_state_dict_writes_bytes_in_place(name: str) -> None:
    source, destination = make(name, seed=1), make(name, seed=2)
    module = module_with(destination)
    before = pointers(destination)
    module.load_state_dict({"weight": source})
    assert component_bytes(module.weight) == component_bytes(source)
    assert pointers(module.weight) == before


MOVES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "to dtype": lambda m: m.to(torch.bfloat16),
    "bfloat16": lambda m: m.bfloat16(),
    "to device": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "a new tensor": lambda m: m._apply(torch.clone),
}


@each_scheme
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.usefixtures("no_arithmetic")
def test_module_moves_keep_bytes(name: str, move: Callable[[torch.nn.Module], Any]) -> None:
    tensor = make(name)
    before = component_bytes(tensor)
    module = module_with(tensor)
    move(module)
    assert isinstance(module.weight, BlockScaledTensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert component_bytes(module.weight) == before


@pytest.mark.usefixtures("no_arithmetic")
def test_module_to_meta_moves_codes_and_scales() -> None:
    module = module_with(make("toy_block")).to("meta")
    assert module.weight.device.type == "meta"
    assert {c.device.type for c in scaled(module.weight).components().values()} == {"meta"}


@pytest.mark.usefixtures("no_arithmetic")
def test_deepcopy_of_a_module() -> None:
    tensor = make("toy_block")
    again = copy.deepcopy(module_with(tensor))
    assert isinstance(again.weight, torch.nn.Parameter)
    assert component_bytes(again.weight) == component_bytes(tensor)


@pytest.mark.usefixtures("no_arithmetic")
def test_assigning_data_takes_over_its_bytes() -> None:
    # What Module.to does where it moves a parameter to another device.
    parameter, other = torch.nn.Parameter(make("toy_block", seed=1)), make("toy_block", seed=2)
    parameter.data = other
    assert pointers(parameter) == pointers(other)


def test_assigning_plain_data_quantizes_it() -> None:
    parameter = torch.nn.Parameter(BlockScaledTensor.quantize(torch.randn(4, 6), Scheme("per_tensor", "E4M3")))
    values = torch.randn(4, 6, dtype=torch.bfloat16)
    parameter.data = values
    assert component_bytes(parameter) == component_bytes(BlockScaledTensor.quantize(values, scaled(parameter).scheme))


@each_scheme
@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.usefixtures("no_arithmetic")
def test_pickle_keeps_bytes(name: str, parameter: bool) -> None:
    tensor = scaled(make(name)[2:])
    if parameter:
        tensor = scaled(torch.nn.Parameter(tensor))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(tensor))):
        assert type(again) is BlockScaledTensor
        assert isinstance(again, torch.nn.Parameter) == parameter
        assert component_bytes(again) == component_bytes(tensor)
        assert (again.scheme, again.dtype, again.origin) == (tensor.scheme, tensor.dtype, tensor.origin)


# Writing


def quantized(scheme: str = "per_tensor", seed: int = 0, shape: Sequence[int] = SHAPE) -> BlockScaledTensor:
    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return BlockScaledTensor.quantize(values.to(torch.bfloat16), Scheme(scheme, "E4M3"))


OTHER = torch.linspace(-3, 5, 96, dtype=torch.bfloat16).reshape(SHAPE)

WRITES: dict[str, Operation] = {
    "copy_": lambda t: t.copy_(OTHER),
    "copy_ of float32": lambda t: t.copy_(OTHER.float() * 1.001),
    "copy_ of a row": lambda t: t.copy_(OTHER[0]),
    "add_": lambda t: t.add_(OTHER),
    "add_ with alpha": lambda t: t.add_(OTHER, alpha=-0.1),
    "add_ of itself": lambda t: t.add_(t),
    "mul_": lambda t: t.mul_(2.5),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "addcmul_": lambda t: t.addcmul_(OTHER, OTHER, value=0.5),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "setting all": lambda t: t.__setitem__(slice(None), OTHER),
    "iadd": lambda t: t.__iadd__(OTHER),
    "out=": lambda t: torch.add(OTHER, 1, out=t),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "foreach of two": lambda t: torch._foreach_mul_([t], [OTHER]),
}


@pytest.mark.parametrize("scheme", ["per_tensor", "toy_block", "toy_pair"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_in_place_writes_quantize_in_place(scheme: str, write: Operation) -> None:
    tensor = quantized(scheme)
    values, before = tensor.dequantize(), pointers(tensor)
    # "copy_" of a wider tensor quantizes what it is given, not what a BF16 tensor would hold of it.
    expected = OTHER.float() * 1.001 if write is WRITES["copy_ of float32"] else values
    write(values)
    write(tensor)
    assert component_bytes(tensor) == component_bytes(BlockScaledTensor.quantize(expected, tensor.scheme))
    assert pointers(tensor) == before


def test_in_place_writes_return_the_tensor() -> None:
    tensor = quantized()
    assert tensor.add_(1) is tensor
    assert tensor.copy_(OTHER) is tensor


def test_copy_between_schemes_quantizes_once() -> None:
    source, destination = quantized("toy_block"), quantized("per_tensor", seed=1)
    destination.copy_(source)
    codes, scale, count = conform(elements_of(source), "E4M3", "E4M3", (None, None))
    assert count == 1
    np.testing.assert_array_equal(destination.components()["rowwise_data"].numpy(), codes)
    np.testing.assert_array_equal(float_bits(destination.components()["rowwise_scale_inv"]), scale)


def test_copy_into_a_plain_tensor() -> None:
    source, destination = quantized(), torch.zeros(SHAPE)
    destination.copy_(source)
    np.testing.assert_array_equal(raw(destination), raw(source.dequantize().float()))


PARTS: dict[str, Operation] = {
    "slice": lambda t: t[:4],
    "columns": lambda t: t[:, 4:8],
    "row": lambda t: t[3],
    "chunk": lambda t: t.chunk(2)[0],
    "part of a view": lambda t: t.unsqueeze(0)[:, :4],
    "view of a part": lambda t: t[:4].unsqueeze(0),
    "detached part": lambda t: t[:4].detach(),
    "data of a part": lambda t: t[:4].data,
}
PART_WRITES: dict[str, Operation] = {
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.ones(t.shape)),
    "mul_": lambda t: t.mul_(30.0),
    "foreach": lambda t: torch._foreach_add_([t], 9.0),
    "out=": lambda t: torch.neg(t.dequantize(), out=t),
}


@pytest.mark.parametrize("scheme", ["per_tensor", "toy_block"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("write", PART_WRITES.values(), ids=PART_WRITES.keys())
def test_writing_to_a_part_is_refused(scheme: str, part: Operation, write: Operation) -> None:
    # A part shares its scales with the rest, which a new scale would change.
    tensor = quantized(scheme)
    before = component_bytes(tensor)
    with pytest.raises(ValueError, match="is a part of another quantized tensor; write the whole one"):
        write(part(tensor))
    assert component_bytes(tensor) == before


def test_setting_a_part_is_refused() -> None:
    tensor = quantized()
    before = component_bytes(tensor)
    with pytest.raises(ValueError, match="is a part of another quantized tensor"):
        tensor[2:4] = 0.0
    assert component_bytes(tensor) == before


@pytest.mark.parametrize("copied", ["clone", "deepcopy", "to a copy"])
def test_a_copy_of_a_cut_is_its_own_to_write(copied: str) -> None:
    tensor = quantized()
    before = component_bytes(tensor)
    own = EXACT[copied](tensor[:2])
    own.fill_(2)
    np.testing.assert_array_equal(raw(own.dequantize()), raw(torch.full((2, 12), 2, dtype=torch.bfloat16)))
    assert component_bytes(tensor) == before


@each_scheme
@pytest.mark.usefixtures("no_arithmetic")
def test_write_copies_bytes(name: str) -> None:
    destination, source = make(name, seed=1), make(name, seed=2)
    before = pointers(destination)
    destination.write_(source)
    assert component_bytes(destination) == component_bytes(source)
    assert pointers(destination) == before


MISFITS: dict[str, Callable[[], BlockScaledTensor]] = {
    "element": lambda: make("toy_block", element="E5M2", seed=2),
    "scheme": lambda: make("per_tensor", seed=2),
    "shape": lambda: make("toy_block", (8, 16), seed=2),
    "blocks": lambda: join([make("toy_block", (2, 12)), make("toy_block", (6, 12))], 0),
    "axes": lambda: scaled(make("toy_block", seed=2).unsqueeze(0)),
    "unit axis": lambda: scaled(make("toy_block", seed=2).unsqueeze(-1)),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS.keys())
def test_write_of_what_does_not_fit_writes_nothing(misfit: Callable[[], BlockScaledTensor]) -> None:
    destination = make("toy_block", seed=1)
    before = component_bytes(destination)
    with pytest.raises(ValueError, match="cannot write"):
        destination.write_(misfit())
    assert component_bytes(destination) == before


def test_write_checks_every_direction_before_the_first() -> None:
    destination, source = make("toy_pair", seed=1), make("toy_pair", seed=2)
    before = component_bytes(destination)
    short = {toyschemes.ROWWISE: source.directions[toyschemes.ROWWISE]}
    with pytest.raises(ValueError, match="cannot write"):
        destination.write_(BlockScaledTensor(source.scheme, short))
    assert component_bytes(destination) == before


# Everything else

PLAIN: dict[str, Operation] = {
    "add": lambda t: t + 1,
    "multiply": lambda t: 2 * t,
    "negative": lambda t: -t,
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "matmul": lambda t: t @ torch.ones(12, 3, dtype=torch.bfloat16),
    "sum": lambda t: t.sum(),
    "step": lambda t: t[::2],
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


# Conforming to a destination's grid


def blocks_of(scheme: Scheme, direction: str) -> tuple[int | None, ...]:
    return next(d.scale.block for d in scheme.directions if d.data == direction)


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
    whole = assemble(shape, pieces, scheme, torch.bfloat16, torch.device("cpu"))
    assert same(elements_of(whole), model)
    check_conform(whole, Scheme(target, "E4M3"))
