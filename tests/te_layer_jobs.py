"""What the ranks of the layer tests do: Megatron GPTs of Transformer Engine layers, saved here and loaded there.

What a parameter holds follows from its name, layer and expert, so a rank of any layout can say what it should hold.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fp8_dist import Scheme, last_report, load, save
from tests import elements, elementwise, fakemodel, formats, te_cpu
from tests.elements import Side, Sides
from tests.elementwise import Elements, raw
from tests.fakemodel import Layout
from tests.te_cpu import Kind, Places

NUM_LAYERS = 2
HIDDEN = 256
FFN = 512
NUM_HEADS = 4
HEAD_SIZE = 128
"""With this every cut between four tensor-parallel ranks is on an edge of a 128x128 block."""
VOCABULARY = 512
NUM_EXPERTS = 4
EXPERT_FFN = 256

OWN_PICKLES = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Transformer Engine's word for: the pickles in delayed scaling's extra state are our own."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One of Megatron's recipes with quantized parameters."""

    kind: Kind
    """What its weights are."""
    config: Mapping[str, Any]
    """Fields of TransformerConfig."""
    experts: bool = False
    """Whether the layers have experts in one grouped GEMM each."""


RECIPES = {
    "delayed": Recipe(Kind("per_tensor"), {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param": True}),
    "tensorwise": Recipe(Kind("per_tensor"), {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}),
    "blockwise": Recipe(Kind("blockwise_2d"), {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}),
    "mxfp8": Recipe(Kind("mxfp8"), {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}),
    "nvfp4": Recipe(Kind("nvfp4_2d", "E2M1"), {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": True}),
}
RECIPES["mxfp8 experts"] = replace(RECIPES["mxfp8"], experts=True)


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the model, of each layer, or of each expert, whole."""

    cut: str
    """How tensor-parallel ranks cut it, see `fakemodel.cut_indices`; "norm" is replicated."""
    shape: tuple[int, ...]
    quantized: bool = False
    expert: bool = False

    def window(self) -> Any:
        """Index of what this rank holds of it."""
        if self.expert:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            size = parallel_state.get_expert_tensor_parallel_world_size()
        else:
            rank = parallel_state.get_tensor_model_parallel_rank()
            size = parallel_state.get_tensor_model_parallel_world_size()
        return np.ix_(*fakemodel.cut_indices(self.cut, self.shape, rank, size))


WEIGHTS = {
    "embedding.word_embeddings.weight": Weight("column", (VOCABULARY, HIDDEN)),
    "self_attention.linear_qkv.layer_norm_weight": Weight("norm", (HIDDEN,)),
    "self_attention.linear_qkv.weight": Weight("column", (3 * NUM_HEADS * HEAD_SIZE, HIDDEN), quantized=True),
    "self_attention.linear_proj.weight": Weight("row", (HIDDEN, NUM_HEADS * HEAD_SIZE), quantized=True),
    "mlp.linear_fc1.layer_norm_weight": Weight("norm", (HIDDEN,)),
    "mlp.linear_fc1.weight": Weight("swiglu", (2 * FFN, HIDDEN), quantized=True),
    "mlp.linear_fc2.weight": Weight("row", (HIDDEN, FFN), quantized=True),
    "pre_mlp_layernorm.weight": Weight("norm", (HIDDEN,)),
    "mlp.router.weight": Weight("norm", (NUM_EXPERTS, HIDDEN)),
    "mlp.experts.linear_fc1.weight": Weight("swiglu", (2 * EXPERT_FFN, HIDDEN), quantized=True, expert=True),
    "mlp.experts.linear_fc2.weight": Weight("row", (HIDDEN, EXPERT_FFN), quantized=True, expert=True),
    "decoder.final_layernorm.weight": Weight("norm", (HIDDEN,)),
    "output_layer.weight": Weight("column", (VOCABULARY, HIDDEN)),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of this rank's model."""

    name: str
    """Of its weight."""
    layer: int
    """In the whole model; 0 where there is none."""
    expert: int
    """Likewise."""
    parameter: Any

    def __str__(self) -> str:
        return f"{self.name} {self.layer} {self.expert}"

    @property
    def weight(self) -> Weight:
        """What it is a part of."""
        return WEIGHTS[self.name]

    def values(self) -> torch.Tensor:
        """What it holds in high precision."""
        whole = _draw(str(self)).standard_normal(self.weight.shape, np.float32)
        return torch.from_numpy(whole[self.weight.window()]).to(self.parameter.dtype)

    def sides(self, kind: Kind, shards: int) -> Sides:
        """What it holds where it is quantized. See `_whole`."""
        return {n: s[self.weight.window()] for n, s in _whole(kind, self.weight, shards, _draw(str(self))).items()}


def _draw(name: str) -> np.random.Generator:
    """Random numbers of this name alone."""
    return np.random.default_rng(list(name.encode()))


def _whole(kind: Kind, weight: Weight, shards: int, rng: np.random.Generator) -> Sides:
    """A whole weight: any codes, and scales on the blocks of the whole, by direction that is not derived.

    With per-tensor scaling each of so many tensor-parallel `shards` has a scale of its own.
    """
    scheme = Scheme(kind.name, kind.element)
    codes = rng.integers(0, 256, weight.shape, dtype=np.uint8)
    if kind.name == "per_tensor":
        if shards > 1:
            codes[codes & 0x7F == 0x7F] = 0  # a NaN would hide the largest magnitude
        scales = fakemodel.scales(weight.cut, weight.shape, scheme, shards, rng).view(np.float32)
        return {"rowwise": Side(codes, scales, np.ones(weight.shape, np.float32))}
    blocks, amax = formats.rule(kind.name, kind.element).blocks, float(rng.uniform(0.5, 2.0))
    sides = elements.random_sides(scheme, weight.shape, rng, blocks, choices=8, amax=amax)
    most = 16 if kind.packed else 256
    return {n: replace(s, codes=rng.integers(0, most, weight.shape, dtype=np.uint8)) for n, s in sides.items()}


def _build(recipe: Recipe, layout: Layout) -> GPTModel:
    """This rank's part of the model, its quantized parameters garbage."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
    experts = {
        "num_moe_experts": NUM_EXPERTS,
        "moe_grouped_gemm": True,
        "moe_ffn_hidden_size": EXPERT_FFN,
        "expert_model_parallel_size": layout.ep,
    }
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=NUM_HEADS,
        kv_channels=HEAD_SIZE,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.tp > 1,
        **recipe.config,
        **(experts if recipe.experts else {}),
    )
    layers = get_gpt_layer_with_transformer_engine_spec(NUM_EXPERTS if recipe.experts else None, recipe.experts)
    with te_cpu.building_stand_ins():
        return GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=VOCABULARY,
            max_sequence_length=16,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )


_NAME = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.+?)(\d*)")


def _located(model: GPTModel, name: str) -> tuple[str, int, int]:
    """(name, layer, expert) in the whole model of a module's or a parameter's name in this rank's part."""
    found = _NAME.fullmatch(name)
    assert found is not None
    layer, name, expert = found.groups()
    per_rank = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * per_rank
    return (
        name,
        model.decoder.layers[int(layer)].layer_number - 1 if layer else 0,
        first_expert + int(expert) if expert else 0,
    )


def _slots(model: GPTModel) -> Iterator[Slot]:
    for name, parameter in model.named_parameters():
        yield Slot(*_located(model, name), parameter)


def _fill(model: GPTModel, kind: Kind, shards: int) -> None:
    """Give every parameter what it should hold; the pads of scales stay garbage."""
    for slot in _slots(model):
        if not slot.weight.quantized:
            slot.parameter.data.copy_(slot.values())
            continue
        sides = slot.sides(kind, shards)
        for direction in te_cpu.DIRECTIONS:
            side = sides.get(direction, sides["rowwise"])
            Places(slot.parameter, kind, direction).write(side.codes, side.scale)
            if kind.packed:
                getattr(slot.parameter, f"_amax_{direction}").fill_(float(side.amax[0, 0]))


def _merged(side: Side) -> Side:
    """Parts of per-tensor scaling as one part: as they are where their scales are equal, else quantized once."""
    source = Elements(side.codes, side.scale.view(np.uint32), np.ones(side.codes.shape, np.bool_))
    codes, scale, _ = elementwise.conform(source, "E4M3", "E4M3", (None, None))
    return Side(codes, np.broadcast_to(scale.view(np.float32), codes.shape), side.amax)


def _wrong(slot: Slot, kind: Kind, shards: int) -> Iterator[str]:
    """What a parameter should not hold."""
    if not slot.weight.quantized:
        if raw(slot.parameter).tobytes() != raw(slot.values()).tobytes():
            yield f"{slot}: values"
        return
    sides = slot.sides(kind, shards)
    if kind.name == "per_tensor":
        sides = {"rowwise": _merged(sides["rowwise"])}
        # Transformer Engine makes it again from the codes when it needs it.
        if slot.parameter._transpose is None or not slot.parameter._transpose_invalid:
            yield f"{slot}: a transpose that is not marked invalid"
    for direction in compared(kind):
        side, places = sides.get(direction, sides["rowwise"]), Places(slot.parameter, kind, direction)
        found = {
            "codes": (places.codes(), side.codes),
            "scales": (places.scales(), side.scale),
            "pads": (places.pads(), np.zeros_like(places.pads())),
        }
        if kind.packed:
            found["amax"] = (getattr(slot.parameter, f"_amax_{direction}").numpy(), side.amax[0, :1])
        yield from (
            f"{slot}: {direction} {n}" for n, (mine, right) in found.items() if mine.tobytes() != right.tobytes()
        )


def compared(kind: Kind) -> tuple[str, ...]:
    """The directions whose bytes are compared after a load."""
    return ("rowwise",) if kind.name == "per_tensor" else te_cpu.DIRECTIONS


# Extra state


def _scaling_state(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what delayed scaling keeps in the modules; nothing with other recipes."""
    for name, module in model.named_modules():
        for group, state in getattr(module, "fp8_meta", {}).items():
            for field in ("scale", "amax_history"):
                if group.startswith("scaling_") and hasattr(state, field):
                    yield f"{_located(model, name)} {group} {field}", getattr(state, field)


def _state_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """What it should hold."""
    return torch.from_numpy(_draw(name).random(tuple(like.shape), np.float32))


def _state_dict(model: GPTModel) -> dict[str, Any]:
    """The sharded state dict of a model that has run at least once, so that delayed scaling's state is in it."""
    for module in model.modules():
        if hasattr(module, "fp8_meta"):
            module.fp8_meta["fp8_checkpoint"] = True
    with te_cpu.extra_state_stand_in():
        found: dict[str, Any] = model.sharded_state_dict()
        return found


ExtraStates = dict[tuple[str, tuple[int, ...]], bytes]
"""Key and offset of a ShardedObject -> its bytes."""


def _extra_states(state_dict: Mapping[str, Any]) -> ExtraStates:
    """Those that all ranks save."""
    own = {
        (entry.key, entry.global_offset): entry.data.numpy().tobytes()
        for entry in state_dict.values()
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id)
    }
    everywhere: list[ExtraStates] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {place: content for states in everywhere for place, content in states.items()}


# The job


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to on one rank."""

    wrong: list[str]
    """What is not as it should be."""
    classes: Counter[str]
    """Class -> number of quantized parameters of it."""
    codes: int
    """Codes that were compared, in one direction or in two."""
    extra_states: dict[str, int]
    """Name -> bytes of an extra state that was compared."""
    report: dict[str, Any]


def save_and_load(directory: str, name: str, saved: Layout, loaded: Sequence[Layout], shards: int = 1) -> list[Loaded]:
    """Save the model at one layout, and load it at others.

    Args:
        directory: for the checkpoint.
        name: of the recipe.
        saved: layout to save at.
        loaded: layouts to load at, one after another.
        shards: see `_whole`.
    """
    recipe = RECIPES[name]
    model = _build(recipe, saved)
    _fill(model, recipe.kind, shards)
    for state, tensor in _scaling_state(model):
        tensor.copy_(_state_of(state, tensor))
    state_dict = _state_dict(model)
    save(state_dict, directory)
    states = _extra_states(state_dict)
    return [_load(directory, recipe, layout, shards, states) for layout in loaded]


def _load(directory: str, recipe: Recipe, layout: Layout, shards: int, states: ExtraStates) -> Loaded:
    model = _build(recipe, layout)
    wanted = _state_dict(model)
    returned = load(wanted, directory)
    report = last_report()
    assert report is not None
    extra = {n: states[v.key, v.global_offset] for n, v in wanted.items() if isinstance(v, ShardedObject)}
    wrong = [n for n, content in extra.items() if returned[n].numpy().tobytes() != content]

    with te_cpu.extra_state_stand_in(), mock.patch.dict(os.environ, OWN_PICKLES):
        model.load_state_dict(returned)
    wrong += [n for n, tensor in _scaling_state(model) if raw(tensor).tobytes() != raw(_state_of(n, tensor)).tobytes()]
    wrong += [problem for slot in _slots(model) for problem in _wrong(slot, recipe.kind, shards)]
    quantized = [slot.parameter for slot in _slots(model) if slot.weight.quantized]
    return Loaded(
        wrong,
        Counter(type(p).__name__ for p in quantized),
        sum(p.numel() for p in quantized) * len(compared(recipe.kind)),
        {n: len(content) for n, content in extra.items()},
        report.to_dict(),
    )
