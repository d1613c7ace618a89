"""Schemes with small blocks, added to the table while tests run: the machinery is generic, per-tensor is one row."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from megatron_fp8_dist.quantized.scheme import SCHEMES, DirectionSpec, GridSpec, SchemeRow

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWWISE = "rowwise"
COLUMNWISE = "columnwise"


def _direction(name: str, block: tuple[int, int]) -> DirectionSpec:
    return DirectionSpec(name, GridSpec(f"{name}_scale_inv", "float32", block))


ROWS = {
    "toy_block": SchemeRow(("E4M3", "E5M2"), (_direction(ROWWISE, (4, 4)),)),
    "toy_flat": SchemeRow(("E4M3", "E5M2"), (_direction(ROWWISE, (3, 5)),)),
    "toy_pair": SchemeRow(("E4M3",), (_direction(ROWWISE, (1, 4)), _direction(COLUMNWISE, (6, 1)))),
}
"""Square blocks, blocks of odd sides, and two independent directions."""


@contextmanager
def installed() -> Iterator[None]:
    """The rows in the package's table."""
    with mock.patch.dict(SCHEMES, ROWS):
        yield
