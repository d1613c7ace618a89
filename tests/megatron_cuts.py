"""Parameters as Megatron's own code cuts them into entries: fused projections, and experts.

A cut says which elements of which whole weight a rank's parameter has, and has Megatron make the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules, apply_swiglu_sharded_factory
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray

from megatron_fp8_dist.compat.host import ShardedTensor
from tests.fakemodel import block_of

try:
    from megatron.core.ssm.utils import _split_tensor_factory
except ImportError:
    # Megatron 0.16 has one in each module; Mamba's own cannot be imported without Triton.
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

split_tensor_factory = _split_tensor_factory
"""Megatron's function that cuts an in_proj."""

Rows: TypeAlias = NDArray[np.int64]
WeightId: TypeAlias = tuple[Any, ...]
"""Name and layer, or name, layer and expert."""


@dataclass(frozen=True)
class Part:
    """What one parameter has of one whole weight."""

    weight: WeightId
    shape: tuple[int, int]
    """Of the whole weight."""
    rows: Rows
    columns: Rows

    @property
    def layer(self) -> int:
        """The layer that it belongs to."""
        return int(self.weight[1])

    @property
    def size(self) -> tuple[int, int]:
        """Shape of the parameter."""
        return len(self.rows), len(self.columns)

    @property
    def indices(self) -> tuple[Rows, Rows]:
        """Its rows and columns within the whole weight."""
        return self.rows, self.columns


class Cut(Protocol):
    """A layout of ranks, and how Megatron makes the entries of their parameters."""

    def ranks(self) -> list[dict[str, Part]]:
        """Per rank: name in the state dict -> parameter."""

    def entries(self, rank: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The rank's state dict, from its parameters by name; there may be entries of other things in it."""


# Fused projections: one parameter of several sections of rows

NAMES = {
    "mamba": ["z", "x", "B", "C", "dt"],
    "gated_delta_net": ["query", "key", "value", "z", "beta", "alpha"],
}
"""Megatron's names of the sections of an in_proj."""


@dataclass(frozen=True)
class Fused:
    """A weight of sections of rows, each cut by tensor parallelism; a rank's parts of them are one parameter."""

    kind: str
    """"swiglu", "swiglu singleton" (halves under keys of their own), or a key of `NAMES`."""
    sections: tuple[int, ...]
    """Rows of each section of the whole weight."""
    columns: int
    tp: int
    layers: int = 1
    stacked: bool = True
    """Whether layers are a prepended axis of one key; otherwise each has its own key."""

    def ranks(self) -> list[dict[str, Part]]:
        """See `Cut.ranks`."""
        first = np.cumsum([0, *self.sections])
        shape, columns = (int(first[-1]), self.columns), np.arange(self.columns)
        out = []
        for tp in range(self.tp):
            rows = [o + block_of(s, tp, self.tp) for o, s in zip(first, self.sections, strict=False)]
            own = np.concatenate(rows)
            out.append({str(layer): Part(("w", layer), shape, own, columns) for layer in range(self.layers)})
        return out

    def key(self, layer: int) -> str:
        """Megatron's key of the parameter."""
        name = "mlp.linear_fc1.weight" if self.kind.startswith("swiglu") else "mixer.in_proj.weight"
        return f"decoder.layers.{name}" if self.stacked else f"decoder.layers.{layer}.{name}"

    def stored_keys(self, layer: int = 0) -> list[str]:
        """The keys that are stored."""
        endings = {"swiglu": [""], "swiglu singleton": ["_w", "_v"]}
        own = endings.get(self.kind) or [f".{name}" for name in NAMES[self.kind]]
        return [self.key(layer) + ending for ending in own]

    def entries(self, rank: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """See `Cut.entries`."""
        return {name: self._entry(rank, int(name), p) for name, p in parameters.items()}

    def _entry(self, rank: int, layer: int, parameter: Any) -> Any:
        offsets = ((0, layer, self.layers),) if self.stacked else ()
        where = (*offsets, (len(offsets), rank, self.tp))
        form = {"replica_id": (0, 0, 0), "prepend_axis_num": len(offsets)}
        whole = ShardedTensor.from_rank_offsets(self.key(layer), parameter, *where, **form)
        if self.kind.startswith("swiglu"):
            return apply_swiglu_sharded_factory(whole, offsets, singleton_local_shards=self.kind.endswith("singleton"))
        return split_tensor_factory(whole, [s // self.tp for s in self.sections], NAMES[self.kind], 0)


# Experts


@dataclass(frozen=True)
class Group:
    """What entries need of a process group: this rank's number, and how many ranks there are."""

    number: int = 0
    count: int = 1

    def rank(self) -> int:
        """This rank's number."""
        return self.number

    def size(self) -> int:
        """Number of ranks."""
        return self.count


def without_constructor(cls: Any, **attributes: Any) -> Any:
    """A module of a class whose constructor needs CUDA, with the attributes that its sharded_state_dict reads."""
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@dataclass(frozen=True)
class Experts:
    """Gated experts of a few layers, as Megatron's module makes their entries."""

    ep: int
    tp: int = 1
    module: str = "sequential"
    """"sequential" (SequentialMLP, one linear layer per expert) or "grouped" (TEGroupedMLP: weight{i})."""
    singleton: bool = False
    """Megatron's metadata flag singleton_local_shards: every expert under a key of its own."""
    stacked: bool = True
    layers: int = 2
    experts: int = 4
    hidden: int = 32
    ffn: int = 48

    @property
    def local(self) -> int:
        """Experts per rank."""
        return self.experts // self.ep

    def _places(self) -> list[tuple[int, int]]:
        return [(ep, tp) for ep in range(self.ep) for tp in range(self.tp)]

    def name(self, layer: int, linear: str, expert: int) -> str:
        """Name in the state dict of the weight of one of the rank's experts."""
        grouped = f"{linear}.weight{expert}"
        return f"{layer}.{grouped if self.module == 'grouped' else f'local_experts.{expert}.{linear}.weight'}"

    def prefix(self, layer: int) -> str:
        """What Megatron's MoE layer gives to its experts."""
        return f"decoder.layers.{'' if self.stacked else f'{layer}.'}mlp.experts."

    def key(self, linear: str, layer: int, expert: int) -> str:
        """Megatron's key of a weight; of the parts that are stored it is the beginning."""
        return f"{self.prefix(layer)}experts.{f'{expert}.' if self.singleton else ''}{linear}.weight"

    def ranks(self) -> list[dict[str, Part]]:
        """See `Cut.ranks`."""
        out = []
        for ep, tp in self._places():
            half = block_of(self.ffn, tp, self.tp)
            parts = {}
            for layer in range(self.layers):
                for i in range(self.local):
                    expert, everything = ep * self.local + i, np.arange(self.hidden)
                    gate_and_up = np.concatenate([half, half + self.ffn])
                    parts[self.name(layer, "linear_fc1", i)] = Part(
                        ("fc1", layer, expert), (2 * self.ffn, self.hidden), gate_and_up, everything
                    )
                    parts[self.name(layer, "linear_fc2", i)] = Part(
                        ("fc2", layer, expert), (self.hidden, self.ffn), everything, half
                    )
            out.append(parts)
        return out

    def entries(self, rank: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """See `Cut.entries`."""
        ep, tp = (Group(n, c) for n, c in zip(self._places()[rank], (self.ep, self.tp), strict=True))
        groups = SimpleNamespace(ep=ep, expt_tp=tp, expt_dp=Group(), expt_dp_gtp_remat=Group())
        out = {}
        for layer in range(self.layers):
            own = {n.partition(".")[2]: p for n, p in parameters.items() if n.startswith(f"{layer}.")}
            module = self._grouped(groups, own) if self.module == "grouped" else self._sequential(groups, own)
            prefix = self.prefix(layer)
            offsets = ((0, layer, self.layers),) if self.stacked else ()
            metadata = {"dp_cp_group": Group(), "singleton_local_shards": self.singleton}
            made = module.sharded_state_dict(prefix, offsets, metadata)
            out.update({f"{layer}.{name.removeprefix(prefix)}": value for name, value in made.items()})
        return out

    def _sequential(self, groups: Any, parameters: Mapping[str, Any]) -> Any:
        config = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=1,
            ffn_hidden_size=self.ffn,
            moe_ffn_hidden_size=self.ffn,
            num_moe_experts=self.experts,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        module = SequentialMLP(self.local, config, linears, groups)
        for name, parameter in parameters.items():
            owner = module.get_submodule(name.removesuffix(".weight"))
            assert owner.weight.shape == parameter.shape
            owner.weight = parameter
        return module

    def _grouped(self, groups: Any, parameters: Mapping[str, Any]) -> Any:
        from megatron.core.extensions import transformer_engine as te

        def linear(cls: Any, name: str) -> Any:
            module = without_constructor(
                cls,
                num_gemms=self.local,
                use_bias=False,
                fp8=False,
                fp8_calibration=False,
                fp8_meta={"fp8_checkpoint": False},
                _pg_collection=groups,
                _tp_group=groups.expt_tp,
            )
            for i in range(self.local):
                module.register_parameter(f"weight{i}", parameters[f"{name}.weight{i}"])
            return module

        return without_constructor(
            TEGroupedMLP,
            config=SimpleNamespace(gated_linear_unit=True),
            num_local_experts=self.local,
            ep_group=groups.ep,
            tp_group=groups.expt_tp,
            linear_fc1=linear(te.TEColumnParallelGroupedLinear, "linear_fc1"),
            linear_fc2=linear(te.TERowParallelGroupedLinear, "linear_fc2"),
        )
