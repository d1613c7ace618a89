"""What the ranks of the layout tests do: save and load the toy, or a Megatron GPT, at their place of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fp8_dist import expand_quantized, last_report, load, save
from megatron_fp8_dist.errors import PlanningError
from tests import toy_model
from tests.toy_model import Layout, Weight


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to on one rank."""

    wrong: list[str]
    """Parameters whose bytes are not the whole model's."""
    report: dict[str, Any]


def report() -> dict[str, Any]:
    """The newest report."""
    found = last_report()
    assert found is not None
    return found.to_dict()


def save_toy(
    directory: str, kind: str, layout: Layout, stacked: bool = True, high_precision: tuple[int, ...] = ()
) -> None:
    """Save the toy."""
    model = toy_model.Toy(kind, layout.place(dist.get_rank()), high_precision=high_precision)
    save(model.sharded_state_dict(stacked), directory)


def load_toy(
    directory: str, kind: str, layout: Layout, stacked: bool = True, high_precision: tuple[int, ...] = ()
) -> Loaded:
    """Load into a blank toy."""
    model = toy_model.Toy(kind, layout.place(dist.get_rank()), blank=True, high_precision=high_precision)
    model.load_state_dict(load(model.sharded_state_dict(stacked), directory))
    return Loaded(model.wrong(high_precision), report())


def expand_in_a_group(directory: str, kind: str) -> tuple[set[str], dict[str, Any], tuple[int, ...]] | None:
    """Ranks 2 and 3 of four, which are 0 and 1 in a group of their own, expand for a save and for a load.

    Returns:
        The keys that a save would write, the plan's report, and the ranks that an error of rank 3 alone names; None on
        the ranks outside of the group.
    """
    members = [2, 3]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    place = Layout(pp=2).place(dist.get_rank(group))
    # The second pipeline stage holds no quantized weight, and must learn of the first one's.
    model = toy_model.Toy(kind, place, high_precision=(2, 3))
    expanded = expand_quantized(model.sharded_state_dict(), process_group=group)
    built = [v.build() if hasattr(v, "build") else v for v in expanded.values()]
    keys = {leaf.key for leaf in nested_values({"built": built})}
    wanted = toy_model.Toy(kind, place, blank=True, high_precision=(2, 3))
    expand_quantized(wanted.sharded_state_dict(), checkpoint_dir=directory, process_group=group)
    planned = report()
    weight = toy_model.quantized(kind, torch.zeros(2, 2, dtype=torch.uint8), 1.0)
    loose = {"loose": weight} if dist.get_rank() == members[1] else {}
    try:
        expand_quantized(wanted.sharded_state_dict() | loose, process_group=group)
    except PlanningError as e:
        return keys, planned, e.problems[0].ranks
    raise AssertionError("no error")


HIDDEN = 32
GPT_WEIGHTS = {
    "self_attention.linear_qkv": Weight("qkv", (3 * HIDDEN, HIDDEN), 0),
    "self_attention.linear_proj": Weight("proj", (HIDDEN, HIDDEN), 1),
    "mlp.linear_fc1": Weight("fc1", (4 * HIDDEN, HIDDEN), 0, swiglu=True),
    "mlp.linear_fc2": Weight("fc2", (HIDDEN, 2 * HIDDEN), 1),
}


def _gpt(layout: Layout) -> GPTModel:
    parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    config = TransformerConfig(
        num_layers=toy_model.NUM_LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    block = TransformerBlockSubmodules(
        layer_specs=[get_gpt_layer_local_spec()] * get_num_layers_to_build(config), layer_norm=WrappedTorchNorm
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=64,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).to(torch.bfloat16)


def _fill_gpt(model: GPTModel, kind: str, place: toy_model.Place, *, blank: bool) -> None:
    """Put quantized weights in place of the layers' linear ones."""
    for layer in model.decoder.layers:
        for name, weight in GPT_WEIGHTS.items():
            number = layer.layer_number - 1
            codes = weight.part(weight.codes(number), place)
            module = layer.get_submodule(name)
            assert codes.shape == module.weight.shape
            codes, scale_inv = (torch.full_like(codes, 0xAA), 1.0) if blank else (codes, weight.scale_inv(number))
            parameter = toy_model.quantized(kind, codes, scale_inv)
            tensor_parallel.copy_tensor_model_parallel_attributes(parameter, module.weight)
            module.weight = parameter


def _wrong_in_gpt(model: GPTModel, place: toy_model.Place) -> list[str]:
    wrong = []
    for layer in model.decoder.layers:
        for name, weight in GPT_WEIGHTS.items():
            number = layer.layer_number - 1
            codes = weight.part(weight.codes(number), place)
            right = toy_model.raw(codes, torch.tensor([weight.scale_inv(number)]))
            if toy_model.content(layer.get_submodule(name).weight) != right:
                wrong.append(f"{number}.{name}")
    return wrong


def save_gpt(directory: str, kind: str, layout: Layout) -> None:
    """Save a Megatron GPT."""
    model = _gpt(layout)
    _fill_gpt(model, kind, layout.place(dist.get_rank()), blank=False)
    save(model.sharded_state_dict(), directory)


def load_gpt(directory: str, kind: str, layout: Layout) -> Loaded:
    """Load into a blank Megatron GPT."""
    place = layout.place(dist.get_rank())
    model = _gpt(layout)
    _fill_gpt(model, kind, place, blank=True)
    model.load_state_dict(load(model.sharded_state_dict(), directory))
    return Loaded(_wrong_in_gpt(model, place), report())
