"""Saved on one layout, loaded on another, byte for byte: whole paths on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_fp8_dist import LoadOptions, last_report, load, read_manifest, save
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from tests import layout_jobs, toy_model
from tests.rankpool import RankPool
from tests.toy_model import Layout

JOBS = layout_jobs.__name__
KINDS = ["block_scaled", pytest.param("float8", marks=pytest.mark.te)]
NUM_QUANTIZED = len(toy_model.QUANTIZED)
CHANGES = [
    pytest.param(Layout(tp=2, pp=2), Layout(tp=1, pp=2), True, id="TP2xPP2-TP1xPP2"),
    pytest.param(Layout(tp=2, pp=2), Layout(tp=4, pp=1), True, id="TP2xPP2-TP4xPP1"),
    pytest.param(Layout(tp=1, pp=2), Layout(tp=2, pp=2), True, id="TP1xPP2-TP2xPP2"),
    pytest.param(Layout(tp=4), Layout(tp=2, dp=2), False, id="TP4-TP2xDP2, a key per layer"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saved", "loaded", "stacked"), CHANGES)
def test_every_byte_comes_back(
    ranks: RankPool, tmp_path: Path, kind: str, saved: Layout, loaded: Layout, stacked: bool
) -> None:
    ranks.run(f"{JOBS}:save_toy", str(tmp_path), kind, saved, stacked, n=saved.size)
    results = ranks.run(f"{JOBS}:load_toy", str(tmp_path), kind, loaded, stacked, n=loaded.size)
    assert [r.wrong for r in results] == [[]] * loaded.size
    # Each rank counts its own parameters, replicas included.
    exact = NUM_QUANTIZED * toy_model.NUM_LAYERS * loaded.tp * loaded.dp
    assert [(r.report["exact"], r.report["requantized"]) for r in results] == [(exact, 0)] * loaded.size


@pytest.mark.parametrize("kind", KINDS)
def test_a_megatron_gpt(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks.run(f"{JOBS}:save_gpt", str(tmp_path), kind, Layout(tp=2, pp=2))
    results = ranks.run(f"{JOBS}:load_gpt", str(tmp_path), kind, Layout(tp=4))
    assert [r.wrong for r in results] == [[]] * 4
    entries = read_manifest(tmp_path).tensors
    assert {k: e.global_shape for k, e in entries.items()} == {
        f"decoder.layers.{name}.weight": (toy_model.NUM_LAYERS, *weight.shape)
        for name, weight in layout_jobs.GPT_WEIGHTS.items()
    }
    assert {e.prepended_axes for e in entries.values()} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_stack_with_one_layer_per_rank(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    mixed = (0, 3)
    ranks.run(f"{JOBS}:save_toy", str(tmp_path), kind, Layout(pp=4), True, mixed)
    assert read_manifest(tmp_path).mixed["decoder.layers.fc1.weight"].quantized == (1, 2)
    for layout in (Layout(), Layout(tp=2, pp=2)):
        results = ranks.run(f"{JOBS}:load_toy", str(tmp_path), kind, layout, True, mixed, n=layout.size)
        assert [r.wrong for r in results] == [[]] * layout.size
        assert results[0].report["exact"] == NUM_QUANTIZED * 2 * layout.tp


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_expand_among_themselves(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks.run(f"{JOBS}:save_toy", str(tmp_path), kind, Layout(tp=4))
    *outside, (first, plan, named), (second, *_) = ranks.run(f"{JOBS}:expand_in_a_group", str(tmp_path), kind)
    assert outside == [None, None]
    key = "decoder.layers.qkv.weight"
    assert {k for k in first if k.startswith(key)} == {
        f"{key}.layer_{layer}.{component}" for layer in (0, 1) for component in ("rowwise_data", "rowwise_scale_inv")
    }
    assert {k for k in second if k.startswith(key)} == {f"{key}.layer_2", f"{key}.layer_3"}
    assert (plan["exact"], plan["dequantized"]) == (NUM_QUANTIZED * 2, NUM_QUANTIZED * 2)
    assert named == (3,)


@pytest.mark.usefixtures("single")
def test_other_layers_are_quantized_in_the_model(tmp_path: Path) -> None:
    place = Layout().place(0)
    saved = toy_model.Toy("block_scaled", place, high_precision=(0, 3))
    save(saved.sharded_state_dict(), tmp_path)
    model = toy_model.Toy("block_scaled", place, blank=True, high_precision=(2, 3))
    returned = load(model.sharded_state_dict(), tmp_path)
    model.load_state_dict(returned)

    for weight in toy_model.QUANTIZED:
        newly, kept, formerly, never = (model.parameter(weight, layer) for layer in range(4))
        values = weight.values(0)
        assert toy_model.raw(returned[f"layers.0.{weight.name}"]) == toy_model.raw(values)
        assert toy_model.content(newly) == toy_model.content(BlockScaledTensor.quantize(values, toy_model.scheme()))
        assert toy_model.content(kept) == toy_model.content(saved.parameter(weight, 1))
        assert toy_model.raw(formerly) == toy_model.raw(saved.parameter(weight, 2).dequantize())
        assert toy_model.raw(never) == toy_model.raw(weight.values(3))
    found = layout_jobs.report()
    assert [found[k] for k in ("exact", "requantized", "dequantized", "quantized")] == [4, 0, 4, 4]


def random_weight(rows: int, columns: int, scale_inv: float) -> Any:
    """A quantized weight of random codes."""
    return toy_model.quantized("block_scaled", torch.randint(256, (rows, columns), dtype=torch.uint8), scale_inv)


def blank_weight(rows: int, columns: int) -> Any:
    """A weight for a load to overwrite."""
    return toy_model.quantized("block_scaled", torch.full((rows, columns), 0xAA, dtype=torch.uint8), 1.0)


@pytest.mark.usefixtures("single")
def test_experts_stack_on_a_second_axis(tmp_path: Path) -> None:
    num_layers, num_experts = 2, 4
    places = [(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]

    def entries(weights: list[Any]) -> dict[str, Any]:
        return {
            f"{layer} {expert}": ShardedTensor.from_rank_offsets(
                "experts.weight", weight, (0, layer, num_layers), (1, expert, num_experts), prepend_axis_num=2
            )
            for (layer, expert), weight in zip(places, weights, strict=True)
        }

    saved = [random_weight(6, 8, 0.1 + number) for number in range(len(places))]
    loaded = [blank_weight(6, 8) for _ in places]
    save(entries(saved), tmp_path)
    load(entries(loaded), tmp_path)
    assert [toy_model.content(w) for w in loaded] == [toy_model.content(w) for w in saved]


@pytest.mark.usefixtures("single")
def test_uneven_fragments(tmp_path: Path) -> None:
    def entries(weights: list[Any]) -> dict[int, Any]:
        starts = [0, 10]
        return {
            start: ShardedTensor("weight", w, w.dtype, tuple(w.shape), (16, 8), (start, 0), None)
            for start, w in zip(starts, weights, strict=True)
        }

    saved = [random_weight(10, 8, 0.5), random_weight(6, 8, 0.5)]
    save(entries(saved), tmp_path)
    loaded, whole = [blank_weight(10, 8), blank_weight(6, 8)], blank_weight(16, 8)
    load(entries(loaded), tmp_path)
    load({"weight": ShardedTensor.from_rank_offsets("weight", whole)}, tmp_path)
    assert [toy_model.content(w) for w in loaded] == [toy_model.content(w) for w in saved]
    codes, scale = zip(*map(toy_model.buffers, saved), strict=True)
    assert toy_model.content(whole) == toy_model.raw(torch.cat(codes), scale[0])


@pytest.mark.usefixtures("single")
def test_a_destination_inside_a_larger_buffer(tmp_path: Path) -> None:
    saved = random_weight(4, 4, 0.5)
    save({"weight": ShardedTensor.from_rank_offsets("weight", saved)}, tmp_path)
    buffer = torch.full((8, 8), 0xAA, dtype=torch.uint8)
    loaded = toy_model.quantized("block_scaled", buffer[2:6, 1:5], 1.0)
    load({"weight": ShardedTensor.from_rank_offsets("weight", loaded)}, tmp_path)
    right = torch.full((8, 8), 0xAA, dtype=torch.uint8)
    right[2:6, 1:5] = toy_model.buffers(saved)[0]
    assert toy_model.raw(buffer) == toy_model.raw(right)


def shards(weight: toy_model.Weight, scales: tuple[float, float]) -> dict[str, Any]:
    """Both tensor-parallel halves of a weight, each with its own scale, as one process may hold them."""
    layout = Layout(tp=2)
    codes = weight.codes(0) & 0xBF  # no NaN, which would hide the largest magnitude
    return {
        f"rank {place.tp}": toy_model.entry(
            toy_model.quantized("block_scaled", weight.part(codes, place), scale), weight, place, 0, stacked=False
        )
        for place, scale in zip(layout.places(), scales, strict=True)
    }


def merged(weight: toy_model.Weight, scales: tuple[float, float]) -> bytes:
    """What the merged weight must hold: both halves in FP32, quantized once with one scale for all."""
    wholes = [weight.codes(0) & 0xBF for _ in scales]
    parts = [c.view(torch.float8_e4m3fn).float() * s for c, s in zip(wholes, scales, strict=True)]
    if weight.swiglu:
        halves = [[h.chunk(2)[tp] for h in part.chunk(2)] for tp, part in enumerate(parts)]
        values = torch.cat([halves[tp][half] for half in (0, 1) for tp in (0, 1)])
    else:
        values = torch.cat([part.chunk(2, weight.axis or 0)[tp] for tp, part in enumerate(parts)], weight.axis or 0)
    scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
    return toy_model.raw((values * scale).to(torch.float8_e4m3fn), scale.reciprocal())


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("weight", toy_model.QUANTIZED, ids=[w.name for w in toy_model.QUANTIZED])
@pytest.mark.parametrize("strict", [False, True])
def test_unequal_scales_are_merged_once_and_counted_or_refused(
    tmp_path: Path, weight: toy_model.Weight, strict: bool
) -> None:
    scales = (0.25, 0.3125)
    save(shards(weight, scales), tmp_path)
    whole = toy_model.quantized("block_scaled", torch.full(weight.shape, 0xAA, dtype=torch.uint8), 1.0)
    before = toy_model.content(whole)
    entries = {"weight": toy_model.entry(whole, weight, Layout().place(0), 0, stacked=False)}
    key = f"decoder.layers.0.{weight.name}.weight"
    if strict:
        with pytest.raises(PlanningError, match=rf"{key}: found 1 block.* of different scale"):
            load(entries, tmp_path, options=LoadOptions(strict_bitwise=True))
        assert toy_model.content(whole) == before
        return
    load(entries, tmp_path)
    assert toy_model.content(whole) == merged(weight, scales)
    report = last_report()
    assert report is not None
    assert report.to_dict()["requantized_blocks"] == {key: 1}
    assert [report.to_dict()[k] for k in ("exact", "requantized")] == [0, 1]
