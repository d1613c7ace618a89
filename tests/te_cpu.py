"""Genuine Transformer Engine tensors on a CPU: the one stand-in for what needs CUDA.

Transformer Engine quantizes on a device only, so its tensors are built here from codes and scales that a test chooses.
Classes, buffers and quantizers are Transformer Engine's own; only what a device would have computed is given.
"""

from __future__ import annotations

from typing import Any

import torch

CPU = torch.device("cpu")
DELAYED_SCALE = 3.0
"""The scale in a delayed quantizer; no test's scale_inv is its inverse, so that writing it shows."""
DELAYED_AMAX = 7.0


def element_type(element: str) -> Any:
    """Transformer Engine's enum member for "E4M3" or "E5M2"."""
    from transformer_engine.pytorch.constants import DType

    return getattr(DType, f"kFloat8{element}")


def quantizer(recipe: str, element: str = "E4M3", *, columnwise: bool = False) -> Any:
    """A quantizer of recipe "delayed" or "current"; None for "none"."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

    if recipe == "delayed":
        scale, amax = torch.tensor([DELAYED_SCALE]), torch.tensor([DELAYED_AMAX])
        return Float8Quantizer(scale=scale, amax=amax, fp8_dtype=element_type(element), columnwise=columnwise)
    if recipe == "current":
        return Float8CurrentScalingQuantizer(element_type(element), device=CPU, columnwise=columnwise)
    return None


def float8(
    codes: torch.Tensor,
    scale_inv: float,
    *,
    element: str = "E4M3",
    recipe: str = "delayed",
    transpose: bool = False,
    rowwise: bool = True,
) -> Any:
    """A Float8Tensor with nominal dtype BF16.

    Args:
        codes: its bytes, which become its buffer.
        scale_inv: its scale.
        element: "E4M3" or "E5M2".
        recipe: see `quantizer`.
        transpose: allocate the transpose, valid.
        rowwise: keep the rowwise codes; without them the tensor has its transpose alone.
    """
    from transformer_engine.pytorch import Float8Tensor

    transposed = codes.permute(codes.dim() - 1, *range(codes.dim() - 1)).contiguous()
    return Float8Tensor(
        shape=codes.shape,
        dtype=torch.bfloat16,
        data=codes if rowwise else None,
        fp8_scale_inv=torch.tensor([scale_inv]),
        fp8_dtype=element_type(element),
        data_transpose=transposed if transpose or not rowwise else None,
        quantizer=quantizer(recipe, element, columnwise=transpose or not rowwise),
        device=CPU,
    )


def blockwise(rows: int, columns: int) -> Any:
    """An empty Float8BlockwiseQTensor."""
    from transformer_engine.pytorch import Float8BlockQuantizer

    maker = Float8BlockQuantizer(element_type("E4M3"), rowwise=True, columnwise=True)
    return maker.make_empty((rows, columns), dtype=torch.bfloat16, device=CPU)
