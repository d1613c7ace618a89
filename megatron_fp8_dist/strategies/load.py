"""The load strategy: error texts and agreement. What is read, and what becomes of it, the plan has decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..backends.directory import find_manifest
from ..compat.host import ShardedTensor, TorchDistLoadShardedStrategy, sharded_leaves
from ..errors import Problem
from ..options import LoadOptions
from ..report import LoadReport, last_report
from ..sharding.expand import ComponentShard
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
        """
        super().__init__()
        self.options = options or LoadOptions()
        self.inner = inner
        self._report: LoadReport | None = None

    @property
    def report(self) -> LoadReport | None:
        """This strategy's newest LoadReport; with stock `load`, that of the newest plan in this process."""
        newest = last_report()
        return self._report or (newest if isinstance(newest, LoadReport) else None)

    @report.setter
    def report(self, report: LoadReport) -> None:
        self._report = report

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *host_args: Any) -> Any:
        """Read the leaves. Collective: a read error on one rank is raised on all.

        Raises:
            PlanningError: the state dict was not expanded; nothing was read.
            StorageError: a read failed; no parameter was changed.
        """
        directory = Path(checkpoint_dir)
        attempt(lambda: _check_leaves(sharded_state_dict, directory))
        reader = super().load if self.inner is None else self.inner.load
        return attempt(lambda: reader(sharded_state_dict, directory, *host_args))


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
        if not isinstance(leaf, ShardedTensor) or isinstance(leaf, ComponentShard):
            continue
        if tensors.is_quantized(leaf.data):
            found = f"a quantized {type(leaf.data).__name__} that was not expanded"
            problems.append(Problem(leaf.key, found, "components", remedy))
        elif leaf.key in held:
            found = "an entry that was not expanded, of a tensor that the checkpoint holds quantized"
            problems.append(Problem(leaf.key, found, "components", remedy))
    refuse("the state dict cannot be loaded exactly", problems)
