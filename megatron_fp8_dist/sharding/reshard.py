"""Saved fragments and a wanted region -> what to read, and how to assemble it. Frozen plan data and pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import StorageError
from ..quantized.grid import Grid
from ..quantized.numerics import Direction
from ..quantized.scheme import SCALE_DTYPES, DirectionSpec, GridSpec
from ..quantized.tensor import BlockScaledTensor, assemble
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
    directions: tuple[str, ...] = ()
    """Names of the stored directions that are read."""

    def specs(self) -> tuple[DirectionSpec, ...]:
        """The stored directions that are read."""
        return () if self.entry is None else tuple(s for s in self.entry.specs() if s.name in self.directions)

    def grids(self) -> Iterator[GridSpec]:
        """The grids of these directions."""
        return (grid for direction in self.specs() for grid in direction.grids)


def plan_source(key: str, entry: TensorEntry, box: Box, wanted: Sequence[str]) -> Source:
    """What to read of the quantized tensor `key` to fill `box`: one piece per overlapping saved fragment.

    Args:
        key: logical key as stored.
        entry: what the manifest says of it.
        box: the wanted region.
        wanted: names of the directions that the destination has. One that is not stored is quantized from the values
            of the first stored one, which is read then.
    """
    pieces = []
    for fragment in entry.overlapping(box):
        common = fragment.box.intersect(box)
        if common is not None:
            pieces.append(Piece(fragment, common))
    names = {name for name in entry.directions if name in wanted}
    if not names or not names.issuperset(wanted):
        names.add(entry.directions[0])
    return Source(key, box, entry, tuple(pieces), tuple(n for n in entry.directions if n in names))


def code_region(source: Source, entry: TensorEntry, direction: DirectionSpec, piece: Piece) -> Region:
    """The region of stored codes of one piece. It never crosses a fragment.

    Raises:
        ValueError: the piece splits a byte of packed codes.
    """
    box = Box(direction.code_shape(piece.box.offset), direction.code_shape(piece.box.shape))
    return Region(
        component_key(source.key, direction.data),
        box,
        direction.code_shape(entry.global_shape),
    )


def grid_region(source: Source, entry: TensorEntry, grid: GridSpec, piece: Piece) -> Region:
    """The region of stored scales (or amax) of one piece: always all of one fragment's.

    FullyParallelLoad tells reads apart by key and offset alone; two extents at one offset would come back wrong.
    """
    return entry.scale_region(source.key, grid, piece.fragment)


def piece_regions(source: Source, piece: Piece) -> Iterator[tuple[str, Region, torch.dtype]]:
    """(component, region, stored dtype) of everything to read for one piece."""
    entry = source.entry
    if entry is None:
        return
    for direction in source.specs():
        yield direction.data, code_region(source, entry, direction, piece), torch.uint8
        for grid in direction.grids:
            yield (
                grid.component,
                grid_region(source, entry, grid, piece),
                SCALE_DTYPES[grid.scale_format],
            )


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
    for direction in source.specs():
        codes = components[direction.data]
        grids = [_cut_grid(entry, grid, piece, components[grid.component]) for grid in direction.grids]
        directions[direction.name] = Direction(codes.reshape(codes.shape[axes:]), *grids)
    return BlockScaledTensor(entry.scheme, directions, getattr(torch, entry.nominal_dtype))


def _cut_grid(entry: TensorEntry, spec: GridSpec, piece: Piece, slots: torch.Tensor) -> Grid:
    """A piece's part of the grid of its fragment, from the fragment's slots."""
    axes = entry.prepended_axes
    edges = fragment_edges(entry.scheme, spec, piece.fragment, axes)
    values = slots.reshape(slots.shape[axes:])[tuple(slice(0, len(e) - 1) for e in edges)]
    grid = Grid(values, edges)
    for axis, start in enumerate(piece.box.within(piece.fragment.box.offset)[axes:]):
        grid = grid.narrow(axis, start, piece.box.shape[axes + axis])
    return grid


def read_source(source: Source, pieces: Iterable[BlockScaledTensor], device: torch.device) -> BlockScaledTensor:
    """The wanted region from its pieces, every scale kept. Elements outside the stored tensor get code 0.

    Args:
        source: the region.
        pieces: one per piece of `source`, in their order. They are taken one after another, and none is kept.
        device: where to put it.
    """
    entry = source.entry
    assert entry is not None, "a high-precision source has no pieces"
    axes = entry.prepended_axes
    offsets = (plan.box.within(source.box.offset)[axes:] for plan in source.pieces)
    dtype = getattr(torch, entry.nominal_dtype)
    placed = zip(offsets, pieces, strict=True)
    return assemble(source.box.shape[axes:], placed, entry.scheme, dtype, device, source.directions)
