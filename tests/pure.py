"""Fixtures of the pure tier: a test module asks for them with `pytest_plugins` and `pytestmark`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fp8_dist.quantized import numerics
from tests import toyschemes


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch: small tensors do not use the others, they wait for them, long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy_schemes() -> Iterator[None]:
    """The schemes of toyschemes.py in the package's table."""
    with toyschemes.installed():
        yield


@pytest.fixture
def no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be quantized or dequantized (invariant 1)."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an exact path touched a value")

    for name in ("decode", "encode", "quantize", "dequantize_into", "choose_scales"):
        monkeypatch.setattr(numerics, name, refuse)
