"""Fragments of any size and place, and shapes that do not match, with fake ranks in one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8_dist.compat.host import ShardedTensor
from megatron_fp8_dist.errors import PlanningError
from megatron_fp8_dist.options import LoadOptions
from megatron_fp8_dist.quantized.scheme import Scheme
from megatron_fp8_dist.quantized.tensor import BlockScaledTensor
from megatron_fp8_dist.sharding.load_task import Outcome
from megatron_fp8_dist.sharding.manifest import Manifest
from tests.elementwise import Elements, elements_of, joined, raw, scaled
from tests.fakemodel import E4M3
from tests.fakeranks import (
    DIRECTORY,
    Rank,
    Recorder,
    check_quantized,
    kinds,
    load,
    padded,
    rank_with,
    save,
    single,
    uneven,
    whole_of,
)
from tests.shards import random_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest_plugins = ["tests.pure"]
pytestmark = pytest.mark.usefixtures("one_thread", "toy_schemes")


def save_rows(
    sizes: Sequence[int], scales: Sequence[float], scheme: Scheme = E4M3
) -> tuple[Elements, Recorder, Manifest]:
    parts = [random_shard((s, 8), i, scale, scheme) for i, (s, scale) in enumerate(zip(sizes, scales, strict=True))]
    starts = [0, *itertools.accumulate(sizes)]
    backend = Recorder()
    ranks = [rank_with(w=uneven("w", part, o, sum(sizes))) for part, o in zip(parts, starts, strict=False)]
    return whole_of(parts), backend, save(ranks, backend, DIRECTORY)


def load_rows(
    whole: Elements, backend: Recorder, manifest: Manifest, sizes: Sequence[int], scheme: Scheme = E4M3
) -> list[Rank]:
    starts = [0, *itertools.accumulate(sizes)]
    shards = [random_shard((s, 8), 9, 9.0, scheme) for s in sizes]
    ranks = [rank_with(w=uneven("w", t, o, sum(sizes))) for t, o in zip(shards, starts, strict=False)]
    load(ranks, backend, DIRECTORY, manifest)
    for rank, start, size in zip(ranks, starts, sizes, strict=False):
        check_quantized(whole[slice(start, start + size),], scheme, rank.tensors["w"], rank.outcomes["w"])
    return ranks


@pytest.mark.parametrize("sizes", [(5, 3, 8), (16,), (8, 8), (1, 15), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 0.25, 0.3)], ids=["equal", "unequal"])
def test_uneven_fragments(sizes: tuple[int, ...], scales: tuple[float, ...]) -> None:
    whole, backend, manifest = save_rows((5, 3, 8), scales)
    assert {k.partition("@")[2] for k in backend.index(DIRECTORY)} == {"", "0_0", "5_0", "8_0"}
    ranks = load_rows(whole, backend, manifest, sizes)
    if len(set(scales)) == 1 or sizes == (5, 3, 8):
        assert kinds(ranks) == {"exact"}


@pytest.mark.parametrize("sizes", [(5, 3, 8), (16,), (7, 9)], ids=str)
def test_uneven_fragments_of_a_block_scheme(sizes: tuple[int, ...]) -> None:
    scheme = Scheme("toy_block", "E4M3")
    load_rows(*save_rows((5, 3, 8), (0.5, 0.25, 0.3), scheme), sizes, scheme)


def layered(tensor: torch.Tensor, layer: int, offset: int, num_layers: int = 2) -> Any:
    """An uneven fragment of one layer of a stack of 8 columns."""
    rows, columns = tensor.shape
    where = (layer, 0, offset)
    return ShardedTensor("w", tensor, tensor.dtype, (rows, columns), (num_layers, rows, 8), where, None, 0, 1)


def columns_of(tensor: torch.Tensor, *sizes: int) -> list[tuple[int, torch.Tensor]]:
    """(first column, part) of a tensor cut into columns, each part a tensor of its own."""
    starts = itertools.accumulate(sizes, initial=0)
    return [(o, part.clone()) for o, part in zip(starts, tensor.split(list(sizes), 1), strict=False)]


@pytest.mark.parametrize("mixed", [False, True], ids=["stack", "mixed stack"])
def test_uneven_columns_of_layers(mixed: bool) -> None:
    layers = [
        torch.ones(4, 8, dtype=torch.bfloat16) if mixed else random_shard((4, 8), 5, 0.25),
        random_shard((4, 8), 6, 0.5),
    ]
    source = [
        rank_with(**{str(layer): layered(part, layer, o)})
        for layer, tensor in enumerate(layers)
        for o, part in columns_of(tensor, 5, 3)
    ]
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    assert bool(manifest.mixed) == mixed
    wanted = columns_of(random_shard((4, 8), 9, 9.0), 2, 6)
    ranks = [rank_with(w=layered(part, 1, o)) for o, part in wanted]
    load(ranks, backend, DIRECTORY, manifest, LoadOptions(strict_bitwise=True))
    assert kinds(ranks) == {"exact"}
    found = joined([elements_of(part) for _, part in wanted], 1)
    np.testing.assert_array_equal(found.codes, elements_of(layers[1]).codes)
    np.testing.assert_array_equal(found.scale, elements_of(layers[1]).scale)


@pytest.mark.parametrize("shape", [(8,), (4, 2, 6), (2, 2, 2, 2)], ids=str)
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    whole = random_shard(shape, 1, 0.5)
    backend = Recorder()
    manifest = save([rank_with(w=single("w", whole))], backend, DIRECTORY)
    parts = [random_shard((shape[0] // 2, *shape[1:]), 9, 9.0) for _ in range(2)]
    ranks = [rank_with(w=single("w", part, (0, i, 2))) for i, part in enumerate(parts)]
    load(ranks, backend, DIRECTORY, manifest)
    assert kinds(ranks) == {"exact"}
    np.testing.assert_array_equal(whole_of(parts).codes, elements_of(whole).codes)
    np.testing.assert_array_equal(whole_of(parts).scale, elements_of(whole).scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_high_precision_destination_of_any_dtype(dtype: torch.dtype) -> None:
    whole = random_shard((4, 8), 1, 0.5)
    backend = Recorder()
    manifest = save([rank_with(w=single("w", whole))], backend, DIRECTORY)
    rank = rank_with(w=single("w", torch.zeros(4, 8, dtype=dtype)))
    load([rank], backend, DIRECTORY, manifest)
    expected = torch.from_numpy(elements_of(whole).values("E4M3")).to(dtype)
    np.testing.assert_array_equal(raw(rank.loaded["w"]), raw(expected))


def test_even_fragments_loaded_unevenly() -> None:
    parts = [random_shard((8, 8), i, 0.5) for i in range(2)]
    backend = Recorder()
    ranks = [rank_with(w=single("w", part, (0, i, 2))) for i, part in enumerate(parts)]
    load_rows(whole_of(parts), backend, save(ranks, backend, DIRECTORY), (5, 3, 8))


def test_other_global_shape_is_a_problem() -> None:
    _, backend, manifest = save_rows((5, 3, 8), (0.5, 0.5, 0.5))
    rank = rank_with(w=uneven("w", random_shard((8, 8), 9, 9.0), 0, 20))
    with pytest.raises(PlanningError, match=r"w: found global shape \[16, 8\] saved, expected \[20, 8\]"):
        load([rank], backend, DIRECTORY, manifest)


def test_a_quantized_tensor_without_rows() -> None:
    empty = BlockScaledTensor.from_components(
        E4M3, {"rowwise_data": torch.zeros(0, 8, dtype=torch.uint8), "rowwise_scale_inv": torch.zeros(0, 1)}
    )
    backend = Recorder()
    manifest = save([rank_with(w=single("w", empty))], backend, DIRECTORY)
    rank = rank_with(w=single("w", empty.clone()))
    load([rank], backend, DIRECTORY, manifest)
    assert rank.outcomes["w"] == Outcome("exact")


# allow_shape_mismatch


@pytest.mark.parametrize("saved_rows", [(6, 6), (5, 5), (12,), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("wanted_rows", [(16,), (8, 8), (4, 4, 4, 4, 4), (5, 5), (7, 7)], ids=str)
@pytest.mark.parametrize("scale_step", [0.0, 0.1], ids=["equal", "unequal"])
def test_rows_outside_are_zero_and_choose_no_scale(
    saved_rows: tuple[int, ...], wanted_rows: tuple[int, ...], scale_step: float
) -> None:
    source = padded(saved_rows, 0, 0.5)
    for i, rank in enumerate(source):
        scaled(rank.tensors["w"]).components()["rowwise_scale_inv"].add_(i * scale_step)
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    stored = whole_of([rank.tensors["w"] for rank in source])
    total, wanted = sum(saved_rows), sum(wanted_rows)
    whole = Elements(*(np.zeros((max(total, wanted), 8), d) for d in (np.uint8, np.uint32, np.bool_)))
    whole.codes[:total], whole.scale[:total], whole.known[:total] = stored.codes, stored.scale, stored.known
    ranks = padded(wanted_rows, 50, 9.0)
    load(ranks, backend, DIRECTORY, manifest)
    starts = itertools.accumulate(wanted_rows, initial=0)
    for rank, start, size in zip(ranks, starts, wanted_rows, strict=False):
        tensor = scaled(rank.tensors["w"])
        check_quantized(whole[slice(start, start + size),], E4M3, tensor, rank.outcomes["w"])
        if start >= total:
            assert not tensor.components()["rowwise_data"].any()
            assert tensor.components()["rowwise_scale_inv"].tolist() == [[1.0]]


def test_rows_outside_of_a_high_precision_destination_are_zero() -> None:
    source = padded((6,), 0, 0.5)
    backend = Recorder()
    manifest = save(source, backend, DIRECTORY)
    table = torch.ones(8, 8, dtype=torch.bfloat16)
    rank = rank_with(w=single("w", table, allow_shape_mismatch=True))
    load([rank], backend, DIRECTORY, manifest)
    expected = torch.zeros(8, 8, dtype=torch.bfloat16)
    expected[:6] = source[0].tensors["w"].dequantize()
    np.testing.assert_array_equal(raw(rank.loaded["w"]), raw(expected))


@given(data=st.data(), scheme=st.sampled_from(["per_tensor", "toy_block", "toy_flat"]))
def test_any_uneven_fragments(data: st.DataObject, scheme: str) -> None:
    total = data.draw(st.integers(1, 20))
    chosen = Scheme(scheme, "E4M3")

    def sizes() -> list[int]:
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))), total] if total > 1 else [0, 1]
        return [b - a for a, b in itertools.pairwise(cuts)]

    parts = sizes()
    scales = data.draw(st.lists(st.sampled_from([0.5, 0.25, 0.3]), min_size=len(parts), max_size=len(parts)))
    load_rows(*save_rows(parts, scales, chosen), sizes(), chosen)
