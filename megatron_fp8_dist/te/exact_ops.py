"""exact_ops: exact cuts of quantized parameters in code that cuts them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..quantized.tensor import BlockScaledTensor
from . import tensors

aten = torch.ops.aten

_CUTS = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    }
)
"""Operations on one tensor that Transformer Engine's classes answer with dequantized values, or with shared scales."""


@contextmanager
def exact_ops() -> Iterator[None]:
    """Cut and join quantized parameters exactly within the block, on this thread.

    For models whose `sharded_state_dict` cuts a parameter itself, instead of leaving that to a factory: Megatron's
    fused down-projection of multi-latent attention does. Transformer Engine's classes dequantize there.

        with exact_ops():
            sharded_state_dict = model.sharded_state_dict()
        save(sharded_state_dict, checkpoint_dir)

    Within the block narrow, slice, chunk, split and cat of a quantized parameter give BlockScaledTensors over its
    buffers, which remember it. The entries of all of its parts together stand for the parameter: a save stores their
    bytes, and a load writes the whole parameter at once, in place. What a load returns for the parts can be joined
    again with `torch.cat`, which gives an alias of the parameter. Single rows (select, unbind) and strided slices are
    exact as well, but do not remember it: they can be saved, and a load into them is refused.

    In inference mode a cut outside of the block cannot be told from other values: pass `model=` to `expand_quantized`.

    Raises:
        PlanningError: what is cut is of a Transformer Engine class that is not supported.
    """
    with _ExactOps():  # type: ignore[no-untyped-call]  # torch's
        yield


class _ExactOps(TorchDispatchMode):
    """Puts exact parts in the place of parameters that are to be cut."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        quantized = [t for t in tree_leaves((args, kwargs)) if tensors.is_quantized(t)]
        if torch.is_inference_mode_enabled() and quantized and not any(t.is_inference() for t in quantized):
            # Composite operations (narrow, chunk) come here whole in inference mode, and parts of a tensor that was
            # made outside of it can only be made outside of it.
            with torch.inference_mode(False), torch.no_grad(), self:
                return func(*args, **(kwargs or {}))
        if quantized and func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func in _CUTS:
            args = (_exact(args[0]), *args[1:])
        elif func is aten.cat.default:
            args = ([_exact(t) for t in args[0]], *args[1:])
        return func(*args, **(kwargs or {}))


def _exact(value: torch.Tensor) -> torch.Tensor:
    known = isinstance(value, BlockScaledTensor) and value.part_of is not None
    return value if known or not tensors.is_quantized(value) else tensors.exact_part(value)
