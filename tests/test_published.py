"""The case that the README quotes: what a detour through BF16 does to one MXFP8 tensor, and what a checkpoint does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_fp8_dist import BlockScaledTensor, Scheme, load, save
from tests.elementwise import component_bytes

EXAMPLE = Path(__file__).parent.parent / "examples" / "mxfp8_roundtrip.py"
CODES, SCALES = 1664, 52


def published() -> BlockScaledTensor:
    torch.manual_seed(0)
    return BlockScaledTensor.quantize(0.02 * torch.randn(128, 256), Scheme("mxfp8", "E4M3"))


def changed(before: BlockScaledTensor, after: BlockScaledTensor, component: str) -> int:
    return int((before.components()[component] != after.components()[component]).sum())


def test_the_detour_through_bf16() -> None:
    before = published()
    after = BlockScaledTensor.quantize(before.dequantize(torch.bfloat16), before.scheme)
    assert (changed(before, after, "rowwise_data"), changed(before, after, "rowwise_scale_inv")) == (CODES, SCALES)


@pytest.mark.usefixtures("single")
def test_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    before = published()
    zeros = {name: torch.zeros_like(c) for name, c in before.components().items()}
    after = BlockScaledTensor.from_components(before.scheme, zeros)
    save({"w": ShardedTensor.from_rank_offsets("w", torch.nn.Parameter(before))}, tmp_path)
    load({"w": ShardedTensor.from_rank_offsets("w", torch.nn.Parameter(after))}, tmp_path)
    assert component_bytes(after) == component_bytes(before)


@pytest.mark.usefixtures("single")
def test_the_example_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith(f" {CODES} codes, {SCALES} scales")
    assert lines[-1].endswith(" 0 codes, 0 scales")
