"""Edges of cuts, scales and buffers: where a part starts, what layers have in common, what shares memory."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import nn

from megatron_fp8_dist import (
    BlockScaledTensor,
    LoadOptions,
    SaveOptions,
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
from megatron_fp8_dist.sharding.expand import leaves
from megatron_fp8_dist.strategies.expansion import expand_load
from megatron_fp8_dist.te import tensors
from tests import formats, parameters, te_cpu
from tests.elementwise import component_bytes
from tests.megatron_cuts import split_tensor_factory
from tests.te_cpu import Kind

pytestmark = pytest.mark.usefixtures("single")

KEY = "weight"
STRICT = LoadOptions(strict_bitwise=True)
MXFP8, NVFP4 = Scheme("mxfp8", "E4M3"), Scheme("nvfp4", "E2M1")


def quantized(scheme: Scheme, seed: int, shape: tuple[int, int] = (64, 96), scale: float = 1.0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return nn.Parameter(BlockScaledTensor.quantize(values, scheme))


def entry(parameter: Any, key: str = KEY, *offsets: tuple[int, int, int], prepended: int = 0) -> Any:
    return ShardedTensor.from_rank_offsets(key, parameter, *offsets, prepend_axis_num=prepended)


def report() -> LoadReport:
    found = last_report()
    assert isinstance(found, LoadReport)
    return found


# Where a part starts


@pytest.mark.parametrize("name", ["blockwise_2d", "blockwise_1d", "mxfp8_2d"])
def test_parts_of_whole_blocks_that_start_inside_a_block(tmp_path: Path, name: str) -> None:
    """The sizes are multiples of 128, the places are not: a part meets one block more than its size says."""
    scheme, sections = Scheme(name, "E4M3"), [80, 80, 128, 128, 16]

    def cut(parameter: Any) -> dict[str, Any]:
        return {"in_proj": split_tensor_factory(entry(parameter), sections, ["z", "x", "B", "C", "dt"], 0)}

    source, destination = (quantized(scheme, seed, (sum(sections), 96)) for seed in (1, 2))
    save(cut(source), tmp_path)
    load(cut(destination), tmp_path, options=STRICT)
    assert component_bytes(destination) == component_bytes(source)


# What layers and ranks have in common


def with_usage(parameter: Any, *names: str) -> Any:
    return nn.Parameter(parameter.detach().only(names))


def stack(*layers: Any) -> dict[str, Any]:
    return {str(i): entry(p, KEY, (0, i, len(layers)), prepended=1) for i, p in enumerate(layers)}


@pytest.mark.parametrize("scheme", [MXFP8, NVFP4, Scheme("blockwise_1d", "E4M3")], ids=lambda s: s.name)
def test_layers_of_one_stack_with_different_usages(tmp_path: Path, scheme: Scheme) -> None:
    whole = [quantized(scheme, seed) for seed in (1, 2, 3)]
    usages = (("rowwise", "columnwise"), ("rowwise",), ("columnwise",))
    source = [with_usage(p, *names) for p, names in zip(whole, usages, strict=True)]
    save(stack(*source), tmp_path)
    assert [e.directions for _, e in sorted(read_manifest(tmp_path).tensors.items())] == list(usages)
    destination = [with_usage(quantized(scheme, 7 + i), *names) for i, names in enumerate(usages)]
    load(stack(*destination), tmp_path, options=STRICT)
    assert [component_bytes(p) for p in destination] == [component_bytes(p) for p in source]


def test_fragments_of_one_layer_with_different_usages(tmp_path: Path) -> None:
    parts = quantized(MXFP8, 1), with_usage(quantized(MXFP8, 2), "rowwise")
    state = {str(i): entry(p, KEY, (0, i, 2)) for i, p in enumerate(parts)}
    with pytest.raises(PlanningError, match=r"directions rowwise\+columnwise and rowwise.*directions=\"rowwise\""):
        save(state, tmp_path)
    save(state, tmp_path, options=SaveOptions(directions="rowwise"))
    assert read_manifest(tmp_path).tensors[KEY].directions == ("rowwise",)


def test_leaves_that_read_nothing_lie_behind_every_read(tmp_path: Path) -> None:
    """FullyParallelLoad tells reads apart by key and offset: the columns that one rank skips are another's."""
    save({"w": entry(quantized(MXFP8, 1))}, tmp_path)
    state = {"w": entry(with_usage(quantized(MXFP8, 2), "rowwise"))}
    expansion = expand_load(state, tmp_path, LoadOptions())
    built = list(leaves(expansion.state_dict["w"].build()))
    skipped = [leaf for leaf in built if leaf.key.startswith(f"{KEY}.columnwise")]
    assert len(skipped) == 2
    assert all(leaf.global_offset == leaf.global_shape and leaf.local_shape == (0, 0) for leaf in skipped)


# Memory and merges


def sharing_scales(scheme: Scheme) -> tuple[Any, Any]:
    one = quantized(scheme, 3)
    parts = {n: c.clone() if n.endswith("_data") else c for n, c in one.components().items()}
    return one, nn.Parameter(BlockScaledTensor.from_components(scheme, parts))


@pytest.mark.parametrize("scheme", [Scheme("per_tensor", "E4M3"), MXFP8, NVFP4], ids=lambda s: s.name)
def test_parameters_that_share_a_buffer(tmp_path: Path, scheme: Scheme) -> None:
    save({k: entry(quantized(scheme, i), k) for i, k in enumerate("ab")}, tmp_path)
    one, other = sharing_scales(scheme)
    before = component_bytes(one), component_bytes(other)
    with pytest.raises(PlanningError, match=r"b: found a .* that a has too, expected .* buffers of its own"):
        load({"a": entry(one, "a"), "b": entry(other, "b")}, tmp_path)
    assert (component_bytes(one), component_bytes(other)) == before
    # One source for both is no contradiction.
    load({"1": entry(one, "a"), "2": entry(one.detach(), "a")}, tmp_path, options=STRICT)


def halves(parameter: Any, key: str) -> dict[str, Any]:
    with exact_ops():
        return {f"{key}{i}": entry(p, f"{key}{i}") for i, p in enumerate(parameter.split(32))}


@pytest.mark.parametrize("both", [True, False])
def test_cut_parameters_that_share_a_buffer(tmp_path: Path, both: bool) -> None:
    scheme = Scheme("per_tensor", "E4M3")
    source = {k: quantized(scheme, i, scale=1.0 + i) for i, k in enumerate("ab")}
    save(halves(source["a"], "a") | (halves(source["b"], "b") if both else {"b": entry(source["b"], "b")}), tmp_path)
    one, other = sharing_scales(scheme)
    before = component_bytes(one), component_bytes(other)
    state = halves(one, "a") | (halves(other, "b") if both else {"b": entry(other, "b")})
    with pytest.raises(PlanningError, match="buffers of its own"):
        load(state, tmp_path, options=STRICT)
    assert (component_bytes(one), component_bytes(other)) == before


def test_buffers_without_memory_are_not_shared(tmp_path: Path) -> None:
    save({k: entry(quantized(MXFP8, i), k) for i, k in enumerate("ab")}, tmp_path)
    wanted = {k: entry(nn.Parameter(quantized(MXFP8, 3).detach().to("meta")), k) for k in "ab"}
    expand_quantized(wanted, checkpoint_dir=tmp_path)
    assert report().exact == 2


def test_high_precision_into_an_alias_under_another_key(tmp_path: Path) -> None:
    save({k: entry(torch.full((64, 96), 1.0 + i), k) for i, k in enumerate("ab")}, tmp_path)
    one = quantized(MXFP8, 1)
    loaded = load({"1": entry(one, "a"), "2": entry(one.detach(), "b")}, tmp_path)
    assert [float(loaded[k].flatten()[0]) for k in "12"] == [1.0, 2.0]


COPIES: dict[str, Any] = {
    "clone": torch.clone,
    "contiguous": torch.Tensor.contiguous,
    "deepcopy": lambda t: deepcopy(t.detach()),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copies_of_parts_are_saved_and_not_loaded(tmp_path: Path, copy: Any) -> None:
    """A copy does not stand for the parameter: what is written into it, the parameter would not have."""
    scheme = Scheme("per_tensor", "E4M3")

    def cut(parameter: Any) -> dict[str, Any]:
        with exact_ops():
            return {str(i): entry(copy(p), str(i)) for i, p in enumerate(parameter.split(48, 1))}

    source, destination = quantized(scheme, 1), quantized(scheme, 2)
    save(cut(source), tmp_path)
    before = component_bytes(destination)
    with pytest.raises(PlanningError, match="a part of another quantized tensor"):
        load(cut(destination), tmp_path)
    assert component_bytes(destination) == before


def test_a_clone_of_a_part_is_a_parameter_of_its_own(tmp_path: Path) -> None:
    big, destination = quantized(MXFP8, 1, (128, 96)), quantized(MXFP8, 2)
    source = nn.Parameter(big.detach()[64:].clone())
    save(halves(source, "w"), tmp_path)
    load(halves(destination, "w"), tmp_path, options=STRICT)
    assert component_bytes(destination) == component_bytes(source)


@pytest.mark.parametrize("shape", [(64, 0), (0, 64), (0, 0)], ids=str)
@pytest.mark.parametrize("scheme", [Scheme("per_tensor", "E4M3"), MXFP8, NVFP4], ids=lambda s: s.name)
def test_quantizing_nothing(scheme: Scheme, shape: tuple[int, int]) -> None:
    nothing = BlockScaledTensor.quantize(torch.zeros(shape), scheme)
    assert tuple(nothing.dequantize().shape) == shape


KINDS = [
    pytest.param(MXFP8, id="mxfp8"),
    pytest.param(Kind("per_tensor"), id="te-per_tensor", marks=pytest.mark.te),
    pytest.param(Kind("mxfp8"), id="te-mxfp8", marks=pytest.mark.te),
]
CUTS: dict[str, Any] = {
    "split": lambda t: t.split([32, 32]),
    "chunk": lambda t: t.chunk(2),
    "narrow": lambda t: [t.narrow(0, 0, 32), t.narrow(0, 32, 32)],
    "tensor_split": lambda t: t.tensor_split(2),
    "slice": lambda t: [t[:32], t[32:]],
}


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("how", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda m: m.__name__)
def test_cuts_in_every_mode(tmp_path: Path, of: Any, how: Any, mode: Any) -> None:
    def cut(parameter: Any) -> dict[str, Any]:
        with mode(), exact_ops():
            return {str(i): entry(p, str(i)) for i, p in enumerate(how(parameter))}

    source, destination = (parameters.parameter(of, seed, (64, 96)) for seed in (1, 2))
    save(cut(source), tmp_path)
    load(cut(destination), tmp_path, options=STRICT)
    assert report().exact == 1
    for name, component in tensors.wrap(source).components().items():
        assert torch.equal(tensors.wrap(destination).components()[name], component)


@pytest.mark.te
def test_a_restore_through_an_alias_leaves_no_stale_transpose(tmp_path: Path) -> None:
    source, destination = (parameters.parameter(Kind("per_tensor"), seed, (64, 96)) for seed in (1, 2))
    save({"w": entry(source)}, tmp_path)
    load({"w": entry(destination.detach())}, tmp_path, options=STRICT)
    # The parameter itself still takes its transpose for valid.
    assert torch.equal(destination._transpose, source._data.t())


def test_a_merge_that_computes_is_refused(tmp_path: Path) -> None:
    save({"w": entry(quantized(MXFP8, 1))}, tmp_path)
    destination = quantized(MXFP8, 2)
    whole = entry(destination)

    def build(key: str, t: torch.Tensor, *_: Any) -> Any:
        return [entry(t, key)]

    factory = ShardedTensorFactory(KEY, destination, build, lambda parts: parts[0] * 1, whole.replica_id)
    before = component_bytes(destination)
    with pytest.raises(PlanningError, match=rf"{KEY}: found a Tensor .* merge function, expected .*still quantized"):
        load({"w": factory}, tmp_path)
    assert component_bytes(destination) == before


# Schemes that follow from others


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "blockwise"])
def test_tiles_load_exactly_into_both_directions(tmp_path: Path, name: str) -> None:
    element = "E2M1" if name == "nvfp4" else "E4M3"
    tiled = Scheme(f"{name}_2d", element)
    both = Scheme("blockwise_1d", element) if name == "blockwise" else Scheme(name, element)
    source, destination = quantized(tiled, 1), quantized(both, 2)
    save({"w": entry(source)}, tmp_path)
    load({"w": entry(destination)}, tmp_path, options=STRICT)
    for direction in ("rowwise", "columnwise"):
        values = destination.detach().only([direction]).dequantize(torch.float32)
        assert torch.equal(values, source.detach().dequantize(torch.float32))


# Amax at the edges


@pytest.mark.parametrize("magnitudes", [(7e-36, 1e-36), (1e-30, 8e-36), (2e36, 1e36), (3e38, 1e38), (1e-20, 1e20)])
def test_nvfp4_shards_of_extreme_amax_merge_inside_the_bound(tmp_path: Path, magnitudes: tuple[float, float]) -> None:
    shards = []
    for seed, magnitude in enumerate(magnitudes):
        values = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
        parts = BlockScaledTensor.quantize(values / values.abs().max(), Scheme("nvfp4_2d", "E2M1")).components()
        parts["amax_rowwise"] = torch.full((1, 1), magnitude)
        shards.append(BlockScaledTensor.from_components(Scheme("nvfp4_2d", "E2M1"), parts))
    save({str(i): entry(s, KEY, (0, i, 2)) for i, s in enumerate(shards)}, tmp_path)
    destination: Any = nn.Parameter(BlockScaledTensor.quantize(torch.zeros(64, 32), Scheme("nvfp4_2d", "E2M1")))
    load({"w": entry(destination)}, tmp_path)
    assert report().requantized == 1
    old = torch.cat([s.dequantize(torch.float32) for s in shards]).double()
    found = destination.detach()
    components = {n: c.numpy() for n, c in found.components().items()}
    new = found.dequantize(torch.float32).double()
    scale = torch.from_numpy(formats.decode(components["rowwise_scale_inv"], "E4M3")).double()
    step = torch.from_numpy(formats.spacing(components["rowwise_scale_inv"], "E4M3"))
    amax = float(components["amax_rowwise"][0, 0])
    unit = (scale * amax / (6 * 448)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    rounding = (step * amax / (6 * 448) * 0.5 * 6).repeat_interleave(16, 0).repeat_interleave(16, 1)
    spacing = formats.spacing(formats.unpack(components["rowwise_data"], 1), "E2M1")
    allowed = 0.5 * torch.from_numpy(spacing) * unit + rounding + old.abs() * 2.0**-22
    assert bool(torch.isfinite(new).all())
    np.testing.assert_array_less((new - old).abs().numpy(), allowed.numpy() + 1e-300)


def test_blocks_outside_of_the_saved_tensor_are_not_counted(tmp_path: Path) -> None:
    scheme = Scheme("nvfp4_2d", "E2M1")
    shards = [quantized(scheme, seed, (32, 32), scale=1.0 + seed) for seed in (0, 1)]
    save({str(i): entry(s, KEY, (0, i, 2)) for i, s in enumerate(shards)}, tmp_path)
    destination = quantized(scheme, 5, (96, 32))
    padded = entry(destination)
    padded.allow_shape_mismatch = True
    load({"w": padded}, tmp_path)
    assert report().requantized_blocks == {KEY: 4 * 2}
    parts = destination.detach().components()
    assert parts["rowwise_scale_inv"][4:].tolist() == [[0x38] * 2] * 2  # E4M3 for 1
    assert not parts["rowwise_data"][64:].any()


# Transformer Engine's buffers


@pytest.mark.te
@pytest.mark.parametrize("kind", [Kind("blockwise_2d"), Kind("blockwise_1d"), Kind("mxfp8")], ids=str)
@pytest.mark.parametrize("buffer", ["_rowwise_scale_inv", "_columnwise_scale_inv", "_columnwise_data"])
@pytest.mark.parametrize("fault", ["short", "dtype", "flat"])
def test_buffers_of_another_shape_or_dtype(tmp_path: Path, kind: Kind, buffer: str, fault: str) -> None:
    source: Any = te_cpu.empty(kind, (256, 256))
    tensors.restore(source, quantized(tensors.scheme_of(source), 1, (256, 256)).detach())
    save({"w": entry(nn.Parameter(source))}, tmp_path)
    destination: Any = nn.Parameter(te_cpu.empty(kind, (256, 256)))
    whole = getattr(destination, buffer)
    faults = {"short": whole[: len(whole) // 4].clone(), "dtype": whole.to(torch.float64), "flat": whole.flatten()}
    setattr(destination, buffer, faults[fault])
    before = {n: b.clone() for n, b in te_cpu.buffers(destination).items()}
    direction, what = buffer[1:].split("_", maxsplit=1)[0], "codes" if buffer.endswith("data") else "scales"
    found = f"with a {buffer} of 1 axes" if fault == "flat" else f"with {direction} {what} of "
    with pytest.raises(PlanningError, match=rf"{KEY}: found a {type(source).__name__} {found}"):
        load({"w": entry(destination)}, tmp_path)
    after = te_cpu.buffers(destination)
    assert all(torch.equal(after[n].nan_to_num(), b.nan_to_num()) for n, b in before.items())
