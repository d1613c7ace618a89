"""What a load allocates: little beyond the parameters themselves, and nothing in floating point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, Scheme, load, save
from megatron_fp8_dist.backends import torch_files
from megatron_fp8_dist.strategies import prefetch
from tests.elementwise import component_bytes

pytestmark = pytest.mark.usefixtures("single")

SHAPE = (256, 384)
COUNT = 24
SCHEMES = {
    "per_tensor": Scheme("per_tensor", "E4M3"),
    "blockwise_1d": Scheme("blockwise_1d", "E4M3"),
    "mxfp8": Scheme("mxfp8", "E4M3"),
    "nvfp4": Scheme("nvfp4", "E2M1"),
}


def weights(scheme: Scheme, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(BlockScaledTensor.quantize(torch.randn(SHAPE, generator=generator), scheme)) for _ in range(COUNT)
    ]


def whole(number: int, parameter: Any) -> dict[str, Any]:
    return {f"{number}": ShardedTensor.from_rank_offsets(f"w{number}", parameter)}


def swiglu(number: int, parameter: Any) -> dict[str, Any]:
    (entry,) = whole(number, parameter).values()
    return {f"{number}": apply_swiglu_sharded_factory(entry, ())}


def halves(number: int, parameter: Any) -> dict[str, Any]:
    """As two ranks save it: the columns are cut on block edges, and the scales are as they were."""
    parts = [BlockScaledTensor.from_components(p.scheme, p.components()) for p in parameter.detach().chunk(2, 1)]
    key = f"w{number}"
    return {f"{number}.{i}": ShardedTensor.from_rank_offsets(key, p, (1, i, 2)) for i, p in enumerate(parts)}


Entries = Callable[[int, Any], dict[str, Any]]


def size_of(tensors: Sequence[Any], suffix: str) -> int:
    """Bytes of the components whose names end in `suffix`."""
    return sum(c.nbytes for t in tensors for n, c in t.components().items() if n.endswith(suffix))


def peak_of(call: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator held at a time during `call`, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


class Floats(TorchDispatchMode):
    """The largest floating-point tensor that an operation gave."""

    largest = operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not isinstance(t, BlockScaledTensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel() if not t.is_meta else 0)
        return out


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of real sizes, for parameters of some 100 KiB."""
    monkeypatch.setattr(torch_files, "DIRECT_BYTES", 1 << 14)
    monkeypatch.setattr(prefetch, "LEAST_WINDOW", 1 << 14)


CASES: list[tuple[str, Entries, Entries]] = [
    *((name, whole, whole) for name in SCHEMES),
    *((name, swiglu, swiglu) for name in ("per_tensor", "mxfp8")),
    ("mxfp8", halves, whole),
]


def state_dict(parameters: Sequence[Any], entries: Entries) -> dict[str, Any]:
    return {k: v for i, p in enumerate(parameters) for k, v in entries(i, p).items()}


@pytest.mark.parametrize(
    ("name", "saved", "loaded"), CASES, ids=[f"{n}-{a.__name__}-{b.__name__}" for n, a, b in CASES]
)
def test_a_load_holds_one_parameter_twice_and_a_tenth_of_the_codes(
    tmp_path: Path, name: str, saved: Entries, loaded: Entries
) -> None:
    source, destination = weights(SCHEMES[name], 1), weights(SCHEMES[name], 2)
    save(state_dict(source, saved), tmp_path)
    state = state_dict(destination, loaded)
    with Floats() as floats:
        peak = peak_of(lambda: load(state, tmp_path, options=LoadOptions(strict_bitwise=True)))
    assert [component_bytes(p) for p in destination] == [component_bytes(p) for p in source]
    codes, others = size_of(destination, "_data"), size_of(destination, "")
    # All scales are held from the planning on: they are checked before the first parameter is written.
    assert 0 < peak <= size_of(destination[:1], "") + codes // 10 + (others - codes)
    assert floats.operations
    assert floats.largest <= destination[0].numel() // 32
