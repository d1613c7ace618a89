"""Saved fragments and a wanted region -> what to read, and how to assemble it. Frozen plan data and pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import StorageError
from ..quantized.grid import Grid
from ..quantized.scheme import SCALE_DTYPES, DirectionSpec
from ..quantized.tensor import BlockScaledTensor, Direction, assemble
from .layout import Box, Fragment, Region, TensorEntry, component_key, fragment_edges


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one saved fragment that a source needs."""

    fragment: Fragment
    box: Box


@dataclass(frozen=True, slots=True)
class Source:
    """Where one wanted region comes from."""

    key: str
    """Logical key as stored."""
    box: Box
    """Wanted region, in the coordinates of the stored tensor."""
    entry: TensorEntry | None
    """None: stored in high precision."""
    pieces: tuple[Piece, ...] = ()


def plan_source(key: str, entry: TensorEntry, box: Box) -> Source:
    """What to read of the quantized tensor `key` to fill `box`: one piece per overlapping saved fragment."""
    pieces = []
    for fragment in entry.overlapping(box):
        common = fragment.box.intersect(box)
        if common is not None:
            pieces.append(Piece(fragment, common))
    return Source(key, box, entry, tuple(pieces))


def code_region(source: Source, entry: TensorEntry, direction: DirectionSpec, piece: Piece) -> Region:
    """The region of stored codes of one piece. It never crosses a fragment."""
    return Region(component_key(source.key, direction.data), piece.box, entry.global_shape)


def scale_region(source: Source, entry: TensorEntry, direction: DirectionSpec, piece: Piece) -> Region:
    """The region of stored scales of one piece: always all of one fragment's.

    FullyParallelLoad tells reads apart by key and offset alone; two extents at one offset would come back wrong.
    """
    return entry.scale_region(source.key, direction.scale, piece.fragment)


def piece_regions(source: Source, piece: Piece) -> Iterator[tuple[str, Region, torch.dtype]]:
    """(component, region, stored dtype) of everything to read for one piece."""
    entry = source.entry
    if entry is None:
        return
    for direction in entry.scheme.directions:
        yield direction.data, code_region(source, entry, direction, piece), torch.uint8
        dtype = SCALE_DTYPES[direction.scale.scale_format]
        yield direction.scale.component, scale_region(source, entry, direction, piece), dtype


def read_piece(source: Source, piece: Piece, components: Mapping[str, torch.Tensor]) -> BlockScaledTensor:
    """One piece from its components, as they were read.

    Raises:
        StorageError: a component does not have the dtype and shape that were asked for.
    """
    entry = source.entry
    assert entry is not None, "a high-precision source has no pieces"
    axes = entry.prepended_axes
    for component, region, dtype in piece_regions(source, piece):
        found = components[component]
        if (found.dtype, tuple(found.shape)) != (dtype, region.box.shape):
            raise StorageError(
                f"{region.key} at {region.box.offset}: asked for {dtype} {region.box.shape}, "
                f"read {found.dtype} {tuple(found.shape)}"
            )
    directions = {}
    for direction in entry.scheme.directions:
        codes = components[direction.data].reshape(piece.box.shape[axes:])
        edges = fragment_edges(entry.scheme, direction.scale, piece.fragment, axes)
        slots = components[direction.scale.component]
        slots = slots.reshape(slots.shape[axes:])
        grid = Grid(slots[tuple(slice(0, len(e) - 1) for e in edges)], edges)
        for axis, start in enumerate(piece.box.within(piece.fragment.box.offset)[axes:]):
            grid = grid.narrow(axis, start, codes.shape[axis])
        directions[direction.data] = Direction(codes, grid)
    return BlockScaledTensor(entry.scheme, directions, getattr(torch, entry.nominal_dtype))


def read_source(source: Source, pieces: Sequence[BlockScaledTensor], device: torch.device) -> BlockScaledTensor:
    """The wanted region from its pieces, every scale kept. Elements outside the stored tensor get code 0."""
    entry = source.entry
    assert entry is not None, "a high-precision source has no pieces"
    axes = entry.prepended_axes
    placed = [
        (plan.box.within(source.box.offset)[axes:], piece) for plan, piece in zip(source.pieces, pieces, strict=True)
    ]
    dtype = getattr(torch, entry.nominal_dtype)
    return assemble(source.box.shape[axes:], placed, entry.scheme, dtype, device)
