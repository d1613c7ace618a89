"""What a checkpoint that goes through BF16 does to one MXFP8 weight, and what this package does.

    python examples/mxfp8_roundtrip.py

A weight of 128 x 256 values is quantized, then once dequantized to BF16 and quantized again, as stock Megatron does
between a save and a load, and once saved and loaded. One process on the CPU; it takes seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, Scheme, load, save

MXFP8 = Scheme("mxfp8", "E4M3")


def main() -> None:
    """Print what changed on either way."""
    torch.manual_seed(0)
    weight = BlockScaledTensor.quantize(0.02 * torch.randn(128, 256), MXFP8)
    detour = BlockScaledTensor.quantize(weight.dequantize(torch.bfloat16), MXFP8)
    print(f"MXFP8 weight of 128 x 256, rowwise: {weight.numel()} codes, {weight.numel() // 32} scales")
    print(f"through BF16 and back changes   {_changed(weight, detour)}")
    print(f"through save() and load()       {_changed(weight, _through_a_checkpoint(weight))}")


def _through_a_checkpoint(weight: BlockScaledTensor) -> BlockScaledTensor:
    """The weight as another parameter gets it from a checkpoint."""
    empty = {name: torch.zeros_like(component) for name, component in weight.components().items()}
    loaded = BlockScaledTensor.from_components(MXFP8, empty)
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(prefix="mxfp8_roundtrip-") as folder:
            save(_entries(weight), Path(folder))
            load(_entries(loaded), Path(folder), options=LoadOptions(strict_bitwise=True))
    finally:
        if alone:
            dist.destroy_process_group()
    return loaded


def _entries(weight: BlockScaledTensor) -> dict[str, ShardedTensor]:
    return {"weight": ShardedTensor.from_rank_offsets("decoder.weight", nn.Parameter(weight))}


def _changed(before: BlockScaledTensor, after: BlockScaledTensor) -> str:
    """How many bytes differ, rowwise."""
    counts = (
        int((before.components()[name] != after.components()[name]).sum())
        for name in ("rowwise_data", "rowwise_scale_inv")
    )
    return "{} codes, {} scales".format(*counts)


if __name__ == "__main__":
    main()
