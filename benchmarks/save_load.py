"""How fast one process saves and loads quantized weights.

    python benchmarks/save_load.py [--scheme mxfp8] [--mib 1024] [--directory /fast/disk]

Needs no GPU. The page cache is as the system leaves it: after a save most of a file is in memory, so that loading
measures this package and Megatron more than the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from rich.console import Console
from rich.table import Table
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, LoadOptions, Scheme, load, save

MIB = 1 << 20
SCHEMES = {"float8": "per_tensor", "blockwise": "blockwise_2d", "mxfp8": "mxfp8", "nvfp4": "nvfp4_2d"}


def main() -> None:
    """The whole command."""
    parser = argparse.ArgumentParser(description="Time a save and a load of quantized weights in one process.")
    parser.add_argument("--scheme", choices=SCHEMES, default="float8")
    parser.add_argument("--mib", type=int, default=1024, help="elements, in units of 2**20 (default: 1024)")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = SCHEMES[arguments.scheme]
    scheme = Scheme(name, "E2M1" if name.startswith("nvfp4") else "E4M3")
    table = Table(title=f"{scheme.name}, {arguments.mib} Mi elements, one process, {torch.get_num_threads()} threads")
    for heading in ("weights", "bytes", "save s", "save GB/s", "load s", "load GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for number, count in enumerate((8, 64, 2048)):
            elements = arguments.mib * MIB // count
            directory = Path(folder) / str(number)
            directory.mkdir()
            table.add_row(*_measure(directory, scheme, count, (elements // 1024, 1024)))
    Console().print(table)
    dist.destroy_process_group()


def _measure(directory: Path, scheme: Scheme, count: int, shape: tuple[int, int]) -> list[str]:
    """One row: `count` weights of `shape`."""
    weights = _weights(scheme, count, shape)
    size = sum(c.nbytes for w in weights for c in w.components().values())
    state = {str(i): ShardedTensor.from_rank_offsets(f"weight{i}", w) for i, w in enumerate(weights)}
    saving = _seconds(lambda: save(state, directory))
    loading = _seconds(lambda: load(state, directory, options=LoadOptions(strict_bitwise=True)))
    speed = [f"{s:.2f}" for s in (saving, size / 1e9 / saving, loading, size / 1e9 / loading)]
    return [f"{count} x {shape[0]} x {shape[1]}", f"{size:,}", *speed]


def _weights(scheme: Scheme, count: int, shape: tuple[int, int]) -> list[Any]:
    """Weights of random values: one is quantized, the others are copies of it with buffers of their own."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()
    first = BlockScaledTensor.quantize(values, scheme)
    return [nn.Parameter(first.clone()) for _ in range(count)]


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
