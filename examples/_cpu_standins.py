"""Stand-ins for the CUDA calls that Megatron's training code makes without asking whether there is a GPU.

Only what training and Megatron's own checkpoint writer need. `megatron_fp8_dist.save` and `load` need none of it, so
the example calls them outside of `active()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

NOTICE = (
    "no CUDA here: while Megatron trains, stand-ins on the CPU answer torch.cuda.current_device, synchronize and "
    'get_rng_state, and tensors asked for with device="cuda" are made on the CPU'
)
"""What the stand-ins stand in for, for the user to read."""


def _current_device() -> str:
    # Megatron passes the answer on as `device=`, where the name of a device does as well as an index.
    return "cpu"


def _synchronize(*_: object) -> None:
    """Nothing runs ahead on a CPU."""


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


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


def needed() -> bool:
    """Whether this process has no CUDA device."""
    return not torch.cuda.is_available()


@contextmanager
def active() -> Iterator[None]:
    """Stand in for CUDA within the block; does nothing where there is a GPU."""
    if not needed():
        yield
        return
    with ExitStack() as stack:
        for owner, name, stand_in in _STAND_INS:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(_CudaFactoriesOnCpu())
        yield
