"""Parameters that `sharded_state_dict` cuts by itself, as Megatron's fused down-projection of latent attention does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import nn

from megatron_fp8_dist import (
    BlockScaledTensor,
    LoadOptions,
    Scheme,
    exact_ops,
    expand_quantized,
    last_report,
    load,
    read_manifest,
    save,
)
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.report import LoadReport
from megatron_fp8_dist.te import tensors
from tests import latent_attention_jobs, te_cpu
from tests.elementwise import raw
from tests.parameters import SCHEMES
from tests.rankpool import RankPool
from tests.te_cpu import Kind

JOBS = latent_attention_jobs.__name__
SHAPE = (160, 96)
CUT = (96, 64)
"""Rows of q and kv: no multiple of a block of 128."""
KEYS = ("q_down.weight", "kv_down.weight")

TE_KINDS = [
    Kind("per_tensor"),
    Kind("blockwise_2d"),
    Kind("blockwise_1d"),
    Kind("mxfp8"),
    Kind("mxfp8_2d"),
    Kind("nvfp4", "E2M1"),
    Kind("nvfp4_2d", "E2M1"),
]
WEIGHTS = [
    *(pytest.param(scheme, id=scheme.name) for scheme in SCHEMES),
    *(pytest.param(kind, id=f"te-{kind}", marks=pytest.mark.te) for kind in TE_KINDS),
]
each_weight = pytest.mark.parametrize("weight", WEIGHTS)


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> None:
    """A process group of this process alone, where a test does not send its jobs to ranks."""
    if "ranks" not in request.fixturenames:
        request.getfixturevalue("single")


@pytest.fixture(autouse=True)
def _current_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The stand-in that NVFP4's quantizer needs whenever it is copied; nothing else has one."""
    weight = request.node.callspec.params.get("weight") if hasattr(request.node, "callspec") else None
    with te_cpu.current_device_stand_in() if isinstance(weight, Kind) and weight.packed else nullcontext():
        yield


def quantized(scheme: Scheme, seed: int, shape: tuple[int, ...] = SHAPE) -> BlockScaledTensor:
    generator = torch.Generator().manual_seed(seed)
    # Every block has a magnitude of its own.
    magnitude = torch.rand(shape[0], 1, generator=generator) * torch.rand(1, shape[1], generator=generator) + 0.01
    return BlockScaledTensor.quantize(torch.randn(shape, generator=generator) * magnitude, scheme)


def parameter(weight: Scheme | Kind, seed: int, shape: tuple[int, ...] = SHAPE) -> Any:
    """A quantized parameter of random values."""
    if isinstance(weight, Scheme):
        return nn.Parameter(quantized(weight, seed, shape))
    if weight.name == "per_tensor":
        value: Any = te_cpu.float8(torch.zeros(shape, dtype=torch.uint8), 1.0, transpose=True)
    else:
        value = te_cpu.empty(weight, shape)
    tensors.restore(value, quantized(tensors.scheme_of(value), seed, shape))
    return nn.Parameter(value)


def components(tensor: torch.Tensor) -> dict[str, bytes]:
    return {name: raw(component).tobytes() for name, component in tensors.wrap(tensor).components().items()}


class Fused(nn.Module):
    """One weight whose rows are two projections, under a key each."""

    def __init__(self, weight: Any, cut: Sequence[int] = CUT) -> None:
        super().__init__()
        self.weight, self.cut = weight, list(cut)

    def sharded_state_dict(self) -> dict[str, Any]:
        parts = torch.split(self.weight, self.cut, dim=0)
        return {key: ShardedTensor.from_rank_offsets(key, part) for key, part in zip(KEYS, parts, strict=True)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = torch.cat([state_dict.pop(key).data for key in KEYS], dim=0)
        super()._load_from_state_dict(state_dict, prefix, *args)


def exact_state_dict(module: Fused) -> dict[str, Any]:
    with exact_ops():
        return module.sharded_state_dict()


def report() -> LoadReport:
    found = last_report()
    assert isinstance(found, LoadReport)
    return found


@each_weight
def test_a_cut_parameter_comes_back_whole(tmp_path: Path, weight: Scheme | Kind) -> None:
    source, destination = Fused(parameter(weight, 1)), Fused(parameter(weight, 2))
    expected = components(source.weight)
    assert components(destination.weight) != expected
    save(exact_state_dict(source), tmp_path)
    state = load(exact_state_dict(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
    assert report().exact == 1
    assert components(destination.weight) == expected
    destination.load_state_dict(state)
    assert components(destination.weight) == expected


@each_weight
def test_whole_projections_of_another_model(tmp_path: Path, weight: Scheme | Kind) -> None:
    """Saved fused, loaded as two parameters: exact where blocks end at the cut or scales are equal."""
    cut = (128, 64)
    source = Fused(parameter(weight, 1, (192, 96)), cut)
    save(exact_state_dict(source), tmp_path)
    apart = [parameter(weight, 2 + i, (rows, 96)) for i, rows in enumerate(cut)]
    entries = {key: ShardedTensor.from_rank_offsets(key, p) for key, p in zip(KEYS, apart, strict=True)}
    load(entries, tmp_path, options=LoadOptions(strict_bitwise=True))
    whole, start = tensors.wrap(source.weight), 0
    for p, rows in zip(apart, cut, strict=True):
        assert components(p) == components(whole.narrow(0, start, rows))
        start += rows
    # And back: two shards into one parameter. One scale for both of them, or no block that meets both.
    again = tmp_path / "again"
    again.mkdir()
    save(entries, again)
    destination = Fused(parameter(weight, 5, (192, 96)), cut)
    load(exact_state_dict(destination), again, options=LoadOptions(strict_bitwise=True))
    assert components(destination.weight) == components(source.weight)


@each_weight
def test_shards_of_other_scales_are_quantized_once(tmp_path: Path, weight: Scheme | Kind) -> None:
    """Two shards with scales of their own, joined off the block edges: what one conversion of the whole gives."""
    apart = [parameter(weight, 1 + i, (rows, SHAPE[1])) for i, rows in enumerate(CUT)]
    save({k: ShardedTensor.from_rank_offsets(k, p) for k, p in zip(KEYS, apart, strict=True)}, tmp_path)
    destination = Fused(parameter(weight, 3))
    joined = torch.cat([tensors.wrap(p) for p in apart])
    assert isinstance(joined, BlockScaledTensor)
    expected, blocks = joined.conform(tensors.scheme_of(destination.weight))
    load(exact_state_dict(destination), tmp_path)
    assert components(destination.weight) == components(expected)
    assert sum(report().requantized_blocks.values()) == blocks
    assert (report().exact, report().requantized) == ((1, 0) if blocks == 0 else (0, 1))
    if blocks:
        before = components(destination.weight)
        with pytest.raises(PlanningError, match="comes back bit for bit"):
            load(exact_state_dict(destination), tmp_path, options=LoadOptions(strict_bitwise=True))
        assert components(destination.weight) == before


@each_weight
@pytest.mark.parametrize("grad", [True, False])
def test_a_cut_without_the_context_is_refused_by_key(
    tmp_path: Path, weight: Scheme | Kind, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Fused(parameter(weight, 1))
    if isinstance(weight, Kind):
        # Some of the classes dequantize on a device only; what they do with the values is theirs.
        monkeypatch.setattr(type(module.weight), "dequantize", lambda t, **_: tensors.wrap(t).dequantize())
    whole = tmp_path / "whole"
    whole.mkdir()
    save(exact_state_dict(module), whole)
    before = components(module.weight)
    with torch.set_grad_enabled(grad):
        cut = module.sharded_state_dict()
    with pytest.raises(PlanningError, match=rf"{KEYS[1]}: .*exact_ops"):
        load(cut, whole)
    assert components(module.weight) == before
    if isinstance(weight, Kind):
        with pytest.raises(PlanningError, match=rf"{KEYS[1]}: .*exact_ops"):
            save(cut, tmp_path)
    with pytest.raises(PlanningError, match=r"weight: .*exact_ops"):
        expand_quantized(cut, model=module)


@each_weight
def test_a_part_that_no_entry_carries(tmp_path: Path, weight: Scheme | Kind) -> None:
    state = exact_state_dict(Fused(parameter(weight, 1)))
    del state[KEYS[0]]
    with pytest.raises(
        PlanningError, match=rf"{KEYS[1]}: found parts .*\[64, 96\] at \[96, 0\].* expected entries for all"
    ):
        save(state, tmp_path)


def test_a_part_that_two_entries_carry(tmp_path: Path) -> None:
    state = exact_state_dict(Fused(parameter(SCHEMES[1], 1)))
    state["more"] = ShardedTensor.from_rank_offsets("more", state[KEYS[0]].data)
    with pytest.raises(PlanningError, match="each part once"):
        save(state, tmp_path)


def test_a_part_that_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    save({"q": ShardedTensor.from_rank_offsets(KEYS[0], parameter(SCHEMES[0], 1, (96, 96)))}, tmp_path)
    destination = Fused(parameter(SCHEMES[0], 2))
    before = components(destination.weight)
    with pytest.raises(PlanningError, match=rf"found some parts of the parameter: {KEYS[0]}, expected all"):
        load(exact_state_dict(destination), tmp_path, strict="log_all")
    assert components(destination.weight) == before


def test_parts_of_different_schemes_are_refused(tmp_path: Path) -> None:
    schemes = Scheme("per_tensor", "E4M3"), Scheme("per_tensor", "E5M2")
    entries = {
        key: ShardedTensor.from_rank_offsets(key, parameter(scheme, 1, (rows, 96)))
        for key, scheme, rows in zip(KEYS, schemes, CUT, strict=True)
    }
    save(entries, tmp_path)
    with pytest.raises(PlanningError, match="one scheme for all parts"):
        load(exact_state_dict(Fused(parameter(schemes[0], 2))), tmp_path, options=LoadOptions(allow_recast=True))


@pytest.mark.parametrize("both", [True, False])
def test_high_precision_parts_are_returned_for_the_model_to_quantize(tmp_path: Path, both: bool) -> None:
    values = torch.randn(96, 96), torch.randn(64, 96)
    first = values[0] if both else nn.Parameter(quantized(SCHEMES[0], 1, (96, 96)))
    stored = [first.bfloat16() if both else first, values[1].bfloat16()]
    save({k: ShardedTensor.from_rank_offsets(k, t) for k, t in zip(KEYS, stored, strict=True)}, tmp_path)
    destination = Fused(parameter(SCHEMES[0], 3))
    before = components(destination.weight)
    state = load(exact_state_dict(destination), tmp_path)
    assert report().quantized == 1
    assert components(destination.weight) == before
    assert [type(state[k]) for k in KEYS] == [torch.Tensor, torch.Tensor]
    plain = [t.dequantize() if isinstance(t, BlockScaledTensor) else t for t in stored]
    assert torch.equal(torch.cat([state[k] for k in KEYS]), torch.cat(plain))


def test_cuts_of_every_form_are_exact_and_remember_the_parameter() -> None:
    whole = parameter(Scheme("mxfp8", "E4M3"), 1)
    with exact_ops():
        cuts = {
            "slice": whole[32:64, 8:],
            "narrow": whole.narrow(1, 3, 50),
            "chunk": torch.chunk(whole, 3)[1],
            "split": whole.split(40)[3],
            "of a cut": whole[10:].narrow(0, 5, 20),
            "detached": whole[10:].detach().data,
            "row": whole[3],
            "every third": whole[::3],
            "unbind": whole.unbind()[7],
        }
    assert all(isinstance(c, BlockScaledTensor) and c.is_cut for c in cuts.values())
    regions = ("slice", "narrow", "chunk", "split", "of a cut", "detached")
    assert all(cuts[name].part_of is whole for name in regions)
    assert [name for name in cuts if name not in regions and cuts[name].part_of is not None] == []
    expected = tensors.wrap(whole).narrow(0, 15, 20)
    assert components(cuts["of a cut"]) == components(expected)


@each_weight
def test_parts_joined_in_order_are_the_parameter(weight: Scheme | Kind) -> None:
    whole = parameter(weight, 1)
    with exact_ops():
        a, b = torch.split(whole, list(CUT))
    again = torch.cat([a, b])
    assert type(again) is type(whole)
    pointers = [
        {n: c.data_ptr() for n, c in tensors.wrap(t).components().items() if "_data" in n} for t in (again, whole)
    ]
    assert pointers[0] == pointers[1]
    for others in ([b, a], [a], [a, b[:10]], [a, a]):
        joined = torch.cat(others)
        assert isinstance(joined, BlockScaledTensor)
        # Writing it would change nothing in the parameter.
        assert joined.is_cut


@pytest.mark.te
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [Kind("per_tensor"), Kind("mxfp8")], ids=str)
def test_megatrons_fused_latent_attention(ranks: RankPool, tmp_path: Path, kind: Kind, saved: int, loaded: int) -> None:
    ranks.run(f"{JOBS}:save_attention", str(tmp_path), kind, saved, n=saved)
    results = ranks.run(f"{JOBS}:load_attention", str(tmp_path), kind, loaded, n=loaded)
    # One parameter per rank: the two parts of it are not counted apart.
    assert results == [(True, loaded)] * loaded
    entries = read_manifest(tmp_path).tensors
    assert {k: e.global_shape for k, e in entries.items()} == {
        f"self_attention.linear_{name}_down_proj.weight": (rows, latent_attention_jobs.HIDDEN)
        for name, rows in latent_attention_jobs.ROWS.items()
    }
