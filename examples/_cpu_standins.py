"""Stand-ins for what needs CUDA while Megatron trains: its own calls, and Transformer Engine's kernels.

Only what training and Megatron's own checkpoint writer need. `megatron_fp8_dist.save` and `load` need none of it, so
the example calls them outside of `active()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron_fp8_dist.te.tensors import wrap

_NOTICE = (
    "no CUDA here: while Megatron trains, stand-ins on the CPU answer torch.cuda.current_device, synchronize and "
    'get_rng_state, and tensors asked for with device="cuda" are made on the CPU'
)


def _current_device() -> str:
    # Megatron passes the answer on as `device=`, where the name of a device does as well as an index.
    return "cpu"


def _synchronize(*_: object) -> None:
    """Nothing runs ahead on a CPU."""


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _dequantize(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    # No gradient passes here: Megatron's linear layers compute theirs outside of autograd.
    return wrap(tensor).dequantize(dtype)


_STAND_INS = (
    (torch.cuda, "current_device", _current_device),
    (torch.cuda, "synchronize", _synchronize),
    # One function under two names, and Megatron's RNG tracker uses both.
    (torch.cuda, "get_rng_state", _get_rng_state),
    (torch.cuda.random, "get_rng_state", _get_rng_state),
)


class _CudaFactoriesOnCpu(TorchFunctionMode):
    """Make on the CPU what is asked for with `device="cuda"`: the pipeline schedules count tokens in such a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


_DEQUANTIZED_ON_GPU = ("MXFP8Tensor", "NVFP4Tensor")
"""Transformer Engine's classes whose `dequantize` is a kernel; the others do it in torch."""


def _te_classes() -> list[type]:
    """Those of them that can be met here: none, where Transformer Engine is not imported."""
    module = sys.modules.get("transformer_engine.pytorch.tensor")
    return [] if module is None else [getattr(module, name) for name in _DEQUANTIZED_ON_GPU]


def needed() -> bool:
    """Whether this process has no CUDA device."""
    return not torch.cuda.is_available()


def notice() -> str:
    """What the stand-ins stand in for, for the user to read."""
    names = [f"{cls.__name__}.dequantize" for cls in _te_classes()]
    if not names:
        return _NOTICE
    return f"{_NOTICE}; BlockScaledTensor computes {' and '.join(names)}"


@contextmanager
def active() -> Iterator[None]:
    """Stand in for CUDA within the block; does nothing where there is a GPU."""
    if not needed():
        yield
        return
    with ExitStack() as stack:
        for owner, name, stand_in in _STAND_INS:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        for cls in _te_classes():
            stack.enter_context(mock.patch.object(cls, "dequantize", _dequantize))
        stack.enter_context(_CudaFactoriesOnCpu())
        yield
