"""What stock Megatron's own checkpoint writer calls of torch.cuda, replaced where there is no GPU.

Only a test that shows what stock does may use this: saving and loading through the package must need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let stock `dist_checkpointing.save` and `load` run on gloo and CPU tensors. With a GPU, change nothing."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch("torch.cuda.synchronize"))
            stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        yield
