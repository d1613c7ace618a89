"""Transformer Engine's Float8Tensor parameters: saved and restored as bytes, in place, without a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch import nn

from megatron_fp8_dist import LoadOptions, expand_quantized, last_report, load, save
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.report import LoadReport
from tests import te_cpu, toy_model

pytestmark = [pytest.mark.te, pytest.mark.usefixtures("single")]

KEY = "decoder.linear.weight"
SCALE = 0.0078125
EVERY_CODE = torch.arange(256).to(torch.uint8).reshape(8, 32)


def entries(parameter: Any) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets(KEY, parameter)}


def float8(codes: torch.Tensor = EVERY_CODE, **how: Any) -> Any:
    return nn.Parameter(te_cpu.float8(codes.clone(), SCALE, **how))


def blank(**how: Any) -> Any:
    return nn.Parameter(te_cpu.float8(torch.full_like(EVERY_CODE, 0xAA), 1.0, **how))


def report() -> LoadReport:
    found = last_report()
    assert isinstance(found, LoadReport)
    return found


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever quantizes or dequantizes raises, in Transformer Engine and in the package."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a value was converted")

    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    for name in [n for n in dir(tex) if "quantize" in n.lower() and callable(getattr(tex, n)) and n.islower()]:
        monkeypatch.setattr(tex, name, never)
    monkeypatch.setattr(te.Float8Tensor, "dequantize", never)
    for cls in (te.Float8Quantizer, te.Float8CurrentScalingQuantizer):
        monkeypatch.setattr(cls, "quantize_impl", never)
        monkeypatch.setattr(cls, "update_quantized", never)
    for name in ("quantize", "dequantize_into", "encode", "decode"):
        monkeypatch.setattr(f"megatron_fp8_dist.quantized.numerics.{name}", never)


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("recipe", ["delayed", "current", "none"])
@pytest.mark.parametrize("element", ["E4M3", "E5M2"])
def test_every_code_round_trips(tmp_path: Path, element: str, recipe: str) -> None:
    saved, loaded = (make(element=element, recipe=recipe) for make in (float8, blank))
    save(entries(saved), tmp_path)
    load(entries(loaded), tmp_path)
    assert toy_model.raw(*toy_model.buffers(loaded)) == toy_model.raw(EVERY_CODE, torch.tensor([SCALE]))
    assert report().exact == 1


@pytest.mark.usefixtures("no_conversion")
def test_the_patches_notice_a_conversion() -> None:
    with pytest.raises(AssertionError, match="a value was converted"):
        float8().dequantize()
    with pytest.raises(AssertionError, match="a value was converted"), torch.no_grad():
        float8().copy_(torch.zeros(8, 32))


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("transpose", [False, True])
def test_restore_is_in_place(tmp_path: Path, transpose: bool) -> None:
    save(entries(float8(transpose=transpose)), tmp_path)
    loaded = blank(transpose=transpose)
    buffers = [b for b in (loaded._data, loaded._scale_inv, loaded._transpose) if b is not None]
    pointers = [b.data_ptr() for b in buffers]
    quantizer = loaded._quantizer

    load(entries(loaded), tmp_path)

    assert loaded._data is buffers[0]
    assert loaded._scale_inv is buffers[1]
    assert [b.data_ptr() for b in buffers] == pointers
    assert loaded._transpose is (buffers[2] if transpose else None)
    assert loaded._transpose_invalid
    assert loaded._quantizer is quantizer
    assert (quantizer.scale.item(), quantizer.amax.item()) == (te_cpu.DELAYED_SCALE, te_cpu.DELAYED_AMAX)


@pytest.mark.usefixtures("no_conversion")
def test_load_state_dict_with_the_returned_value_changes_nothing(tmp_path: Path) -> None:
    save(entries(float8()), tmp_path)
    module: Any = nn.Module()
    weight = blank(transpose=True)
    module.register_parameter("weight", weight)
    pointers = [b.data_ptr() for b in (weight._data, weight._scale_inv)]

    returned = load(entries(weight), tmp_path)
    assert returned["weight"] is not weight
    module.load_state_dict(returned)

    assert module.weight is weight
    assert [b.data_ptr() for b in (weight._data, weight._scale_inv)] == pointers
    assert toy_model.raw(*toy_model.buffers(weight)) == toy_model.raw(EVERY_CODE, torch.tensor([SCALE]))
    assert weight._transpose_invalid
    quantizer = weight._quantizer
    assert (quantizer.scale.item(), quantizer.amax.item()) == (te_cpu.DELAYED_SCALE, te_cpu.DELAYED_AMAX)


@pytest.mark.usefixtures("no_conversion")
def test_a_tensor_that_has_only_its_transpose(tmp_path: Path) -> None:
    save(entries(float8(rowwise=False)), tmp_path)
    both, transposed = blank(transpose=True), blank(rowwise=False)
    buffer = transposed._transpose
    for destination in (both, transposed):
        load(entries(destination), tmp_path)
    assert toy_model.raw(both._data) == toy_model.raw(EVERY_CODE)
    assert transposed._data is None
    assert transposed._transpose is buffer
    assert toy_model.raw(buffer) == toy_model.raw(EVERY_CODE.t())
    assert not transposed._transpose_invalid
    assert toy_model.raw(transposed._scale_inv) == toy_model.raw(torch.tensor([SCALE]))


SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "stale transpose": ({"_data": None, "_transpose_invalid": True}, "without valid codes"),
    "no codes at all": ({"_data": None, "_transpose": None}, "without valid codes"),
    "codes of another dtype": ({"_data": torch.zeros(8, 32)}, "with codes of torch.float32"),
    "codes of another shape": ({"_data": torch.zeros(4, 32, dtype=torch.uint8)}, ""),
    "no scale": ({"_scale_inv": None}, "with scale_inv None"),
    "many scales": ({"_scale_inv": torch.ones(3)}, "with scale_inv"),
    "scale of another dtype": ({"_scale_inv": torch.ones(1, dtype=torch.float64)}, "with scale_inv"),
}


@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.parametrize(("buffers", "found"), SPOILED.values(), ids=SPOILED.keys())
def test_a_tensor_whose_buffers_do_not_hold_it_is_refused(
    tmp_path: Path, direction: str, buffers: dict[str, Any], found: str
) -> None:
    save(entries(float8()), tmp_path)
    parameter = blank(transpose=True)
    entry = entries(parameter)
    for name, value in buffers.items():
        setattr(parameter, name, value)
    checkpoint_dir = tmp_path if direction == "load" else None
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*{found}"):
        expand_quantized(entry, checkpoint_dir=checkpoint_dir)


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize(("writer", "reader"), [("float8", "block_scaled"), ("block_scaled", "float8")])
def test_checkpoints_of_both_kinds_of_tensor_are_the_same(tmp_path: Path, writer: str, reader: str) -> None:
    layout = toy_model.Layout()
    save(toy_model.Toy(writer, layout.place(0)).sharded_state_dict(), tmp_path)
    loaded = toy_model.Toy(reader, layout.place(0), blank=True)
    loaded.load_state_dict(load(loaded.sharded_state_dict(), tmp_path))
    assert loaded.wrong() == []
    assert report().exact == len(toy_model.QUANTIZED) * toy_model.NUM_LAYERS


def test_another_element_format_is_refused(tmp_path: Path) -> None:
    save(entries(float8()), tmp_path)
    loaded = blank(element="E5M2")
    with pytest.raises(PlanningError, match=r"decoder.linear.weight: found E4M3 .* expected E5M2 .*allow_recast=True"):
        load(entries(loaded), tmp_path)
    assert toy_model.raw(*toy_model.buffers(loaded)) == toy_model.raw(*toy_model.buffers(blank()))


def test_another_element_format_is_requantized_where_that_is_allowed(tmp_path: Path) -> None:
    codes = EVERY_CODE.clone()
    codes[codes & 0x7F == 0x7F] = 0  # NaN would hide the largest magnitude
    save(entries(float8(codes)), tmp_path)
    loaded = blank(element="E5M2")
    data, scale_inv = loaded._data, loaded._scale_inv
    load(entries(loaded), tmp_path, options=LoadOptions(allow_recast=True))

    values = codes.view(torch.float8_e4m3fn).float() * SCALE
    scale = torch.finfo(torch.float8_e5m2).max / values.abs().max()
    assert loaded._data is data
    assert loaded._scale_inv is scale_inv
    assert toy_model.raw(data) == toy_model.raw((values * scale).to(torch.float8_e5m2))
    assert toy_model.raw(scale_inv) == toy_model.raw(scale.reciprocal())
    assert dict(report().requantized_blocks) == {KEY: 1}
    assert (report().exact, report().requantized) == (0, 1)


UNSUPPORTED = {
    "HybridQuantizedTensor": (te_cpu.hybrid, "one recipe for both directions"),
    "GroupedTensor": (te_cpu.grouped, r"split_into_quantized_tensors\(\)"),
}


@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_class_is_named(tmp_path: Path, name: str, direction: str) -> None:
    make, remedy = UNSUPPORTED[name]
    # nn.Parameter() of a hybrid tensor needs a device.
    parameter = make(64, 64)
    checkpoint_dir = None
    if direction == "load":
        save(entries(nn.Parameter(torch.zeros(parameter.shape, dtype=torch.bfloat16))), tmp_path)
        checkpoint_dir = tmp_path
    with pytest.raises(PlanningError, match=rf"{KEY}: found .*{name}, expected .*Float8Tensor.*{remedy}"):
        expand_quantized(entries(parameter), checkpoint_dir=checkpoint_dir)


@pytest.mark.parametrize(
    ("state_dict", "place"),
    [
        ({"a": {"b": [te_cpu.float8]}}, r"\(state dict\)"),
        ({"a": ShardedObject("extra", {"deep": te_cpu.float8}, (1,), (0,))}, "extra"),
    ],
    ids=["loose", "in a ShardedObject"],
)
def test_a_quantized_tensor_outside_of_any_entry(tmp_path: Path, state_dict: dict[str, Any], place: str) -> None:
    quantized = te_cpu.float8(EVERY_CODE, SCALE)
    value = state_dict["a"]
    if isinstance(value, ShardedObject):
        value.data["deep"] = quantized
    else:
        value["b"] = [quantized]
    with pytest.raises(PlanningError, match=rf"{place}: found a quantized Float8Tensor of shape"):
        save(state_dict, tmp_path)
    assert list(tmp_path.iterdir()) == []
