"""What the ranks of the latent-attention test do: save and load Megatron's own fused projection at their place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, exact_ops, last_report, load, save
from megatron_fp8_dist.te import tensors
from tests import te_cpu
from tests.elementwise import raw
from tests.te_cpu import Kind

HIDDEN = 96
ROWS = {"q": 128, "kv": 64}
"""Rows of the two projections; they end on the edges of MXFP8's blocks at TP 1 and 2."""


def _attention(tp: int) -> Any:
    """Megatron's fused latent attention, built on the CPU; core attention has no part in it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    parallel_state.initialize_model_parallel(tp)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        q_lora_rank=ROWS["q"],
        kv_lora_rank=ROWS["kv"] - 16,
        qk_pos_emb_head_dim=16,
        qk_head_dim=32,
        v_head_dim=32,
        rope_type="rope",
        multi_latent_attention=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    column = dict.fromkeys(("linear_q_proj", "linear_qkv_down_proj", "linear_q_up_proj", "linear_kv_up_proj"))
    submodules = MLASelfAttentionSubmodules(
        **dict.fromkeys(column, ColumnParallelLinear),
        linear_proj=RowParallelLinear,
        core_attention=IdentityOp,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    with te_cpu.current_device_stand_in():
        return FusedMLASelfAttention(config, submodules, layer_number=1, attn_mask_type=AttnMaskType.causal)


def _whole(scheme: Any) -> list[BlockScaledTensor]:
    """Both projections of the whole model; one scale for all where the scheme has one."""
    values = torch.randn(sum(ROWS.values()), HIDDEN, generator=torch.Generator().manual_seed(3))
    return list(BlockScaledTensor.quantize(values, scheme).split(list(ROWS.values())))


def _fill(attention: Any, kind: Kind, tp: int, *, blank: bool) -> dict[str, bytes]:
    """Give the fused projection a Transformer Engine weight; returns the bytes that are right for this rank."""
    linear = attention.linear_qkv_down_proj
    shape = tuple(linear.weight.shape)
    weight: Any = te_cpu.float8(torch.zeros(shape, dtype=torch.uint8), 1.0) if kind.name == "per_tensor" else None
    weight = te_cpu.empty(kind, shape) if weight is None else weight
    scheme = tensors.scheme_of(weight)
    mine = torch.cat([part.chunk(tp)[dist.get_rank()] for part in _whole(scheme)])
    assert isinstance(mine, BlockScaledTensor)
    right, again = mine.conform(scheme)
    assert again == 0
    if not blank:
        tensors.restore(weight, right)
    linear.weight = nn.Parameter(weight)
    return content(right)


def content(tensor: torch.Tensor) -> dict[str, bytes]:
    """Every byte of a quantized tensor."""
    return {name: raw(component).tobytes() for name, component in tensors.wrap(tensor).components().items()}


def save_attention(directory: str, kind: Kind, tp: int) -> None:
    """Save the attention."""
    attention = _attention(tp)
    _fill(attention, kind, tp, blank=False)
    with exact_ops():
        state = attention.sharded_state_dict(prefix="self_attention.")
    save(state, directory)


def load_attention(directory: str, kind: Kind, tp: int) -> tuple[bool, int]:
    """Load into a blank attention, and let it take the state as Megatron's models do.

    Returns:
        Whether every byte is right before and after that, and how many parameters the load calls exact.
    """
    attention = _attention(tp)
    right = _fill(attention, kind, tp, blank=True)
    weight = attention.linear_qkv_down_proj.weight
    with exact_ops():
        state = attention.sharded_state_dict(prefix="self_attention.")
    state = load(state, directory, options=LoadOptions(strict_bitwise=True))
    found = content(weight)
    weights = {k.removeprefix("self_attention."): v for k, v in state.items() if not k.endswith("_extra_state")}
    # Megatron maps the extra states of the two projections nowhere; they are empty here.
    keys = attention.load_state_dict(weights, strict=False)
    assert all(k.endswith("_extra_state") for k in (*keys.missing_keys, *keys.unexpected_keys))
    report = last_report()
    assert report is not None
    return found == right == content(weight), report.to_dict()["exact"]
