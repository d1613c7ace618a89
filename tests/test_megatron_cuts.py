"""The cuts that Megatron makes, made by Megatron: SwiGLU, the in_proj of Mamba and GatedDeltaNet, and experts.

The entries come from Megatron's own functions and modules (megatron_cuts.py); ranks are fakes in one process
(cut_ranks.py).
"""

from __future__ import annotations

import ast
import itertools
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

import megatron_fp8_dist
from megatron_fp8_dist import Scheme, expand_quantized
from megatron_fp8_dist.compat.host import HOST_VERSION
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.report import LoadReport
from megatron_fp8_dist.sharding.expand import leaves
from megatron_fp8_dist.sharding.load_task import Outcome
from tests import te_cpu
from tests.cut_ranks import (
    BLOCK_SCALED,
    ROWWISE,
    TRANSFORMER_ENGINE,
    Saved,
    Schemes,
    by_layer,
    check,
    conform,
    empty,
    filled,
    held,
    load_cut,
    save_cut,
)
from tests.elements import Sides
from tests.elementwise import raw
from tests.fakeranks import DIRECTORY, Rank, Recorder, kinds, save
from tests.megatron_cuts import (
    NAMES,
    Cut,
    Experts,
    Fused,
    Group,
    split_tensor_factory,
    without_constructor,
)

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [
    Scheme("per_tensor", "E4M3"),
    Scheme("per_tensor", "E5M2"),
    Scheme("blockwise_2d", "E4M3"),
    Scheme.of("blockwise_1d", "E5M2", power_of_two=0),
    Scheme("mxfp8", "E4M3"),
    Scheme("mxfp8_2d", "E5M2"),
    Scheme("nvfp4", "E2M1"),
    Scheme("nvfp4_2d", "E2M1"),
    Scheme("nvfp4_row_scaled", "E2M1"),
]
MXFP8, NVFP4, NVFP4_2D = Scheme("mxfp8", "E4M3"), Scheme("nvfp4", "E2M1"), Scheme("nvfp4_2d", "E2M1")
KINDS = ["swiglu", "swiglu singleton", "mamba", "gated_delta_net"]
PAIRS = list(itertools.permutations([1, 2, 4], 2))
MIXED = by_layer(None, MXFP8)


def scheme_id(value: Any) -> str | None:
    return f"{value.name}-{value.element}" if isinstance(value, Scheme) else None


each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
each_kind = pytest.mark.parametrize("kind", KINDS)


# Fused projections

SMALL = {"swiglu": (22, 22), "mamba": (20, 20, 6, 6, 3), "gated_delta_net": (14, 14, 22, 22, 3, 3)}
LARGE = {"swiglu": (36, 36), "mamba": (40, 40, 14, 14, 3), "gated_delta_net": (20, 20, 30, 30, 3, 3)}
"""Rows of each section on one rank of four, for blocks of 16 or 32 rows and for those of 128: no multiples of them."""

# Singleton halves differ from others in their keys alone, and one in_proj from another in the number of its sections.
CHANGES = [
    *((kind, *pair) for kind in ("swiglu", "mamba") for pair in PAIRS),
    *((kind, *pair) for kind in ("swiglu singleton", "gated_delta_net") for pair in ((4, 2), (2, 1), (1, 4))),
]
EQUAL = [("swiglu", 4, 1), ("swiglu singleton", 1, 4), ("mamba", 1, 4), ("gated_delta_net", 4, 1)]


def fused(kind: str, scheme: Scheme, tp: int, **more: Any) -> Fused:
    """A weight with sections that suit the scheme."""
    rows = (LARGE if scheme.name.startswith("blockwise") else SMALL)[kind.split(maxsplit=1)[0]]
    # Columnwise E2M1 codes are packed along rows.
    even = [r - r % 2 for r in rows] if scheme.name == "nvfp4" else rows
    return Fused(kind, tuple(4 * r for r in even), 24 if scheme.element == "E2M1" else 40, tp, **more)


@cache
def saved(kind: str, scheme: Scheme, tp: int) -> Saved:
    return save_cut(fused(kind, scheme, tp), by_layer(scheme), seed=1)


@each_scheme
@pytest.mark.parametrize(("kind", "source", "target"), CHANGES)
def test_tensor_parallel_size_changes(kind: str, scheme: Scheme, source: int, target: int) -> None:
    ranks = load_cut(saved(kind, scheme, source), fused(kind, scheme, target))
    if scheme.name == "nvfp4_row_scaled" or (scheme.name == "per_tensor" and source < target):
        assert kinds(ranks) == {"exact"}
    elif source > target:
        assert "requantized" in kinds(ranks)


@each_scheme
@each_kind
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.usefixtures("no_arithmetic")
def test_the_saved_cut_is_exact(kind: str, scheme: Scheme, tp: int) -> None:
    ranks = load_cut(saved(kind, scheme, tp), fused(kind, scheme, tp), strict_bitwise=True)
    assert kinds(ranks) == {"exact"}


@each_scheme
@pytest.mark.parametrize(("kind", "source", "target"), EQUAL)
@pytest.mark.usefixtures("no_arithmetic")
def test_equal_scales_are_exact(kind: str, scheme: Scheme, source: int, target: int) -> None:
    one_scale = save_cut(fused(kind, scheme, source), by_layer(scheme), choices=1, amax=0.75)
    load_cut(one_scale, fused(kind, scheme, target), strict_bitwise=True)


@each_scheme
def test_strict_bitwise_refuses_before_codes_are_read(scheme: Scheme) -> None:
    source, cut = saved("mamba", scheme, 4), fused("mamba", scheme, 1)
    if scheme.name == "nvfp4_row_scaled":
        load_cut(source, cut, strict_bitwise=True)
        return
    source.backend.reads.clear()
    with pytest.raises(PlanningError) as caught:
        load_cut(source, cut, strict_bitwise=True)
    [problem] = caught.value.problems
    [part] = cut.ranks()[0].values()
    blocks = conform(source.sides(part), scheme).blocks
    assert (problem.key, problem.found.split()[:2]) == (cut.key(0), [str(blocks), "block(s)"])
    assert source.backend.reads
    assert source.backend.code_reads() == []


@each_scheme
def test_a_high_precision_destination_gets_the_values(scheme: Scheme) -> None:
    ranks = load_cut(saved("mamba", scheme, 2), fused("mamba", scheme, 4), by_layer(None))
    assert kinds(ranks) == {"dequantized"}


@each_kind
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "keyed"])
def test_what_is_stored(kind: str, stacked: bool) -> None:
    cut = fused(kind, MXFP8, 2, layers=2, stacked=stacked)
    manifest = save_cut(cut, by_layer(MXFP8)).manifest
    assert set(manifest.tensors) == {key for layer in range(2) for key in cut.stored_keys(layer)}
    rows = [s // 2 for s in cut.sections]
    phases = [start % 32 for start in itertools.accumulate([0, *rows[:-1]])]
    # Halves under one key are its fragments; every other section has a key.
    runs = [((2, phases[0]), (2, phases[1]))] if kind == "swiglu" else [((2, phase),) for phase in phases]
    for key, size, wanted in zip(cut.stored_keys(), rows, runs, strict=False):
        grid = manifest.tensors[key].grid
        assert grid is not None
        assert (grid.fragment_shape[-2:], grid.phases[-2]) == ((size, 40), wanted)
        assert grid.slots["columnwise_scale_inv"][-2:] == (-(-size // 32) + 1, 40)


@each_kind
@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2)])
def test_layers_of_several_schemes(kind: str, source: int, target: int) -> None:
    cut, wanted = (fused(kind, MXFP8, tp, layers=3) for tp in (source, target))
    model = save_cut(cut, by_layer(None, MXFP8, NVFP4_2D))
    stacks = {key: list(stack.quantized) for key, stack in model.manifest.mixed.items()}
    assert stacks == {key: [1, 2] for key in cut.stored_keys()}
    load_cut(model, wanted)
    ranks = load_cut(model, wanted, by_layer(MXFP8, None, NVFP4_2D))
    assert [ranks[0].outcomes[str(layer)].kind for layer in range(2)] == ["quantized", "dequantized"]


def test_layers_with_keys_of_their_own_are_no_stack() -> None:
    cut = fused("mamba", MXFP8, 2, layers=3, stacked=False)
    model = save_cut(cut, by_layer(None, MXFP8, NVFP4_2D))
    assert not model.manifest.mixed
    assert kinds(load_cut(model, cut, strict_bitwise=True)) == {"exact"}


# Packed codes

ODD = {"mamba": (20, 20, 7, 6, 3), "gated_delta_net": (14, 14, 22, 22, 3, 3)}
"""Rows of each section on one rank of four; all of them together are even."""
ODD_SECTIONS = {"mamba": ("B", "dt"), "gated_delta_net": ("beta", "alpha")}
each_in_proj = pytest.mark.parametrize("kind", list(NAMES))


def odd(kind: str, tp: int) -> Fused:
    """A weight with odd sections where there are four ranks."""
    return Fused(kind, tuple(4 * r for r in ODD[kind]), 24, tp)


@each_in_proj
def test_odd_sections_of_codes_packed_along_rows_are_refused(kind: str) -> None:
    key = odd(kind, 4).key(0)
    with pytest.raises(PlanningError, match=rf"{key}: found \d is odd: packed E2M1"):
        save_cut(odd(kind, 4), by_layer(NVFP4))
    even = save_cut(odd(kind, 1), by_layer(NVFP4))
    load_cut(even, odd(kind, 2))
    even.backend.reads.clear()
    with pytest.raises(PlanningError) as caught:
        load_cut(even, odd(kind, 4))
    assert {p.key for p in caught.value.problems} == {f"{key}.{name}" for name in ODD_SECTIONS[kind]}
    assert all("odd: packed E2M1" in p.found for p in caught.value.problems)
    assert even.backend.code_reads() == []


@each_in_proj
def test_odd_sections_of_codes_packed_along_columns(kind: str) -> None:
    model = save_cut(odd(kind, 4), by_layer(NVFP4), ROWWISE)
    load_cut(model, odd(kind, 4), params=ROWWISE, strict_bitwise=True)
    load_cut(model, odd(kind, 1), params=ROWWISE)


@each_in_proj
def test_a_direction_that_is_left_out_need_not_be_cut(kind: str) -> None:
    ranks, whole = filled(odd(kind, 4), by_layer(NVFP4))
    backend = Recorder()
    manifest = save(ranks, backend, DIRECTORY, "rowwise")
    stored = {weight: Sides({"rowwise": sides["rowwise"]}) for weight, sides in whole.items()}
    model = Saved(by_layer(NVFP4), stored, backend, manifest)
    assert {e.directions for e in model.manifest.tensors.values()} == {("rowwise",)}
    load_cut(model, odd(kind, 4), params=ROWWISE, strict_bitwise=True)


# Megatron's modules


def source_of_factory(module: str) -> str:
    """Text of `_split_tensor_factory` in a module of megatron.core.ssm, which need not be importable."""
    package = find_spec("megatron.core.ssm")
    assert package is not None
    assert package.submodule_search_locations is not None
    tree = ast.parse((Path(next(iter(package.submodule_search_locations))) / f"{module}.py").read_text())
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_split_tensor_factory"]
    return ast.unparse(function)


def test_mamba_splits_as_gated_delta_net_does() -> None:
    if split_tensor_factory.__module__ == "megatron.core.ssm.utils":
        from megatron.core.ssm import mamba_mixer
        from megatron.core.ssm.gated_delta_net import common

        assert mamba_mixer._split_tensor_factory is common._split_tensor_factory is split_tensor_factory
    else:
        assert source_of_factory("mamba_mixer") == source_of_factory("gated_delta_net")


def in_proj(cut: Fused, rank: int, parameter: Any) -> Any:
    """The linear layer that has the parameter."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=cut.columns,
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    rows, more = sum(cut.sections), {"init_method": torch.nn.init.zeros_, "tp_group": Group(rank, cut.tp)}
    linear = ColumnParallelLinear(cut.columns, rows, config=config, bias=False, **more)
    assert linear.weight.shape == parameter.shape
    linear.weight = parameter
    return linear


def mamba_module(cut: Fused, rank: int, parameter: Any) -> Any:
    if Version("0.17") > HOST_VERSION:
        pytest.skip("Megatron 0.16 imports Triton with its Mamba mixer; the te lane's newer Megatron runs this")
    from megatron.core.ssm import mamba_mixer

    inner, _, state, _, heads = (s // cut.tp for s in cut.sections)
    conv = inner + 2 * state
    return without_constructor(
        mamba_mixer.MambaMixer,
        tp_group=Group(rank, cut.tp),
        in_proj=in_proj(cut, rank, parameter),
        conv1d_weight=torch.nn.Parameter(torch.zeros(conv, 1, 4)),
        conv1d_bias=torch.nn.Parameter(torch.zeros(conv)),
        d_inner_local_tp=inner,
        ngroups_local_tp=1,
        d_state=state,
        nheads_local_tp=heads,
    )


def gated_delta_net_module(cut: Fused, rank: int, parameter: Any) -> Any:
    qk, _, value, _, heads, _ = cut.sections
    conv = (2 * qk + value) // cut.tp
    module = without_constructor(
        gated_delta_net.GatedDeltaNet,
        config=SimpleNamespace(deterministic_mode=True),
        pg_collection=SimpleNamespace(tp=Group(rank, cut.tp)),
        tp_size=cut.tp,
        cp_size=1,
        in_proj=in_proj(cut, rank, parameter),
        in_proj_dim=sum(cut.sections),
        conv1d=torch.nn.Conv1d(conv, conv, 4, groups=conv, bias=False),
        conv_bias=False,
        conv_dim_local_tp=conv,
        qk_dim=qk,
        v_dim=value,
        num_value_heads=heads,
        qk_dim_local_tp=qk // cut.tp,
        v_dim_local_tp=value // cut.tp,
        num_v_heads_local_tp=heads // cut.tp,
    )
    if hasattr(module, "_setup_variant_attrs"):  # 0.19 keeps names and sizes of sections in attributes
        module._setup_variant_attrs()
    return module


MODULES = {"mamba": mamba_module, "gated_delta_net": gated_delta_net_module}


def built_by(entry: Any) -> list[Any]:
    """The ShardedTensors of an entry."""
    return list(leaves(entry.build())) if hasattr(entry, "build") else [entry]


def geometry(entry: Any) -> list[tuple[Any, ...]]:
    """Key and place of each ShardedTensor of an entry."""
    return [
        (s.key, s.dtype, s.local_shape, s.global_shape, s.global_offset, s.axis_fragmentations, s.replica_id)
        for s in built_by(entry)
    ]


@each_in_proj
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "keyed"])
@pytest.mark.usefixtures("single")
def test_the_modules_make_these_entries(kind: str, stacked: bool) -> None:
    cut = fused(kind, MXFP8, 2, layers=2, stacked=stacked)
    rank = filled(cut, by_layer(MXFP8))[0][1]
    module = MODULES[kind](cut, 1, rank.tensors["1"])
    prefix = cut.key(1).removesuffix("in_proj.weight")
    made = module.sharded_state_dict(prefix, ((0, 1, 2),) if stacked else (), {"dp_cp_group": Group()})
    assert made[cut.key(1)].data is rank.tensors["1"]
    assert geometry(made[cut.key(1)]) == geometry(rank.state_dict["1"])


# Experts

LINEARS = ("linear_fc1", "linear_fc2")
each_module = pytest.mark.parametrize("module", ["sequential", pytest.param("grouped", marks=pytest.mark.te)])
each_form = pytest.mark.parametrize("singleton", [False, True], ids=["stacked", "singleton"])
# (expert-parallel, tensor-parallel) size before and after, and whether every expert has a key of its own
EXPERTS = [
    ((2, 2), (4, 1), False),
    ((1, 1), (2, 1), True),
    ((4, 1), (1, 2), False),
    ((1, 1), (4, 1), True),
    ((2, 1), (1, 1), False),
    ((1, 2), (2, 1), True),
    ((2, 1), (4, 1), False),
    ((4, 1), (1, 1), True),
    ((4, 1), (2, 1), False),
]


@each_module
@pytest.mark.parametrize(
    ("scheme", "source", "target", "singleton"),
    [(scheme, *change) for scheme, change in zip(SCHEMES, EXPERTS, strict=True)],
    ids=scheme_id,
)
@pytest.mark.usefixtures("single")
def test_expert_parallel_size_changes(
    module: str, scheme: Scheme, source: tuple[int, int], target: tuple[int, int], singleton: bool
) -> None:
    before, after = (Experts(*sizes, module, singleton) for sizes in (source, target))
    same_cut = source[1] == target[1]
    ranks = load_cut(save_cut(before, by_layer(scheme)), after, strict_bitwise=same_cut)
    if same_cut:
        assert kinds(ranks) == {"exact"}
    elif source[1] > target[1]:
        assert "requantized" in kinds(ranks)


@each_module
@each_form
@pytest.mark.usefixtures("single")
def test_names_and_keys_of_experts(module: str, singleton: bool) -> None:
    cut = Experts(2, 1, module, singleton)
    ranks, _ = filled(cut, by_layer(MXFP8))
    made = {n: v.key for n, v in ranks[1].state_dict.items() if n.startswith("1.") and "_extra_state" not in n}
    name = "{linear}.weight{i}" if module == "grouped" else "local_experts.{i}.{linear}.weight"
    of_rank_1 = [(linear, i) for linear in LINEARS for i in range(2)]
    assert made == {f"1.{name.format(linear=n, i=i)}": cut.key(n, 1, 2 + i) for n, i in of_rank_1}
    tensors = save(ranks, Recorder(), DIRECTORY).tensors
    fc1, fc2 = (cut.key(linear, 0, 3) for linear in LINEARS)
    if singleton:
        assert fc1 == "decoder.layers.mlp.experts.experts.3.linear_fc1.weight"
        assert {f"{fc1}_w", f"{fc1}_v", fc2} < set(tensors)
        assert tensors[f"{fc1}_v"].global_shape == (2, 48, 32)
    else:
        assert fc1 == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
        assert set(tensors) == {fc1, fc2}
        assert tensors[fc1].global_shape == (2, 4, 96, 32)


@each_form
@pytest.mark.parametrize(("source", "target"), [("grouped", "sequential"), ("sequential", "grouped")])
@pytest.mark.te
@pytest.mark.usefixtures("single", "no_arithmetic")
def test_either_module_loads_what_the_other_one_saved(source: str, target: str, singleton: bool) -> None:
    model = save_cut(Experts(2, 2, source, singleton, layers=1), by_layer(MXFP8))
    load_cut(model, Experts(4, 2, target, singleton, layers=1), strict_bitwise=True)


TE_SCHEMES = [Scheme("per_tensor", "E5M2"), Scheme("blockwise_2d", "E4M3"), MXFP8, NVFP4]


@each_form
@pytest.mark.parametrize("scheme", TE_SCHEMES, ids=scheme_id)
@pytest.mark.te
@pytest.mark.usefixtures("single", "no_arithmetic")
def test_grouped_experts_of_transformer_engine(scheme: Scheme, singleton: bool) -> None:
    before, after = (Experts(ep, 1, "grouped", singleton, layers=1, ffn=32) for ep in (2, 4))
    with te_cpu.current_device_stand_in():
        model = save_cut(before, by_layer(scheme), TRANSFORMER_ENGINE)
        load_cut(model, after, params=TRANSFORMER_ENGINE, strict_bitwise=True)


def by_expert(*schemes: Scheme | None) -> Schemes:
    """One scheme per expert."""
    return lambda part: schemes[part.weight[2]]


# An expert-parallel rank sees one of them alone.
HALF_EACH = {
    "two schemes": (SCHEMES[0], SCHEMES[0], MXFP8, MXFP8),
    "high precision": (None, None, MXFP8, MXFP8),
}
each_half = pytest.mark.parametrize("schemes", HALF_EACH.values(), ids=HALF_EACH.keys())


@each_half
@pytest.mark.usefixtures("single")
def test_experts_of_one_layer_that_differ_are_refused(schemes: tuple[Scheme | None, ...]) -> None:
    backend = Recorder()
    ranks, _ = filled(Experts(2), by_expert(*schemes))
    with pytest.raises(PlanningError) as caught:
        save(ranks, backend, DIRECTORY)
    assert {p.key for p in caught.value.problems} == {Experts(2).key(linear, 0, 0) for linear in LINEARS}
    found = "high precision on rank 0, quantized on rank 1" if schemes[0] is None else "per_tensor/E4M3 and mxfp8/E4M3"
    assert all(found in p.found for p in caught.value.problems)
    assert not backend.chunks


@each_half
@each_form
@pytest.mark.usefixtures("single")
def test_experts_that_are_the_first_axis_may_differ(schemes: tuple[Scheme | None, ...], singleton: bool) -> None:
    before, after = (Experts(ep, singleton=singleton, stacked=False) for ep in (2, 4))
    model = save_cut(before, by_expert(*schemes))
    quantized = [e for e, s in enumerate(schemes) if s is not None]
    keys = [before.key(linear, layer, 0) for layer in (0, 1) for linear in LINEARS]
    stacks = {key: list(stack.quantized) for key, stack in model.manifest.mixed.items()}
    assert stacks == ({} if singleton else dict.fromkeys(keys, quantized))
    load_cut(model, after, strict_bitwise=True)


@each_form
@pytest.mark.usefixtures("single")
def test_layers_of_experts_that_differ(singleton: bool) -> None:
    schemes = by_layer(NVFP4_2D, MXFP8)
    model = save_cut(Experts(4, singleton=singleton), schemes)
    assert model.manifest.mixed
    load_cut(model, Experts(2, singleton=singleton), schemes, strict_bitwise=True)
    ranks = load_cut(model, Experts(1, singleton=singleton), by_layer(None, MXFP8))
    assert kinds(ranks) == {"dequantized", "exact"}


# Optimizers

CUTS: dict[str, Cut] = {
    **{kind: fused(kind, MXFP8, 2, layers=2) for kind in KINDS},
    "experts": Experts(2, 2),
    "experts singleton": Experts(2, 2, singleton=True),
}


def optimizer_entries(entries: Any, parameters: list[torch.Tensor], moments: list[torch.Tensor]) -> dict[str, Any]:
    """An optimizer's state dict with one moment per parameter, its entries made by Megatron from the model's."""
    found = get_param_id_to_sharded_param_map(entries, parameters)
    assert [id(found[number].data) for number in range(len(found))] == [id(p) for p in parameters]
    state = {number: {"step": 1.0, "exp_avg": moment} for number, moment in enumerate(moments)}
    made = {"state": state, "param_groups": [{"params": list(state)}]}
    optim_state_to_sharding_state(made, found, ("step",))
    return made


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("schemes", [by_layer(MXFP8), MIXED], ids=["one scheme", "mixed"])
@pytest.mark.usefixtures("single")
def test_optimizer_entries_are_those_of_the_plain_entries(cut: Cut, schemes: Schemes) -> None:
    ranks = filled(cut, schemes)[0]
    entries = {f"{n}.{name}": ranks[n].state_dict[name] for n, name, _ in held(cut)}
    parameters = [ranks[n].tensors[name] for n, name, _ in held(cut)]
    moments = [torch.randn(p.shape) for p in parameters]
    expanded = expand_quantized(entries)
    assert {entry.key for entry in expanded.values()} == {entry.key for entry in entries.values()}
    plain, ours = (optimizer_entries(e, parameters, moments)["state"] for e in (entries, expanded))
    for number, moment in enumerate(moments):
        before, after = (state[number]["exp_avg"] for state in (plain, ours))
        assert geometry(after) == geometry(before)
        assert [raw(s.data).tobytes() for s in built_by(after)] == [raw(s.data).tobytes() for s in built_by(before)]
        assert all(s.key.startswith("optimizer.state.exp_avg.decoder.layers.") for s in built_by(after))
        assert sum(s.data.numel() for s in built_by(after)) == moment.numel()


# Through files

FILES: dict[str, tuple[Cut, Cut, Schemes]] = {
    **{
        kind: (fused(kind, scheme, 2), fused(kind, scheme, 1), by_layer(scheme))
        for kind, scheme in zip(KINDS, SCHEMES[3:7], strict=True)
    },
    "mixed": (fused("mamba", MXFP8, 1, layers=2), fused("mamba", MXFP8, 2, layers=2), MIXED),
    "experts": (Experts(1, 2), Experts(2, 1), by_layer(SCHEMES[0])),
    "experts singleton": (Experts(4, singleton=True), Experts(2, singleton=True), MIXED),
}


def together(cut: Cut, ranks: list[Rank], moments: dict[Any, Any]) -> dict[str, Any]:
    """All ranks in one state dict of one process, with an optimizer's; `moments` are whole ones by weight."""
    model, parameters, own = {}, [], []
    for number, name, part in held(cut):
        model[f"{number}.{name}"] = ranks[number].state_dict[name]
        parameters.append(ranks[number].tensors[name])
        own.append(torch.from_numpy(moments[part.weight][np.ix_(*part.indices)]))
    return {"model": model, "optimizer": optimizer_entries(model, parameters, own)}


# Megatron 0.16 builds these where one process holds several shards of a key.
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.parametrize(("source", "target", "schemes"), FILES.values(), ids=FILES.keys())
@pytest.mark.usefixtures("single")
def test_through_files(source: Cut, target: Cut, schemes: Schemes, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shapes = {part.weight: part.shape for _, _, part in held(source)}
    moments = {weight: rng.standard_normal(shape, np.float32) for weight, shape in shapes.items()}
    saving, whole = filled(source, schemes)
    megatron_fp8_dist.save(together(source, saving, moments), tmp_path)

    loading = empty(target, schemes)
    blank = {weight: np.zeros(shape, np.float32) for weight, shape in shapes.items()}
    loaded = megatron_fp8_dist.load(together(target, loading, blank), tmp_path)
    report = megatron_fp8_dist.last_report()
    assert isinstance(report, LoadReport)
    assert report.exact + report.requantized == sum(schemes(part) is not None for _, _, part in held(target))
    model = Saved(schemes, whole, Recorder(), megatron_fp8_dist.read_manifest(tmp_path))
    blocks = 0
    for index, (number, name, part) in enumerate(held(target)):
        moment, expected = loaded["optimizer"]["state"][index]["exp_avg"], moments[part.weight]
        np.testing.assert_array_equal(moment.numpy().view(np.uint32), expected[np.ix_(*part.indices)].view(np.uint32))
        rank, scheme = loading[number], schemes(part)
        rank.loaded[name] = loaded["model"][f"{number}.{name}"]
        if scheme is not None:
            again = conform(model.sides(part), scheme).blocks
            rank.outcomes[name] = Outcome("requantized" if again else "exact", again)
            blocks += again
        check(rank, name, part, model, scheme, BLOCK_SCALED)
    assert sum(report.requantized_blocks.values()) == blocks
