"""The load strategy: error texts and agreement. What is read, and what becomes of it, the plan has decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..backends.directory import find_manifest
from ..compat.host import ShardedTensor, TorchDistLoadShardedStrategy, sharded_leaves
from ..errors import Problem
from ..options import LoadOptions
from ..report import LoadReport, last_report
from ..sharding.expand import ComponentShard
from ..sharding.load_plan import LoadPlan
from ..te import tensors
from .collective import attempt, refuse


class FP8LoadShardedStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]  # Megatron has no types
    """Load strategy for `dist_checkpointing.load`, on a state dict from `expand_quantized(..., checkpoint_dir=...)`.

    Any strategy of Megatron can carry such a plan out; this one adds agreement on read errors and their texts. It runs
    without a GPU.
    """

    def __init__(self, options: LoadOptions | None = None, inner: Any = None) -> None:
        """Set up a load.

        Args:
            options: how `megatron_fp8_dist.load` loads with this strategy; stock `load` gets a finished plan.
            inner: the strategy that reads, a FullyParallelLoadStrategyWrapper for example; Megatron's torch_dist one
                by default.

        Raises:
            TypeError: `inner` is no load strategy.
        """
        if inner is not None and not callable(getattr(inner, "load", None)):
            raise TypeError(f"{inner!r} is no load strategy")
        super().__init__()
        self.options = options or LoadOptions()
        self.inner = inner
        self.plan: LoadPlan | None = None
        """The plan that is carried out, where `megatron_fp8_dist.load` made it."""
        self.report: LoadReport | None = None
        """The report of this strategy's newest load."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *host_args: Any) -> Any:
        """Read the leaves. Collective: a read error on one rank is raised on all.

        Before Megatron-core 0.19, where DCP reads collectively, an error outside of DCP's own steps is not.

        Raises:
            PlanningError: the state dict was not expanded; nothing was read.
            StorageError: a read failed. No quantized parameter was changed; others are read in place and may be.
        """
        directory = Path(checkpoint_dir)
        # Always, plan or not: a rank that failed in Megatron's own checks meets the others here, before they read.
        attempt(lambda: None if self.plan else _check_leaves(sharded_state_dict, directory))
        newest = last_report()
        of_this = isinstance(newest, LoadReport) and Path(newest.checkpoint_dir).resolve() == directory.resolve()
        # With a plan of its own, `megatron_fp8_dist.load` sets the report when all is done.
        self.report = newest if isinstance(newest, LoadReport) and of_this and self.plan is None else None
        reader = super().load if self.inner is None else self.inner.load
        return attempt(lambda: reader(sharded_state_dict, directory, *host_args))

    def load_tensors_metadata(self, checkpoint_dir: Any, *host_args: Any) -> Any:
        """Unsharded tensors without data of every stored key, and of the logical keys of quantized tensors.

        Code that drops what is not listed here (NeMo's non-strict load) keeps quantized parameters.
        """
        listed = super().load_tensors_metadata(checkpoint_dir, *host_args)
        manifest = find_manifest(Path(checkpoint_dir))
        for key, entry in manifest.tensors.items() if manifest else ():
            data = torch.empty(entry.global_shape, dtype=getattr(torch, entry.nominal_dtype), device="meta")
            listed[key] = ShardedTensor.from_rank_offsets(key, data).without_data()
        return listed

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """Exactly what is stored, as Megatron's own strategy says: `strict=` modes compare it with the leaves."""
        return TorchDistLoadShardedStrategy().load_sharded_metadata(checkpoint_dir)


def _check_leaves(sharded_state_dict: Any, directory: Path) -> None:
    """Refuse a state dict that was not expanded for this load.

    Raises:
        PlanningError: an entry is quantized, or asks for a key that the checkpoint holds quantized.
    """
    manifest = find_manifest(directory)
    held = set() if manifest is None else {*manifest.tensors, *manifest.mixed}
    remedy = "Use megatron_fp8_dist.load(...), or load expand_quantized(state_dict, checkpoint_dir=...)."
    problems = []
    for leaf in sharded_leaves(sharded_state_dict):
        if not isinstance(leaf, ShardedTensor):
            continue
        if isinstance(leaf, ComponentShard):
            if leaf.planned_for != str(directory.resolve()):
                found = f"an expansion for {leaf.planned_for or 'a save'}"
                problems.append(Problem(leaf.key, found, f"one for {directory}", remedy))
            continue
        if tensors.is_quantized(leaf.data):
            found = f"a quantized {type(leaf.data).__name__} that was not expanded"
            problems.append(Problem(leaf.key, found, "components", remedy))
        elif leaf.key in held:
            found = "an entry that was not expanded, of a tensor that the checkpoint holds quantized"
            problems.append(Problem(leaf.key, found, "components", remedy))
    refuse("the state dict cannot be loaded exactly", problems)
