"""A small decoder whose every byte is known, and its Megatron entries on any layout of ranks.

The codes and the scale of a weight follow from its name and layer, so a rank of any layout can say what it should hold.
Two kinds of weight: "block_scaled" (BlockScaledTensor, in both lanes) and "float8" (Transformer Engine's).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from megatron_fp8_dist import BlockScaledTensor, Scheme
from tests import te_cpu

NUM_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks lie as Megatron's do: tensor-parallel neighbours first, then data-parallel ones, then pipeline stages."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        return Place(self, rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def places(self) -> list[Place]:
        """Every rank's place."""
        return [self.place(rank) for rank in range(self.size)]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a layout."""

    layout: Layout
    tp: int
    dp: int
    pp: int

    @property
    def layers(self) -> range:
        """The layers of this rank's pipeline stage."""
        count = NUM_LAYERS // self.layout.pp
        return range(self.pp * count, (self.pp + 1) * count)


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a layer, as a whole."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Tensor-parallel axis; None for a replicated weight in BF16."""
    swiglu: bool = False
    """Two halves of one quantized tensor, stored as two fragments."""

    @property
    def quantized(self) -> bool:
        """Whether it has FP8 codes."""
        return self.axis is not None

    def part(self, whole: torch.Tensor, place: Place) -> torch.Tensor:
        """What one rank holds of `whole`."""
        if self.axis is None:
            return whole.clone()
        if not self.swiglu:
            return whole.chunk(place.layout.tp, self.axis)[place.tp].clone()
        return torch.cat([half.chunk(place.layout.tp)[place.tp] for half in whole.chunk(2)])

    def codes(self, layer: int) -> torch.Tensor:
        """All codes of the weight in one layer, every byte value among them."""
        seed = 1000 * layer + sum(self.name.encode())
        return torch.randint(256, self.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    def scale_inv(self, layer: int) -> float:
        """Its scale: a different one for each weight and layer, the same on all tensor-parallel ranks."""
        return (1 + layer + len(self.name) / 64) / 1024

    def values(self, layer: int) -> torch.Tensor:
        """A high-precision weight."""
        return self.codes(layer).to(torch.bfloat16)


WEIGHTS = (
    Weight("norm", (16,), None),
    Weight("qkv", (24, 16), 0),
    Weight("proj", (16, 8), 1),
    Weight("fc1", (32, 16), 0, swiglu=True),
    Weight("fc2", (16, 16), 1),
)
QUANTIZED = tuple(w for w in WEIGHTS if w.quantized)


def scheme(element: str = "E4M3") -> Scheme:
    """Per-tensor scaling."""
    return Scheme(name="per_tensor", element=element)


def quantized(kind: str, codes: torch.Tensor, scale_inv: float, element: str = "E4M3") -> nn.Parameter:
    """A quantized parameter of either kind from its bytes."""
    if kind == "float8":
        return nn.Parameter(te_cpu.float8(codes, scale_inv, element=element))
    scale = torch.full((1,) * codes.dim(), scale_inv)
    components = {"rowwise_data": codes, "rowwise_scale_inv": scale}
    return nn.Parameter(BlockScaledTensor.from_components(scheme(element), components))


def buffers(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a quantized tensor of either kind, as they lie in memory."""
    if isinstance(tensor, BlockScaledTensor):
        components = tensor.components()
        return components["rowwise_data"], components["rowwise_scale_inv"]
    return tensor._data, tensor._scale_inv


def raw(*tensors: torch.Tensor) -> bytes:
    """The bytes of plain tensors."""
    return b"".join(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def content(tensor: torch.Tensor) -> bytes:
    """The bytes of a parameter: codes and scale where it is quantized."""
    plain = isinstance(tensor, BlockScaledTensor) or hasattr(tensor, "_scale_inv")
    return raw(*buffers(tensor)) if plain else raw(tensor)


class Toy(nn.Module):
    """One rank's part of the model."""

    def __init__(self, kind: str, place: Place, *, blank: bool = False, high_precision: Iterable[int] = ()) -> None:
        """Fill the parameters.

        Args:
            kind: kind of quantized weight.
            place: the rank.
            blank: codes 0xAA, scale 1 and zeros instead of the model's values, for a load to overwrite.
            high_precision: layers without quantized weights; theirs are BF16.
        """
        super().__init__()
        self.place = place
        self.layers = nn.ModuleDict()
        for layer in place.layers:
            module = nn.Module()
            for weight in WEIGHTS:
                quantize = weight.quantized and layer not in high_precision
                module.register_parameter(weight.name, self._parameter(kind, weight, layer, blank, quantize))
            self.layers[str(layer)] = module

    def _parameter(self, kind: str, weight: Weight, layer: int, blank: bool, quantize: bool) -> nn.Parameter:
        if not quantize:
            part = weight.part(weight.values(layer), self.place)
            return nn.Parameter(torch.zeros_like(part) if blank else part)
        codes = weight.part(weight.codes(layer), self.place)
        if blank:
            return quantized(kind, torch.full_like(codes, 0xAA), 1.0)
        return quantized(kind, codes, weight.scale_inv(layer))

    def parameter(self, weight: Weight, layer: int) -> torch.Tensor:
        """The parameter that holds `weight` in `layer`."""
        return self.layers[str(layer)].get_parameter(weight.name)

    def sharded_state_dict(self, stacked: bool = True, prefix: str = "") -> dict[str, Any]:
        """Megatron's entries, by parameter name; stacked ones carry the layer as a prepended axis."""
        return {
            f"layers.{layer}.{weight.name}": entry(
                self.parameter(weight, layer), weight, self.place, layer, stacked=stacked, prefix=prefix
            )
            for layer in self.place.layers
            for weight in WEIGHTS
        }

    def wrong(self, high_precision: Iterable[int] = ()) -> list[str]:
        """Names of the parameters whose bytes are not the model's."""
        right = Toy("block_scaled", self.place, high_precision=high_precision)
        mine = dict(self.named_parameters())
        return [name for name, p in right.named_parameters() if content(p) != content(mine[name])]


def entry(
    parameter: torch.Tensor, weight: Weight, place: Place, layer: int, *, stacked: bool = True, prefix: str = ""
) -> Any:
    """The Megatron entry of one parameter: a ShardedTensor, or a factory for SwiGLU."""
    axes = ((0, layer, NUM_LAYERS),) if stacked else ()
    name = f"decoder.layers.{weight.name}.weight" if stacked else f"decoder.layers.{layer}.{weight.name}.weight"
    split = () if weight.axis is None else ((weight.axis + len(axes), place.tp, place.layout.tp),)
    replica = (0, place.tp if weight.axis is None else 0, place.dp)
    tensor = ShardedTensor.from_rank_offsets(
        prefix + name, parameter, *axes, *split, replica_id=replica, prepend_axis_num=len(axes)
    )
    return apply_swiglu_sharded_factory(tensor, axes) if weight.swiglu else tensor
