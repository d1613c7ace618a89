"""Loading one parameter: what is read for it, what comes of it, and the merge that restores it.

Carrying a task out needs no strategy of ours: every leaf is an ordinary region read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..compat.host import ShardedTensorFactory
from ..errors import PlanningError, Problem, StorageError
from ..options import LoadOptions
from ..quantized.tensor import BlockScaledTensor
from ..te import tensors
from ..transfer import to_host
from .cuts import Cut
from .expand import (
    ComponentShard,
    drop_layer_axis,
    leaves,
    refill,
    skeleton,
)
from .layout import Box, Region, TensorEntry
from .reshard import Piece, Source, code_region, grid_region, piece_regions, read_piece, read_source

_META = torch.device("meta")

Pull = Callable[[Sequence[Region]], list[torch.Tensor]]
"""Reads regions of stored components into host memory."""

Scales = Mapping[Region, torch.Tensor]
"""Scale regions that were read while planning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task will do, known before it is done."""

    kind: str
    """"exact", "requantized", "dequantized" or "quantized"; "" where nothing quantized is involved."""
    requantized_blocks: int = 0
    codes: int = 0
    component_bytes: int = 0


@dataclass(eq=False, slots=True)
class LoadTask:
    """Loading one parameter."""

    original: Any
    sources: tuple[Source, ...]
    scales: Scales = field(default_factory=dict)
    """The scales of all pieces, filled in while planning."""
    outcome: Outcome = field(default_factory=lambda: Outcome(""))
    directory: str = ""
    """The checkpoint that it was planned for."""
    pull: Pull | None = None
    """Where given, `merge` reads the components itself, one parameter at a time, and `build` only names their keys."""
    cut: Cut | None = None
    """Where given, the entry is one part of a parameter, which is judged and restored with its last part."""
    done: bool = False
    """Whether this task restored the parameter."""

    @property
    def restored(self) -> bool:
        """Whether the parameter was restored."""
        return self.done if self.cut is None else self.cut.done

    @property
    def param(self) -> Any:
        """The destination: the parameter, or the tensor in high precision, that the entry stands for."""
        return self.original.data if self.cut is None else self.cut.param

    @property
    def key(self) -> str:
        """Logical key of the entry."""
        return str(self.original.key)

    def scale_regions(self) -> Iterator[Region]:
        """Every scale region that the task needs."""
        for source, piece in self._pieces():
            assert source.entry is not None
            for grid in source.grids():
                yield grid_region(source, source.entry, grid, piece)

    def regions(self) -> Iterator[Region]:
        """Every region of codes that the task reads, in the order in which `merge` needs them."""
        for source, piece in self._pieces():
            yield from (r for _, r, _ in piece_regions(source, piece) if r not in self.scales)

    def _pieces(self) -> Iterator[tuple[Source, Piece]]:
        return ((source, piece) for source in self.sources if source.entry is not None for piece in source.pieces)

    def build(self, key: str, replica_id: Any) -> Any:
        """The reads of this task: per ShardedTensor of the original entry, per saved fragment, per component.

        Raises:
            PlanningError: the entry was given another key after it was planned.
        """
        if key != self.key:
            problem = Problem(key, f"an entry that was planned as {self.key}", "the key that it was planned with")
            raise PlanningError("an entry was given another key after expand_quantized", [problem])
        built = leaves(skeleton(self.original))
        return {
            str(i): self._read_leaves(source, replica_id)
            if source.entry is not None
            else self._plain(leaf, source, replica_id)
            for i, (leaf, source) in enumerate(zip(built, self.sources, strict=True))
        }

    def _read_leaves(self, source: Source, replica_id: Any) -> dict[str, dict[str, ComponentShard]]:
        entry = source.entry
        assert entry is not None
        if not source.pieces:
            return {"-": self._nothing(source, entry, replica_id)}
        pieces = {
            str(j): {
                component: self._leaf(region if self.pull is None else region.empty(), dtype, replica_id)
                for component, region, dtype in piece_regions(source, piece)
            }
            for j, piece in enumerate(source.pieces)
        }
        read = {component for component, _, _ in piece_regions(source, source.pieces[0])}
        unread = {c: leaf for c, leaf in self._nothing(source, entry, replica_id).items() if c not in read}
        return {**pieces, "-": unread} if unread else pieces

    def _nothing(self, source: Source, entry: TensorEntry, replica_id: Any) -> dict[str, ComponentShard]:
        """Leaves that read nothing: they keep an entry in the state dict, and name stored keys that are not needed.

        They lie at the end of their tensors: FullyParallelLoad tells reads apart by key and offset alone.
        """
        stored = {c: Region(k, Box(s, s), s).empty() for k, c, s in entry.stored(source.key)}
        return {c: self._leaf(r, entry.dtype(c), replica_id) for c, r in stored.items()}

    def _leaf(self, region: Region, dtype: torch.dtype, replica_id: Any) -> ComponentShard:
        return ComponentShard(
            key=region.key,
            data=None,
            dtype=dtype,
            local_shape=region.box.shape,
            global_shape=region.global_shape,
            global_offset=region.box.offset,
            axis_fragmentations=None,
            replica_id=replica_id,
            planned_for=self.directory,
        )

    def _plain(self, leaf: Any, source: Source, replica_id: Any) -> Any:
        stored = leaf if leaf.key == source.key else drop_layer_axis(leaf)
        return replace(stored, data=None, replica_id=replica_id)

    def merge(self, loaded: Any) -> Any:
        """Assemble what was read, write it into the parameter where it is quantized, and return the entry's value.

        Raises:
            StorageError: what was read is not what was planned; the parameter is as it was.
        """
        values = [self._value(source, loaded.get(str(i), {})) for i, source in enumerate(self.sources)]
        value = self._join(values)
        if not isinstance(value, BlockScaledTensor):
            return value
        moved = value.to(self.param.device)
        assert isinstance(moved, BlockScaledTensor), "a move keeps the class"
        if not tensors.is_quantized(self.param) or (self.cut is not None and self.cut.high_precision):
            return moved.dequantize(self.param.dtype)
        if self.cut is None:
            self._restore(moved)
        elif self.cut.add(self.original, moved):
            whole = self.cut.join()
            assert isinstance(whole, BlockScaledTensor), "judged while planning"
            self._restore(whole)
        # Not the parameter itself: TE's blockwise class empties its buffers when it is copied onto itself.
        return tensors.alias(self.original.data)

    def _restore(self, value: BlockScaledTensor) -> None:
        conformed, _ = value.conform(tensors.scheme_of(self.param), tensors.directions_of(self.param))
        tensors.restore(self.param, conformed)
        self.done = True
        if self.cut is not None:
            self.cut.done = True

    def _value(self, source: Source, loaded: Any) -> Any:
        if source.entry is None:
            return loaded
        codes = source.specs()[0].data
        device = loaded["0"][codes].device if self.pull is None and source.pieces else torch.device("cpu")
        return read_source(source, self._read_pieces(source, loaded), device)

    def _read_pieces(self, source: Source, loaded: Any) -> Iterator[BlockScaledTensor]:
        for j, piece in enumerate(source.pieces):
            if self.pull is None:
                components = loaded[str(j)]
                self._check_scales(source, piece, components)
            else:
                components = self._pulled(source, piece, self.pull)
            yield read_piece(source, piece, components)

    def _pulled(self, source: Source, piece: Piece, pull: Pull) -> dict[str, torch.Tensor]:
        # Scales were read while planning.
        known = {c: self.scales[r] for c, r, _ in piece_regions(source, piece) if r in self.scales}
        wanted = {c: r for c, r, _ in piece_regions(source, piece) if c not in known}
        return known | dict(zip(wanted, pull(list(wanted.values())), strict=True))

    def _check_scales(self, source: Source, piece: Piece, components: Mapping[str, torch.Tensor]) -> None:
        assert source.entry is not None
        for grid in source.grids():
            region = grid_region(source, source.entry, grid, piece)
            found, planned = components[grid.component], self.scales[region]
            if not torch.equal(to_host(found).view(torch.uint8), planned.view(torch.uint8)):
                raise StorageError(f"{region.key}: scales read now differ from those read while planning")

    def _join(self, values: Sequence[Any]) -> Any:
        if not isinstance(self.original, ShardedTensorFactory):
            return values[0]
        return self.original.merge_fn(refill(skeleton(self.original), iter(values)))

    def rehearse(self, options: LoadOptions) -> list[Problem]:
        """Carry the task out on scales alone, set `outcome`, and return what keeps it from being done."""
        values: list[Any] = []
        codes = size = 0
        for source, leaf in zip(self.sources, leaves(skeleton(self.original)), strict=True):
            if source.entry is None:
                values.append(torch.empty(leaf.local_shape, dtype=leaf.dtype, device=_META))
                continue
            pieces = []
            for piece in source.pieces:
                parts = dict(self._planned(source, piece))
                pieces.append(read_piece(source, piece, parts))
                codes += piece.box.size
                size += sum(t.nbytes for t in parts.values())
            values.append(read_source(source, pieces, _META))
        problems, kind, blocks = self._judge(self._join(values), options)
        self.outcome = Outcome(kind, blocks, codes, size)
        return problems

    def _planned(self, source: Source, piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
        assert source.entry is not None
        for direction in source.specs():
            region = code_region(source, source.entry, direction, piece)
            yield direction.data, torch.empty(region.box.shape, dtype=torch.uint8, device=_META)
            for grid in direction.grids:
                yield grid.component, self.scales[grid_region(source, source.entry, grid, piece)]

    def _judge(self, value: Any, options: LoadOptions) -> tuple[list[Problem], str, int]:
        param, shape = self.param, self.original.data.shape
        if tuple(value.shape) != tuple(shape):
            problem = Problem(self.key, f"shape {list(value.shape)} from the checkpoint", f"shape {list(shape)}")
            return [problem], "", 0
        whole = all(source.entry is not None for source in self.sources)
        if whole and tensors.is_quantized(param) and not isinstance(value, BlockScaledTensor):
            found = f"a {type(value).__name__} {value.dtype} from the entry's merge function"
            remedy = "It must join its parts with cat, narrow, split, slice or view alone."
            return [Problem(self.key, found, "the parameter, still quantized", remedy)], "", 0
        if self.cut is not None:
            self.cut.high_precision |= not isinstance(value, BlockScaledTensor)
            if not self.cut.add(self.original, value):
                return [], "", 0
            value = self.cut.join()
            if isinstance(value, Problem):
                return [value], "", 0
        if not isinstance(value, BlockScaledTensor):
            kind = "quantized" if tensors.is_quantized(param) else ""
            return self._inexact(options, kind, "high precision in the checkpoint, quantized in the model"), kind, 0
        if not tensors.is_quantized(param):
            if not param.is_floating_point():
                return [Problem(self.key, f"{param.dtype} in the model", "a floating-point destination")], "", 0
            why = f"quantized in the checkpoint, {param.dtype} in the model"
            return self._inexact(options, "dequantized", why), "dequantized", 0
        refusal = tensors.unwritable(param, self.key)
        if refusal is not None:
            return [refusal], "", 0
        scheme = tensors.scheme_of(param)
        if scheme.element != value.scheme.element and not options.allow_recast:
            remedy = "Pass LoadOptions(allow_recast=True) to requantize it."
            problem = Problem(
                self.key, f"{value.scheme.element} codes in the checkpoint", f"{scheme.element} codes", remedy
            )
            return [problem], "", 0
        _, blocks = value.conform(scheme, tensors.directions_of(param))
        kind = "requantized" if blocks else "exact"
        why = f"{blocks} block(s) that meet source blocks of different scale, or change their element format"
        return self._inexact(options, "requantized" if blocks else "", why), kind, blocks

    def _inexact(self, options: LoadOptions, kind: str, why: str) -> list[Problem]:
        if not kind or not options.strict_bitwise:
            return []
        remedy = "Load without strict_bitwise, or on the layout that was saved."
        return [Problem(self.key, why, "a parameter that comes back bit for bit", remedy)]
