"""The example that trains and resumes: its quantizing, its record of bytes and its stand-ins hold what they say."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_fp8_dist import BlockScaledTensor
from tests import te_cpu
from tests.elementwise import raw

EXAMPLES = Path(__file__).parent.parent / "examples"
SCHEMES = ["float8", "blockwise", "mxfp8", "nvfp4"]
KINDS = [pytest.param("te", marks=pytest.mark.te), "block_scaled"]
SIDE = 512
"""The smallest that four ranks can cut on edges of a 128x128 block."""

Modules: TypeAlias = Callable[[str], Any]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """The modules of the example, by name, with what Transformer Engine's quantizers ask for when they are made."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with te_cpu.current_device_stand_in():
        yield importlib.import_module


def shards(example: Modules, kind: Any, values: torch.Tensor, axis: int, num_ranks: int) -> list[torch.Tensor]:
    """The parameter of each rank."""
    quantize, amax = example("_weights").quantize, values.abs().max()
    return [kind.parameter(quantize(part, kind.scheme, amax)) for part in values.chunk(num_ranks, axis)]


def fragments(example: Modules, kind: Any, parameters: list[torch.Tensor], axis: int = 0) -> list[Any]:
    """What each rank records of its parameter."""
    offsets = [(axis, rank, len(parameters)) for rank in range(len(parameters))]
    entries = [ShardedTensor.from_rank_offsets("w", p, o) for p, o in zip(parameters, offsets, strict=True)]
    found: list[Any] = example("_byte_record").fragments(entries, kind.owns, kind.buffers)
    return found


def record(example: Modules, held: list[Any], folder: Path) -> dict[str, Any]:
    """What the ranks' files say of what they hold."""
    for rank, fragment in enumerate(held):
        example("_byte_record").write(folder, rank, [fragment])
    wholes: dict[str, Any] = example("_byte_record").read(folder)
    return wholes


def buffers(parameter: Any) -> list[torch.Tensor]:
    """The bytes of all its buffers, each of one axis."""
    blocks = isinstance(parameter, BlockScaledTensor)
    found = parameter.components() if blocks else te_cpu.buffers(parameter)
    return [buffer.detach().view(-1).view(torch.uint8) for buffer in found.values()]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weights", KINDS)
def test_shards_of_any_layout_have_the_same_bytes(
    example: Modules, weights: str, scheme: str, axis: int, tmp_path: Path
) -> None:
    byte_record, kind = example("_byte_record"), example("_weights").choose(weights, scheme)
    values = torch.randn(SIDE, SIDE)
    recorded = record(example, fragments(example, kind, shards(example, kind, values, axis, 2), axis), tmp_path)
    for num_ranks in (1, 4):
        held = fragments(example, kind, shards(example, kind, values, axis, num_ranks), axis)
        verdicts = byte_record.compare(held, recorded)
        assert [v.exact for v in verdicts] == [True] * num_ranks
        assert byte_record.bit_exact(verdicts, recorded) == {"w"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weights", KINDS)
def test_the_record_finds_one_bit_in_any_buffer(example: Modules, weights: str, scheme: str, tmp_path: Path) -> None:
    byte_record, kind = example("_byte_record"), example("_weights").choose(weights, scheme)
    parameters = shards(example, kind, torch.randn(SIDE, SIDE), 0, 4)
    recorded = record(example, fragments(example, kind, parameters), tmp_path)
    for buffer in buffers(parameters[2]):
        buffer[0] ^= 1
        verdicts = byte_record.compare(fragments(example, kind, parameters), recorded)
        assert [v.exact for v in verdicts] == [True, True, False, True]
        assert byte_record.bit_exact(verdicts, recorded) == set()
        buffer[0] ^= 1
    assert byte_record.bit_exact(byte_record.compare(fragments(example, kind, parameters), recorded), recorded)


@pytest.mark.parametrize(("scheme", "side"), [("blockwise", 128), ("mxfp8", 32), ("nvfp4", 16)])
@pytest.mark.te
def test_the_record_leaves_padding_out(example: Modules, scheme: str, side: int) -> None:
    kind = example("_weights").choose("te", scheme)
    [parameter] = parameters = shards(example, kind, torch.randn(side, side), 0, 1)
    [before] = fragments(example, kind, parameters)
    scales = [b for name, b in te_cpu.buffers(parameter).items() if name.endswith("scale_inv")]
    for scale in scales:
        # One block; a scale buffer is larger than what it needs on its last axis.
        scale.view(torch.uint8)[:, -1] ^= 1
    [after] = fragments(example, kind, parameters)
    assert len(scales) == 2
    assert before.elements.keys() == after.elements.keys()
    assert all(torch.equal(before.elements[name], after.elements[name]) for name in before.elements)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.te
def test_both_kinds_record_the_same(example: Modules, scheme: str) -> None:
    choose, values = example("_weights").choose, torch.randn(256, 384)
    [te], [block_scaled] = (
        fragments(example, kind, shards(example, kind, values, 0, 1))
        for kind in (choose("te", scheme), choose("block_scaled", scheme))
    )
    assert block_scaled.elements.keys() <= te.elements.keys()
    for name, elements in te.elements.items():
        # What follows from the rowwise direction holds the same values.
        source = name if name in block_scaled.elements else name.replace("columnwise", "rowwise")
        assert torch.equal(elements, block_scaled.elements[source])


@pytest.mark.parametrize(("scheme", "name"), [("mxfp8", "MXFP8Tensor"), ("nvfp4", "NVFP4Tensor")])
@pytest.mark.te
def test_a_stand_in_dequantizes_where_there_is_no_gpu_alone(
    example: Modules, scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standins, kind = example("_cpu_standins"), example("_weights").choose("te", scheme)
    values = example("_weights").quantize(torch.randn(64, 96), kind.scheme, torch.tensor(9.0))
    parameter = kind.parameter(values)
    own = type(parameter).dequantize
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with standins.active():
            assert (type(parameter).dequantize is own) == has_gpu
            if not has_gpu:
                assert raw(parameter.t()).tobytes() == raw(values.dequantize().t()).tobytes()
        assert type(parameter).dequantize is own
    assert f"{name}.dequantize" in standins.notice()


@pytest.mark.long
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weights", KINDS)
def test_the_command(weights: str, scheme: str) -> None:
    command = [sys.executable, str(EXAMPLES / "gpt_fp8_resume.py"), "--weights", weights, "--scheme", scheme]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == "resume: TP2xPP2 -> TP1xPP2, TP4xPP1: 16 quantized tensors, 16 bit-exact"
