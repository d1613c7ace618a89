"""The golden checkpoints: what is in them, by formulas, and the entries that save and load it.

`tests/golden/v<format version>/<backend>/<scheme>` holds one checkpoint per scheme. `scripts/golden.py` wrote them;
what they must hold is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_fp8_dist import BlockScaledTensor, Scheme, save
from megatron_fp8_dist.compat.host import ShardedTensor, TorchDistSaveShardedStrategy
from megatron_fp8_dist.quantized.scheme import E2M1, SCHEMES
from tests.fakeranks import blank
from tests.formats import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from megatron_fp8_dist.quantized.scheme import DirectionSpec, GridSpec

GOLDEN = Path(__file__).parent / "golden"
VERSION = 1
BACKEND = "torch_dist"
COLUMNS = 6
"""Of the weights whose columns are all in one block."""

EMBEDDING = "embedding.word_embeddings.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
PROJ = "decoder.layers.self_attention.linear_proj.weight"
OUTPUT = "output_layer.weight"
NORM = "decoder.final_layernorm.weight"
COMMON = {"iteration": 1234, "args": {"seed": 42, "recipe": "golden"}}

FIRST = {name: Scheme(name, E2M1 if name.startswith("nvfp4") else "E4M3") for name in SCHEMES}
"""The scheme of all quantized weights but one."""

OTHER = {
    "per_tensor": Scheme("per_tensor", "E5M2"),
    "blockwise_2d": Scheme.of("blockwise_2d", "E5M2", power_of_two=0),
    "blockwise_1d": Scheme.of("blockwise_1d", "E5M2", power_of_two=0),
    "mxfp8": Scheme("mxfp8", "E5M2"),
    "mxfp8_2d": Scheme("mxfp8_2d", "E5M2"),
    "nvfp4": Scheme.of("nvfp4", E2M1, e4m3_max=256),
    "nvfp4_2d": Scheme.of("nvfp4_2d", E2M1, e4m3_max=256, use_4over6=1),
    "nvfp4_row_scaled": Scheme.of("nvfp4_row_scaled", E2M1, use_4over6=1),
}
"""The scheme of the second layer of PROJ: another element format, and flags that are not the default."""


def folder(name: str) -> Path:
    """Where the checkpoint of a scheme lies."""
    return GOLDEN / f"v{VERSION}" / BACKEND / name


def block_of(name: str) -> int:
    """The longer side of a scheme's blocks; 8 where the block is the whole shard."""
    grids = [grid for spec in SCHEMES[name].directions for grid in spec.grids]
    return max(side or 0 for grid in grids for side in grid.block) or 8


@dataclass(frozen=True, slots=True)
class Box:
    """A region of one layer."""

    rows: slice
    columns: slice

    @property
    def offset(self) -> tuple[int, int]:
        """First element."""
        return self.rows.start, self.columns.start


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, whole: every layer of it, if it is stacked."""

    key: str
    shape: tuple[int, int]
    """Of one layer."""
    salt: int
    """What tells its numbers from those of the others."""
    layers: tuple[Scheme | None, ...]
    """Scheme per layer; None: BF16."""
    shard_rows: int
    """Rows of one quantized shard."""
    stacked: bool = False
    even: bool = True
    """Whether a rank knows which of the fragments its own is."""
    swiglu: bool = False
    rows: tuple[int, ...] = ()
    """Where destinations are cut, and still exact: no block of theirs meets two stored ones."""
    columns: tuple[int, ...] = ()

    def codes(self, scheme: Scheme, spec: DirectionSpec, layer: int, box: Box) -> torch.Tensor:
        """Code bytes of a box: every byte value is there, and neighbours differ."""
        i, j = np.ogrid[box.rows, box.columns]
        place = (layer * self.shape[0] + i) * self.shape[1] + j
        step, values = (3 if spec.name == "rowwise" else 5), (17 if scheme.element == E2M1 else 257)
        found = ((step * place + self.salt) % values % (values - 1)).astype(np.uint8)
        return torch.from_numpy(found if spec.packed_axis is None else pack(found, spec.packed_axis))

    def grid(self, scheme: Scheme, spec: DirectionSpec, grid: GridSpec, layer: int, box: Box) -> torch.Tensor:
        """Scales (or amax) of a box that is a quantized shard, or begins at a block's edge or inside of one block."""
        height, width = grid.block
        i = np.arange(box.rows.start, box.rows.stop, height or self.shape[0]) // (height or self.shard_rows)
        j = np.arange(box.columns.start, box.columns.stop, width or self.shape[1]) // (width or self.shape[1])
        number = 1000 * layer + 7 * i[:, None] + 3 * j + self.salt + (spec.name == "columnwise")
        return torch.from_numpy(scale(scheme, grid, number))

    def tensor(self, layer: int, box: Box) -> torch.Tensor:
        """A box of one layer, as one quantized shard or in BF16."""
        scheme = self.layers[layer]
        if scheme is None:
            whole = torch.arange(self.shape[0] * self.shape[1]) % 199 - 99
            return whole.to(torch.bfloat16).reshape(self.shape)[box.rows, box.columns].clone()
        components = {}
        for spec in scheme.directions:
            components[spec.data] = self.codes(scheme, spec, layer, box)
            components |= {g.component: self.grid(scheme, spec, g, layer, box) for g in spec.grids}
        return BlockScaledTensor.from_components(scheme, components)

    def boxes(self, rows: tuple[int, ...] = (), columns: tuple[int, ...] = ()) -> list[Box]:
        """The weight cut at some rows and columns."""
        edges = ((0, *inner, size) for inner, size in zip((rows, columns), self.shape, strict=True))
        tall, wide = (list(pairwise(e)) for e in edges)
        return [Box(slice(*r), slice(*c)) for r in tall for c in wide]


def scale(scheme: Scheme, grid: GridSpec, number: NDArray[Any]) -> NDArray[Any]:
    """Values of a grid from their numbers: a valid one of the grid's format for each."""
    if grid.component.startswith("amax"):
        return (1 + number / 8).astype(np.float32)
    if grid.scale_format == "E8M0":
        return (96 + number % 61).astype(np.uint8)
    if grid.scale_format == "E4M3":
        return (1 + number % 113).astype(np.uint8)
    if scheme.flag("power_of_two"):
        powers: NDArray[Any] = np.ldexp(np.float32(1), -(number % 61))
        return powers.astype(np.float32)
    return ((64 + number) / 4096).astype(np.float32)


def weights(name: str, seed: int = 0) -> tuple[Weight, ...]:
    """The weights of a scheme's checkpoint; with a `seed`, those of another model of the same layout.

    With b for the block: EMBEDDING is two shards of b rows, FC1 two layers of SwiGLU whose second half begins inside of
    a block, PROJ three layers of different scheme with blocks of b and of 4 columns, OUTPUT two shards of b and 6 rows
    that do not know their index.
    """
    b, first = block_of(name), FIRST[name]
    half = b // 2 + 2
    return (
        Weight(EMBEDDING, (2 * b, COLUMNS), 11 + seed, (first,), shard_rows=b, rows=(b // 2, b)),
        Weight(
            FC1, (2 * half, COLUMNS), 22 + seed, (first, first), 2 * half, stacked=True, swiglu=True, rows=(half, b)
        ),
        Weight(PROJ, (4, b + 4), 33 + seed, (first, OTHER[name], None), 4, stacked=True, columns=(b,)),
        # One scale (or amax) for both shards, where it is the shard's, as delayed scaling gives it.
        Weight(OUTPUT, (b + 6, COLUMNS), 44 + seed, (first,), b + 6, even=False, rows=(b // 2, b)),
    )


LAYOUTS = ("saved", "whole", "cut")
"""The cuts that were saved; nothing cut at all; and pieces that no rank of a regular grid holds."""


def cuts(weight: Weight, layout: str) -> list[Box]:
    """How a layout cuts a weight."""
    shards = tuple(range(weight.shard_rows, weight.shape[0], weight.shard_rows))
    if layout == "cut":
        return weight.boxes(weight.rows, weight.columns)
    if layout == "saved" and not weight.even:
        return weight.boxes(weight.rows[-1:])
    # What has one scale per shard cannot be joined and stay exact.
    joined = layout == "whole" and weight.layers[0] is not None and not scaled_whole(weight.layers[0])
    return weight.boxes(() if joined else shards)


def scaled_whole(scheme: Scheme) -> bool:
    """Whether some grid of a scheme has one value for a whole shard."""
    return any(grid.block == (None, None) for spec in scheme.directions for grid in spec.grids)


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter of a model with the golden weights."""

    name: str
    entry: Any
    right: torch.Tensor
    """What it must hold after a load."""


def pieces(name: str, layout: str, *, seed: int = 0, empty: bool = False) -> Iterator[Piece]:
    """All parameters of a scheme's checkpoint, cut as a layout has it; `empty` ones hold other bytes."""
    for weight in weights(name, seed):
        for layer in range(len(weight.layers)):
            boxes = cuts(weight, layout)
            for number, box in enumerate(boxes):
                right = weight.tensor(layer, box)
                held = torch.nn.Parameter(blank(right) if empty else right, requires_grad=False)
                part = None if layout == "cut" or (layout, weight.even) == ("saved", False) else (number, len(boxes))
                entry = entry_of(weight, layer, held, box, part)
                yield Piece(f"{weight.key} {layer} {number}", entry, right)
    norm = torch.arange(COLUMNS, dtype=torch.bfloat16) / 2
    held = torch.nn.Parameter(torch.full_like(norm, -1) if empty else norm, requires_grad=False)
    yield Piece(NORM, ShardedTensor.from_rank_offsets(NORM, held), norm)


def entry_of(weight: Weight, layer: int, held: Any, box: Box, part: tuple[int, int] | None) -> Any:
    """The entry that maps a box of one layer: (index, number) of even parts along the rows, or None for any box."""
    stack = ((0, layer, len(weight.layers)),) if weight.stacked else ()
    if part is None:
        shape = (*(count for _, _, count in stack), *weight.shape)
        offset = (*(index for _, index, _ in stack), *box.offset)
        return ShardedTensor(
            weight.key, held, held.dtype, tuple(held.shape), shape, offset, None, prepend_axis_num=len(stack)
        )
    sharded = ShardedTensor.from_rank_offsets(
        weight.key, held, *stack, (len(stack), *part), prepend_axis_num=len(stack)
    )
    return apply_swiglu_sharded_factory(sharded, stack) if weight.swiglu else sharded


def write(name: str, directory: Path, seed: int = 0) -> None:
    """Save the checkpoint of a scheme, in two data files."""
    entries = {piece.name: piece.entry for piece in pieces(name, "saved", seed=seed)}
    save({"model": entries, **COMMON}, directory, TorchDistSaveShardedStrategy(BACKEND, 1, thread_count=2))
