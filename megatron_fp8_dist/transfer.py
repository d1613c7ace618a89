"""The one place where tensors move from a device to the host."""

from __future__ import annotations

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in host memory: itself where it is there already, a copy otherwise."""
    return tensor.detach() if tensor.device.type == "cpu" else tensor.detach().to("cpu")
