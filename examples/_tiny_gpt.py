"""A Megatron GPT small enough for a CPU, its linear weights quantized, and a plain loop that trains it for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from _results import Layout
from _weights import WeightKind, quantize
from megatron_fp8_dist import BlockScaledTensor
from megatron_fp8_dist.te.tensors import restore

LAYERS = 4
HIDDEN = 256
# Each rank of TP4 has 128 channels of attention and of the MLP, and 128 is the largest block of any scheme: all shards,
# and the two halves of SwiGLU in them, begin and end on block edges.
FFN_HIDDEN = 512
HEADS = 8
KV_GROUPS = 4
KV_CHANNELS = 64
VOCABULARY = 256
SEQUENCE = 64
GLOBAL_BATCH = 8
MICRO_BATCH = 2
LEARNING_RATE = 0.03


def build_model(layout: Layout, seed: int) -> GPTModel:
    """This rank's part of the model, all of it in BF16."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    # Pipeline stages must not draw the same numbers.
    torch.manual_seed(seed + parallel_state.get_pipeline_model_parallel_rank())
    config = _config(layout)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config),
        # Named because Megatron would choose Transformer Engine's norm where that is installed, and it needs a GPU.
        layer_norm=WrappedTorchNorm,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(torch.bfloat16)


def _config(layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN_HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_GROUPS,
        kv_channels=KV_CHANNELS,
        normalization="RMSNorm",
        # SwiGLU: Megatron stores gate and up as two fragments of one weight.
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        use_cpu_initialization=True,
        # Kernels that exist for a GPU only.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def _quantize_linears(model: GPTModel, kind: WeightKind) -> None:
    """Quantize the linear weights of the decoder."""
    for module in model.decoder.modules():
        if isinstance(module, tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear):
            weight = kind.parameter(BlockScaledTensor.quantize(module.weight, kind.scheme))
            tensor_parallel.copy_tensor_model_parallel_attributes(weight, module.weight)
            module.weight = weight


class MasterSGD:
    """SGD on FP32 master weights.

    It takes over a model in BF16: it keeps a master of every weight, and quantizes the linear weights. After each step
    every weight is written again from its master, in place: BF16 ones rounded, quantized ones quantized.
    """

    def __init__(self, model: GPTModel, kind: WeightKind) -> None:
        self._kind = kind
        self._masters = [p.detach().float() for p in model.parameters()]
        _quantize_linears(model, kind)
        self._parameters = list(model.parameters())
        self.write_back()

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients of this rank, which it averages over data-parallel replicas and drops."""
        group = parallel_state.get_data_parallel_group()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            gradient = parameter.grad.float()
            dist.all_reduce(gradient, group=group)
            master.sub_(gradient, alpha=LEARNING_RATE / group.size())
            parameter.grad = None
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the weights of the model from the masters, in place."""
        pairs = list(zip(self._parameters, self._masters, strict=True))
        for parameter, master in pairs:
            if not self._kind.owns(parameter):
                parameter.copy_(master)
        quantized = [(p, m) for p, m in pairs if self._kind.owns(p)]
        # The largest magnitude of a weight is that of all its tensor-parallel shards.
        amax = torch.stack([m.abs().max() for _, m in quantized])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
        for (parameter, master), largest in zip(quantized, amax, strict=True):
            restore(parameter, quantize(master, self._kind.scheme, largest))

    def sharded_state_dict(self, model_entries: dict[str, Any]) -> dict[str, Any]:
        """The masters as Megatron's optimizers put their state into a checkpoint: on top of the model's entries."""
        state: dict[str, Any] = {
            "state": {i: {"fp32_param": master} for i, master in enumerate(self._masters)},
            "param_groups": [{"lr": LEARNING_RATE, "params": list(range(len(self._masters)))}],
        }
        optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(model_entries, self._parameters))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the masters from a loaded state. The weights of the model stay as they are."""
        for i, master in enumerate(self._masters):
            master.copy_(state["state"][i]["fp32_param"])


class Text:
    """Batches of byte-level tokens from one file."""

    def __init__(self, path: Path) -> None:
        self._tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    def microbatches(self, step: int) -> list[torch.Tensor]:
        """What this rank's data-parallel replica reads in a step; all replicas together read the same in any layout."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._tokens) - SEQUENCE, (GLOBAL_BATCH,), generator=generator)
        rows = torch.stack([self._tokens[s : s + SEQUENCE + 1] for s in starts])
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return list(rows[replica::replicas].split(MICRO_BATCH))


def train_step(model: GPTModel, optimizer: MasterSGD, text: Text, step: int) -> float:
    """Forward, backward and update; the loss, averaged over the global batch, is the same on all ranks."""
    batches = text.microbatches(step)
    outputs = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    optimizer.step()
    # Only the last pipeline stage has outputs, and each of its tensor-parallel ranks has them all.
    loss = torch.tensor([sum(outputs), len(outputs)], dtype=torch.float64)
    dist.all_reduce(loss)
    return float(loss[0] / loss[1])


def _forward(batches: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    rows = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(rows), SEQUENCE)
    hidden_from = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(rows[:, :-1], positions, hidden_from, labels=rows[:, 1:]), _mean_loss


def _mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, float]:
    loss = per_token.float().mean()
    # A number, because the schedule goes on to divide the tensor in place.
    return loss, loss.item()
