"""Optimizers line up with the model's entries: found by identity, and their own entries stay what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    force_all_tensors_to_non_fp8,
    replace_prefix_for_sharding,
)

from megatron_fp8_dist import (
    FP8LoadShardedStrategy,
    FP8SaveShardedStrategy,
    expand_quantized,
    last_report,
    load,
    save,
)
from megatron_fp8_dist.errors import PlanningError
from tests import toy_model

pytestmark = pytest.mark.usefixtures("single")

KINDS = ["block_scaled", pytest.param("float8", marks=pytest.mark.te)]
MOMENTS = ("exp_avg", "exp_avg_sq")
PLACE = toy_model.Layout().place(0)
MIXED = (0, 3)
"""Layers without quantized weights in the mixed stacks."""


def trained_state(model: toy_model.Toy, kind: str) -> dict[str, Any]:
    """Optimizer state as a state dict: from Adam itself where a CPU can update the weights."""
    if kind == "block_scaled":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
        optimizer.step()
        return optimizer.state_dict()
    return moments(model, torch.randn)


def moments(model: toy_model.Toy, fill: Callable[[torch.Size], torch.Tensor]) -> dict[str, Any]:
    """Adam's moments in FP32, made by `fill`."""
    parameters = list(model.parameters())
    states = {i: {name: fill(p.shape) for name in MOMENTS} for i, p in enumerate(parameters)}
    return {"state": states, "param_groups": [{"lr": 0.1, "params": list(range(len(parameters)))}]}


def sharded(state: dict[str, Any], model: toy_model.Toy, entries: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's entries, made by Megatron from the model's."""
    out = copy.deepcopy(state)
    optim_state_to_sharding_state(out, get_param_id_to_sharded_param_map(entries, model.parameters()), ("step",))
    return out


def values(state: dict[str, Any]) -> dict[tuple[int, str], tuple[torch.dtype, bytes]]:
    """Parameter number and moment -> dtype and bytes."""
    return {
        (number, name): (moment.dtype, toy_model.raw(moment))
        for number, per_parameter in state["state"].items()
        for name, moment in per_parameter.items()
        if name in MOMENTS
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.parametrize("mixed", [(), MIXED], ids=["one scheme", "mixed"])
def test_the_map_from_parameters_to_entries_stays(
    tmp_path: Path, kind: str, stacked: bool, direction: str, mixed: tuple[int, ...]
) -> None:
    model = toy_model.Toy(kind, PLACE, high_precision=mixed)
    save(model.sharded_state_dict(stacked), tmp_path)
    entries = model.sharded_state_dict(stacked)
    expanded = expand_quantized(entries, checkpoint_dir=tmp_path if direction == "load" else None)
    assert expanded is not entries

    before = get_param_id_to_sharded_param_map(entries, model.parameters())
    after = get_param_id_to_sharded_param_map(expanded, model.parameters())

    parameters = list(model.parameters())
    assert set(before) == set(after) == set(range(len(parameters)))
    assert {i: e.key for i, e in after.items()} == {i: e.key for i, e in before.items()}
    assert all(after[i].data is p for i, p in enumerate(parameters))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("origin", "chained"), [("original", False), ("expanded", False), ("expanded", True)])
@pytest.mark.parametrize("mixed", [(), MIXED], ids=["one scheme", "mixed"])
def test_moments_keep_key_shape_and_value(
    tmp_path: Path, kind: str, origin: str, chained: bool, mixed: tuple[int, ...]
) -> None:
    def state_dict(model: toy_model.Toy, state: dict[str, Any], checkpoint_dir: Path | None) -> dict[str, Any]:
        entries = model.sharded_state_dict()
        expanded = expand_quantized(entries, checkpoint_dir=checkpoint_dir)
        optimizer = sharded(state, model, entries if origin == "original" else expanded)
        if chained:
            add_prefix_for_sharding(optimizer, "chained_0.")
        return {"model": expanded, "optimizer": optimizer}

    model = toy_model.Toy(kind, PLACE, high_precision=mixed)
    trained = trained_state(model, kind)
    dist_checkpointing.save(state_dict(model, trained, None), str(tmp_path), FP8SaveShardedStrategy())

    prefix = "chained_0." if chained else ""
    shapes = {
        f"{prefix}optimizer.state.{moment}.decoder.layers.{weight.name}.weight": (toy_model.NUM_LAYERS, *weight.shape)
        for moment in MOMENTS
        for weight in toy_model.WEIGHTS
    }
    stored = dist_checkpointing.load_tensors_metadata(str(tmp_path))
    assert {k: t.global_shape for k, t in stored.items() if "optimizer" in k} == shapes

    blank = toy_model.Toy(kind, PLACE, blank=True, high_precision=mixed)
    wanted = {"state": {i: {n: torch.zeros_like(s[n]) for n in MOMENTS} for i, s in trained["state"].items()}}
    request = state_dict(blank, wanted | {"param_groups": trained["param_groups"]}, tmp_path)
    loaded = dist_checkpointing.load(request, str(tmp_path), FP8LoadShardedStrategy())

    assert values(loaded["optimizer"]) == values(trained)
    blank.load_state_dict(loaded["model"])
    assert {n: toy_model.content(p) for n, p in blank.named_parameters()} == {
        n: toy_model.content(p) for n, p in model.named_parameters()
    }


def test_our_save_and_load_take_optimizer_entries_of_the_plain_entries(tmp_path: Path) -> None:
    model = toy_model.Toy("block_scaled", PLACE)
    trained = moments(model, torch.randn)
    entries = model.sharded_state_dict()
    save({"model": entries, "optimizer": sharded(trained, model, entries)}, tmp_path)

    blank = toy_model.Toy("block_scaled", PLACE, blank=True)
    entries = blank.sharded_state_dict()
    wanted = sharded(moments(model, torch.zeros), blank, entries)
    loaded = load({"model": entries, "optimizer": wanted}, tmp_path)

    assert values(loaded["optimizer"]) == values(trained)
    assert blank.wrong() == []
    report = last_report()
    assert report is not None
    assert report.to_dict()["exact"] == len(toy_model.QUANTIZED) * toy_model.NUM_LAYERS


Operation = tuple[str, "Callable[[dict[str, Any]], Any]", str, str]
OPERATIONS: list[Operation] = [
    ("add_prefix_for_sharding", lambda sd: add_prefix_for_sharding(sd, "chained_0."), "", "chained_0."),
    ("replace_prefix_for_sharding", lambda sd: replace_prefix_for_sharding(sd, "a.", "b."), "a.", "b."),
    ("apply_prefix_mapping", lambda sd: apply_prefix_mapping(sd, {"a.": "optimizer.x."}), "a.", "optimizer.x."),
    ("force_all_tensors_to_non_fp8", force_all_tensors_to_non_fp8, "", ""),
    ("deepcopy", copy.deepcopy, "", ""),
    ("replace", lambda sd: {"w": replace(sd["w"], key="b." + sd["w"].key)}, "", "b."),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [toy_model.WEIGHTS[1], toy_model.WEIGHTS[3]], ids=["plain", "swiglu"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=[name for name, *_ in OPERATIONS])
@pytest.mark.parametrize("owner", ["model", "optimizer"])
def test_model_and_optimizer_entries_are_told_apart(
    kind: str, weight: toy_model.Weight, operation: Operation, owner: str
) -> None:
    _, change, old, new = operation
    parameter = toy_model.quantized(kind, weight.codes(0), weight.scale_inv(0))
    factory = expand_quantized({"w": toy_model.entry(parameter, weight, PLACE, 0, stacked=False, prefix=old)})["w"]
    moment = torch.randn(weight.shape)
    if owner == "optimizer":
        factory = replace(factory, data=moment)
    state_dict = {"w": factory}
    changed = change(state_dict) or state_dict
    built = list(nested_values({"w": changed["w"].build()}))

    key = f"{new}decoder.layers.0.{weight.name}.weight"
    if owner == "model":
        assert {leaf.key for leaf in built} == {f"{key}.rowwise_data", f"{key}.rowwise_scale_inv"}
        codes = [leaf.data for leaf in built if leaf.key.endswith("data")]
        assert toy_model.raw(*codes) == toy_model.raw(weight.codes(0))
    else:
        assert {leaf.key for leaf in built} == {key}
        assert toy_model.raw(*(leaf.data for leaf in built)) == toy_model.raw(moment)


def test_a_new_key_after_a_load_was_planned_is_refused(tmp_path: Path) -> None:
    model = toy_model.Toy("block_scaled", PLACE)
    save(model.sharded_state_dict(), tmp_path)
    planned = expand_quantized(model.sharded_state_dict(), checkpoint_dir=tmp_path)
    add_prefix_for_sharding(planned, "student.")
    with pytest.raises(PlanningError, match=r"student\.decoder.* an entry that was planned as decoder"):
        planned["layers.0.qkv"].build()
