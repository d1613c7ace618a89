"""Megatron's GPT with Transformer Engine's layers, in each of Megatron's recipes, on real ranks: whole paths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_fp8_dist import read_manifest
from tests import te_cpu, te_layer_jobs
from tests.fakemodel import Layout
from tests.rankpool import RankPool
from tests.te_layer_jobs import NUM_EXPERTS, NUM_LAYERS, RECIPES, WEIGHTS, Loaded, Recipe, Weight

pytestmark = pytest.mark.te

JOB = f"{te_layer_jobs.__name__}:{te_layer_jobs.save_and_load.__name__}"
CLASSES = {
    "per_tensor": "Float8Tensor",
    "blockwise_2d": "Float8BlockwiseQTensor",
    "mxfp8": "MXFP8Tensor",
    "nvfp4_2d": "NVFP4Tensor",
}
RANKS = 4
# Experts are cut by the same tensor parallelism as the rest.
DENSE = Layout(tp=2, pp=2), [Layout(tp=4), Layout(tp=1, pp=2, dp=2)]
EXPERTS = Layout(tp=2, ep=2), [Layout(tp=1, ep=4), Layout(tp=2, pp=2), Layout(tp=4)]


def weights(recipe: Recipe) -> dict[str, Weight]:
    """The quantized weights of a layer, by their key."""
    return {
        f"decoder.layers.{name}".replace(".experts.", ".experts.experts."): weight
        for name, weight in WEIGHTS.items()
        if weight.quantized and (weight.expert == recipe.experts or name.startswith("self_attention"))
    }


def stack(weight: Weight) -> tuple[int, ...]:
    """Its prepended axes."""
    return (NUM_LAYERS, NUM_EXPERTS) if weight.expert else (NUM_LAYERS,)


def parameters(weight: Weight, layout: Layout) -> int:
    """How many parameters hold a part of it, on all ranks."""
    return math.prod(stack(weight)) * RANKS // (layout.pp * (layout.ep if weight.expert else 1))


def check(recipe: Recipe, layout: Layout, loaded: list[Loaded], outcome: str = "exact") -> None:
    """Every rank has every byte, and the counts are those of all ranks."""
    assert [r.wrong for r in loaded] == [[]] * RANKS
    found = weights(recipe).values()
    number = sum(parameters(w, layout) for w in found)
    codes = sum(parameters(w, layout) * math.prod(w.shape) // layout.tp for w in found)
    assert [r.classes for r in loaded] == [{CLASSES[recipe.kind.name]: number // RANKS}] * RANKS
    assert sum(r.codes for r in loaded) == codes * len(te_layer_jobs.compared(recipe.kind))
    counts = dict.fromkeys(("exact", "requantized", "dequantized", "quantized"), 0) | {outcome: number, "codes": codes}
    assert [{name: r.report[name] for name in counts} for r in loaded] == [counts] * RANKS


@pytest.mark.parametrize("name", RECIPES)
def test_every_byte_comes_back(ranks: RankPool, tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    saved, layouts = EXPERTS if recipe.experts else DENSE
    results = ranks.run(JOB, str(tmp_path), name, saved, layouts)
    for layout, *loaded in zip(layouts, *results, strict=True):
        check(recipe, layout, loaded)
        # Only delayed scaling has a state, and Megatron keeps it beside each linear layer's weight.
        sizes = {n: size for r in loaded for n, size in r.extra_states.items()}
        assert {n for n, size in sizes.items() if size} == {n for n in sizes if name == "delayed" and ".linear_" in n}
        assert len(sizes) > len(weights(recipe))
    entries = read_manifest(tmp_path).tensors
    assert {k: (e.scheme.name, e.scheme.element, e.global_shape) for k, e in entries.items()} == {
        k: (recipe.kind.name, recipe.kind.element, (*stack(w), *w.shape)) for k, w in weights(recipe).items()
    }
    assert {e.directions for e in entries.values()} == {("rowwise",) if recipe.kind.derived else te_cpu.DIRECTIONS}


def test_shards_of_unequal_scales_are_merged_and_counted(ranks: RankPool, tmp_path: Path) -> None:
    # Current scaling gives each tensor-parallel rank's part a scale of its own.
    recipe, saved = RECIPES["tensorwise"], Layout(tp=2, pp=2)
    exact, merged = Layout(tp=4), Layout(tp=1, pp=2, dp=2)
    results = ranks.run(JOB, str(tmp_path), "tensorwise", saved, [exact, merged], saved.tp)
    check(recipe, exact, [r[0] for r in results])
    check(recipe, merged, [r[1] for r in results], "requantized")
    blocks = {key: parameters(weight, merged) for key, weight in weights(recipe).items()}
    assert [r[1].report["requantized_blocks"] for r in results] == [blocks] * RANKS
