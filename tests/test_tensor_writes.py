"""BlockScaledTensor as a parameter: a module's life, and what writing into it does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor, join
from tests import toyschemes
from tests.elementwise import component_bytes, conform, elements_of, float_bits, raw, scaled
from tests.shards import OTHER, SCHEMES, SHAPE, make, pointers, quantized

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")

each_scheme = pytest.mark.parametrize("name", SCHEMES)
Operation = Callable[[torch.Tensor], Any]

COPIES: dict[str, Operation] = {
    "clone": torch.Tensor.clone,
    "deepcopy": copy.deepcopy,
    "to a copy": lambda t: t.to("cpu", copy=True),
}


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
    "column": lambda t: t[:, 5],
    "element": lambda t: t[3, 5],
    "every second row": lambda t: t[::2],
    "every fifth column": lambda t: t[:, ::5],
    "one of unbind": lambda t: t.unbind(0)[2],
    "iteration": lambda t: next(iter(t)),
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


PLACES: dict[str, Any] = {
    "rows": slice(2, 4),
    "row": 0,
    "last row": -1,
    "column": (slice(None), 0),
    "element": (0, 0),
    "every second row": slice(None, None, 2),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_setting_a_part_is_refused(place: Any) -> None:
    tensor = quantized()
    before = component_bytes(tensor)
    with pytest.raises(ValueError, match="is a part of another quantized tensor"):
        tensor[place] = 5.0
    assert component_bytes(tensor) == before


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_cut_is_its_own_to_write(copied: str) -> None:
    tensor = quantized()
    before = component_bytes(tensor)
    own = COPIES[copied](tensor[:2])
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
