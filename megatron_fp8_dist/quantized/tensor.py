"""BlockScaledTensor: codes, scales and explicit block edges in one torch.Tensor.

It goes through code that cuts and joins parameters (Megatron's factories) without changing a byte, which Transformer
Engine's own classes do not, and it serves as an FP8-resident weight where Transformer Engine is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import torch

from . import numerics
from .elements import repack
from .grid import Grid, cat, paste
from .numerics import Direction
from .regrid import destination_edges
from .scheme import SCALE_DTYPES, DirectionSpec, Scheme


class BlockScaledTensor(torch.Tensor):
    """A quantized tensor as codes, scales and block edges.

    Exact, as views or copies of bytes: narrow, slice, select, chunk, split, unbind, cat, detach, clone, moves between
    devices, and views that add or drop axes of size 1 (packed codes keep their axes). None of them ever quantizes.
    In-place writes of high-precision values (`copy_`, `add_`, `zero_`, ...) requantize in place with the scale rule of
    the scheme; on a part of a tensor (a slice, a row) they raise. Every other operation works on the dequantized values
    and gives plain tensors that share no memory with this one, also where it is a view for other tensors (`t`,
    `permute`, `expand`, ...).
    """

    scheme: Scheme
    directions: dict[str, Direction]
    origin: tuple[int, ...]
    is_cut: bool
    part_of: torch.Tensor | None
    """The parameter whose buffers these are, for what `exact_ops` cuts from it."""

    def __new__(
        cls,
        scheme: Scheme,
        directions: Mapping[str, Direction],
        dtype: torch.dtype = torch.bfloat16,
        *,
        origin: Sequence[int] | None = None,
        requires_grad: bool = False,
        is_cut: bool = False,
        part_of: torch.Tensor | None = None,
    ) -> Self:
        """Wrap directions, without a copy.

        Args:
            scheme: how it is quantized.
            directions: name ("rowwise", "columnwise") -> codes and grids; at least one of the scheme's.
            dtype: nominal dtype, which the tensor shows to the outside.
            origin: index of the first element within its quantized shard, per axis; zeros by default.
            requires_grad: as for any tensor.
            is_cut: whether it is a part of another tensor, so that its blocks are not its own to rescale.
            part_of: the parameter that it is the region of that begins at `origin`, if it remembers one.
        """
        spec = next(s for s in scheme.directions if s.name in directions)
        codes = directions[spec.name].codes
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.logical_shape(tuple(codes.shape)),
            # Packed codes have no stride per element.
            strides=codes.stride() if spec.packed_axis is None else None,
            dtype=dtype,
            device=codes.device,
            requires_grad=requires_grad,
        )
        out.scheme = scheme
        out.directions = dict(directions)
        out.origin = tuple(origin) if origin is not None else (0,) * codes.dim()
        out.is_cut = is_cut
        out.part_of = part_of
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @classmethod
    def from_components(
        cls, scheme: Scheme, components: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> BlockScaledTensor:
        """One whole quantized shard from its components, which are not copied.

        Args:
            scheme: how it is quantized.
            components: component name -> tensor. Codes are uint8, of the logical shape (half of it along the axis on
                which E2M1 codes are packed); grids have one value per block, in their format's dtype, and as many axes
                as the codes. A direction may be left out whole, but not all.
            dtype: nominal dtype.

        Raises:
            ValueError: a component is missing, or its dtype or shape is not the scheme's.
        """
        directions = {}
        for spec in scheme.directions:
            if spec.data in components:
                directions[spec.name] = _direction(scheme, spec, components)
        if not directions:
            names = " or ".join(spec.data for spec in scheme.directions)
            raise ValueError(f"component {names} is missing; found {', '.join(sorted(components))}")
        return cls(scheme, directions, dtype)

    @classmethod
    def quantize(cls, values: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None = None) -> BlockScaledTensor:
        """Quantize a high-precision tensor as one whole quantized shard, in every direction of the scheme.

        Args:
            values: any float dtype; becomes the nominal dtype, unless it is float32, which gives BF16.
            scheme: how to quantize.
            scale: float32 scale, one per block, for schemes with float32 scales and one direction; None takes each
                block's own largest magnitude.
        """
        directions = {spec.name: numerics.quantize(values, spec, scheme, scale) for spec in scheme.directions}
        return cls(
            scheme,
            directions,
            torch.bfloat16 if values.dtype == torch.float32 else values.dtype,
        )

    def components(self) -> dict[str, torch.Tensor]:
        """Component name -> tensor; the inverse of `from_components`."""
        out = {}
        for spec, direction in self.specs():
            out[spec.data] = direction.codes
            out.update({g.component: grid.values for g, grid in zip(spec.grids, direction.grids, strict=True)})
        return out

    def specs(self) -> list[tuple[DirectionSpec, Direction]]:
        """The directions that are there, with what they are."""
        return [(spec, self.directions[spec.name]) for spec in self.scheme.directions if spec.name in self.directions]

    def only(self, names: Collection[str]) -> BlockScaledTensor:
        """This tensor with the directions of `names` alone, over the same memory."""
        return self._with({n: d for n, d in self.directions.items() if n in names})

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Code * scale_inv, computed in float32, as a plain tensor of `dtype` (the nominal dtype by default)."""
        spec, direction = self.specs()[0]
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        return numerics.dequantize_into(out, direction, spec, self.scheme)

    def conform(self, scheme: Scheme, directions: Sequence[str] | None = None) -> tuple[BlockScaledTensor, int]:
        """This tensor as one quantized shard of `scheme`, and the number of blocks that had to be requantized.

        A block is exact, codes and grids copied, where all source blocks that it meets have bitwise equal scales, and
        codes mean the same in both schemes. It is requantized in float32, once, with a scale from its own largest
        magnitude, where not. A direction that this tensor does not have is quantized from the values of the one it has.
        On the meta device only grids and the number are computed.

        Args:
            scheme: the destination's.
            directions: names of the destination's directions; None is all of the scheme's.
        """
        wanted = [s for s in scheme.directions if directions is None or s.name in directions]
        (value_spec, value_direction), same = (
            self.specs()[0],
            scheme.decodes_like(self.scheme),
        )
        out, count = {}, 0
        for spec in wanted:
            exact = self._as(spec) if same else None
            out[spec.name], blocks = numerics.requantize(
                exact,
                (value_direction, value_spec, self.scheme),
                spec,
                scheme,
                tuple(self.shape),
            )
            count += blocks
        return BlockScaledTensor(scheme, out, self.dtype), count

    def _as(self, spec: DirectionSpec) -> Direction | None:
        """The direction that `spec` names, if it is there, or follows from the only one that the scheme has."""
        if spec.name in self.directions or len(self.scheme.directions) > 1:
            return self.directions.get(spec.name)
        own, direction = self.specs()[0]
        if own.packed_axis is None or spec.packed_axis is None or own.packed_axis == spec.packed_axis:
            return direction
        return replace(direction, codes=repack(direction.codes, own.packed_axis, spec.packed_axis))

    def is_whole(self) -> bool:
        """Whether the blocks are those of one quantized shard of the scheme."""
        return all(
            np.array_equal(mine, own)
            for spec, direction in self.specs()
            for grid_spec, grid in zip(spec.grids, direction.grids, strict=True)
            for mine, own in zip(grid.edges, destination_edges(self.scheme, grid_spec, tuple(self.shape)), strict=True)
        )

    def write_(self, source: BlockScaledTensor) -> None:
        """Overwrite codes and scales in place with those of `source`, which must have the same scheme and blocks.

        Raises:
            ValueError: scheme, shape or blocks differ, or this tensor is a part of another one, with which it shares
                scales; nothing was written.
        """
        self._refuse_cut()
        pairs = []
        for name, mine in self.directions.items():
            other = source.directions.get(name)
            if other is None or source.scheme != self.scheme or not _same_blocks(mine, other):
                raise ValueError(f"cannot write {source!r} over {self!r}: scheme, shape or blocks differ")
            pairs += [(mine.codes, other.codes)]
            pairs += [(a.values, b.values) for a, b in zip(mine.grids, other.grids, strict=True)]
        for destination, value in pairs:
            destination.copy_(value)

    def _refuse_cut(self) -> None:
        if self.is_cut:
            raise ValueError(f"{self!r} is a part of another quantized tensor; write the whole one")

    def _alias(self) -> BlockScaledTensor:
        return self._with({n: d.map(torch.Tensor.detach) for n, d in self.directions.items()})

    def _copied(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> BlockScaledTensor:
        """All tensors through `fn`, which copies: the result owns its blocks."""
        directions = {n: d.map(fn) for n, d in self.directions.items()}
        # A copy of a part of a parameter is not that parameter: writing it would change nothing there.
        return BlockScaledTensor(
            self.scheme, directions, self.dtype, origin=self.origin, is_cut=self.part_of is not None
        )

    def _with(self, directions: Mapping[str, Direction], **changed: Any) -> BlockScaledTensor:
        """A tensor that is like this one but for `directions` and what is named."""
        kept: dict[str, Any] = {"origin": self.origin, "is_cut": self.is_cut, "part_of": self.part_of}
        return BlockScaledTensor(self.scheme, directions, self.dtype, **(kept | changed))

    def _narrow(self, axis: int, start: int, length: int) -> BlockScaledTensor:
        directions = {}
        for spec, d in self.specs():
            first, count = (
                spec.code_shape(tuple(n if a == axis else 0 for a in range(self.dim())))[axis] for n in (start, length)
            )
            codes = d.codes.narrow(axis, first, count)
            directions[spec.name] = Direction(codes, *(g.narrow(axis, start, length) for g in d.grids))
        origin = (
            *self.origin[:axis],
            self.origin[axis] + start,
            *self.origin[axis + 1 :],
        )
        return self._with(directions, origin=origin, is_cut=self.is_cut or length != self.shape[axis])

    def _every(self, axis: int, step: int) -> Any:
        """Every `step`-th element of `axis`, a part of this tensor; not for codes that are packed on it."""
        if any(spec.packed_axis == axis for spec, _ in self.specs()):
            return NotImplemented
        take = (slice(None),) * axis + (slice(None, None, step),)
        directions = {
            name: Direction(d.codes[take], *(g.every(axis, step) for g in d.grids))
            for name, d in self.directions.items()
        }
        return self._with(directions, is_cut=True, part_of=None)

    def _view(self, shape: Sequence[int]) -> BlockScaledTensor | None:
        logical = _view_shape(self.shape, shape)
        directions = {}
        for spec, direction in self.specs():
            if spec.packed_axis is not None and len(logical) != self.dim():
                return None
            grids = [g.regrid_units(logical) for g in direction.grids]
            if any(g is None for g in grids):
                return None
            codes = direction.codes.view(spec.code_shape(logical))
            directions[spec.name] = Direction(codes, *(g for g in grids if g is not None))
        wide = iter([o for o, s in zip(self.origin, self.shape, strict=True) if s != 1])
        origin = tuple(next(wide, 0) if s != 1 else 0 for s in logical)
        return self._with(directions, origin=origin, part_of=self.part_of if logical == self.shape else None)

    @property
    def data(self) -> BlockScaledTensor:
        """An alias without autograd history, as for any tensor."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take over another tensor's buffers; high-precision values are quantized with the scheme of this one.

        torch's own setter changes what the wrapper shows and leaves the buffers behind.
        """
        if not isinstance(value, BlockScaledTensor):
            value = BlockScaledTensor.quantize(value, self.scheme)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.scheme, self.directions = value.scheme, value.directions
        self.origin, self.is_cut, self.part_of = value.origin, value.is_cut, value.part_of

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """One line: shape, scheme, nominal dtype."""
        return (
            f"BlockScaledTensor(shape={tuple(self.shape)}, scheme={self.scheme.name}/{self.scheme.element}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockScaledTensor:
        """A real copy, which owns its blocks; of a part, a copy of that part."""
        own: BlockScaledTensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        own.is_cut, own.part_of = self.part_of is not None, None
        return own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Exact operations from the table in ops.py; everything else on dequantized values."""
        from .ops import dispatch  # made of this class

        return dispatch(func, args, kwargs or {})


def _direction(scheme: Scheme, spec: DirectionSpec, components: Mapping[str, torch.Tensor]) -> Direction:
    """One direction of a whole quantized shard from its components, checked."""
    codes = components[spec.data]
    if codes.dtype != torch.uint8:
        raise ValueError(f"{spec.data} is uint8, found {codes.dtype}")
    shape = spec.logical_shape(tuple(codes.shape))
    grids = []
    for grid in spec.grids:
        if grid.component not in components:
            raise ValueError(f"component {grid.component} is missing; found {', '.join(sorted(components))}")
        values = components[grid.component]
        edges = destination_edges(scheme, grid, shape)
        expected = SCALE_DTYPES[grid.scale_format], tuple(len(e) - 1 for e in edges)
        if (values.dtype, tuple(values.shape)) != expected:
            raise ValueError(
                f"{grid.component} is {expected[0]} {expected[1]} for codes of {tuple(codes.shape)}, "
                f"found {values.dtype} {tuple(values.shape)}"
            )
        grids.append(Grid(values, edges))
    return Direction(codes, *grids)


def _same_blocks(a: Direction, b: Direction) -> bool:
    return a.codes.shape == b.codes.shape and all(
        np.array_equal(e, f)
        for g, h in zip(a.grids, b.grids, strict=True)
        for e, f in zip(g.edges, h.edges, strict=True)
    )


def _view_shape(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """`new` with its -1, if any, made explicit."""
    rest = math.prod(s for s in new if s != -1)
    return tuple(math.prod(old) // rest if s == -1 else s for s in new)


def join(tensors: Sequence[BlockScaledTensor], axis: int) -> BlockScaledTensor:
    """`torch.cat` of block-scaled tensors of one scheme: codes and scales are kept, edges joined."""
    first = tensors[0]
    directions = {}
    for spec, direction in first.specs():
        parts = [t.directions[spec.name] for t in tensors]
        grids = [cat([p.grids[i] for p in parts], axis) for i in range(len(direction.grids))]
        directions[spec.name] = Direction(torch.cat([p.codes for p in parts], axis), *grids)
    # What was put together from parts of a parameter is not that parameter: writing it would change nothing there.
    is_cut = any(t.part_of is not None for t in tensors)
    return BlockScaledTensor(first.scheme, directions, first.dtype, origin=first.origin, is_cut=is_cut)


def assemble(
    shape: Sequence[int],
    pieces: Iterable[tuple[Sequence[int], BlockScaledTensor]],
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    names: Sequence[str],
) -> BlockScaledTensor:
    """A tensor of `shape` on `device` from pieces of one scheme, each at an offset, in the directions of `names`.

    Elements that no piece covers get code 0 and take no part in choosing a scale. Pieces are taken one after another,
    and none is kept; one that is the whole is not copied.
    """
    specs = [spec for spec in scheme.directions if spec.name in names]
    rest = iter(pieces)
    first = list(islice(rest, 1))
    if first and tuple(first[0][1].shape) == tuple(shape):
        return BlockScaledTensor(scheme, {s.name: first[0][1].directions[s.name] for s in specs}, dtype)
    codes = {s.name: torch.zeros(s.code_shape(tuple(shape)), dtype=torch.uint8, device=device) for s in specs}
    grids: list[tuple[tuple[int, ...], dict[str, tuple[Grid, ...]]]] = []
    for offset, piece in chain(first, rest):
        for spec in specs:
            part = piece.directions[spec.name].codes
            window = zip(spec.code_shape(tuple(offset)), part.shape, strict=True)
            codes[spec.name][tuple(slice(o, o + s) for o, s in window)] = part
        grids.append((tuple(offset), {s.name: piece.directions[s.name].grids for s in specs}))
    directions = {}
    for spec in specs:
        pasted = [
            paste(shape, [(o, held[spec.name][i]) for o, held in grids], SCALE_DTYPES[grid.scale_format])
            for i, grid in enumerate(spec.grids)
        ]
        directions[spec.name] = Direction(codes[spec.name], *pasted)
    return BlockScaledTensor(scheme, directions, dtype)
