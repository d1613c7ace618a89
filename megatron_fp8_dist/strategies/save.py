"""The save strategy: stale marker away, bytes, manifest; Megatron's metadata.json after it commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends.directory import clear_commit, write_manifest
from ..backends.torch_dist import TorchDistBackend
from ..compat.host import HOST_VERSION, ShardedTensor, TorchDistSaveShardedStrategy, host_range, sharded_leaves
from ..compat.probe import installed
from ..errors import FP8CheckpointError, Problem
from ..options import SaveOptions
from ..report import SaveReport, record
from ..sharding.expand import ComponentShard
from ..sharding.layout import logical_key
from ..sharding.manifest import Manifest
from ..sharding.records import FragmentRecord, build_manifest
from ..sharding.save_plan import fragment_records, main_components
from ..sharding.stored import metadata_digest
from ..te import tensors
from .collective import attempt, from_first, gather_to_first, rank, refuse

_logger = logging.getLogger("megatron_fp8_dist")


def _writer_versions() -> dict[str, str | None]:
    names = ("megatron-fp8-dist", "torch", "transformer-engine")
    return {**{name: installed(name) for name in names}, "megatron-core": str(HOST_VERSION)}


def _check_leaves(sharded_state_dict: Any) -> None:
    """Refuse what must not reach a writer.

    Raises:
        PlanningError: a quantized tensor that was not expanded, or a foreign key that looks like a component's.
    """
    problems = []
    for leaf in sharded_leaves(sharded_state_dict):
        if not isinstance(leaf, ShardedTensor):
            continue
        if isinstance(leaf, ComponentShard) and leaf.data is None:
            remedy = "Expand it for a save: without checkpoint_dir=."
            problems.append(Problem(leaf.key, "an expansion for a load", "components with data", remedy))
        elif tensors.is_quantized(leaf.data):
            remedy = "Use megatron_fp8_dist.save(...), or save expand_quantized(state_dict)."
            found = f"a quantized {type(leaf.data).__name__} that was not expanded"
            problems.append(Problem(leaf.key, found, "components", remedy))
        elif logical_key(leaf.key) is not None and not isinstance(leaf, ComponentShard):
            problems.append(Problem(leaf.key, "a tensor under a component's key", "a key without component suffix"))
    refuse("the state dict cannot be saved exactly", problems)


def _records(sharded_state_dict: Any) -> tuple[list[FragmentRecord], int]:
    """What this rank saves of quantized tensors: fragment records, and bytes of components."""
    main = main_components(sharded_leaves(sharded_state_dict))
    return fragment_records(main), sum(leaf.data.nbytes for leaf in main)


class FP8SaveShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron has no types
    """Save strategy for `dist_checkpointing.save`, on a state dict from `expand_quantized`.

    It subclasses Megatron's for admission only: from 0.17 on, stock `save` silently replaces anything else. It runs
    without a GPU and without a stand-in for torch.cuda.

    Attributes:
        report: the SaveReport of this strategy's newest save, or None.
    """

    def __init__(self, options: SaveOptions | None = None, inner: Any = None) -> None:
        """Set up a save.

        Args:
            options: how to save.
            inner: a strategy whose settings or distribution are kept. A FullyParallelSaveStrategyWrapper distributes
                the writing and gets our backend as its base strategy; of a TorchDistSaveShardedStrategy the settings
                (thread_count, keep_only_main_replica) are taken over.

        Raises:
            ValueError: `inner` together with a backend other than torch_dist.
            TypeError: `inner` is no strategy for torch_dist.
        """
        self.options = options or SaveOptions()
        if inner is not None and self.options.backend != "torch_dist":
            raise ValueError(f"inner= goes with backend='torch_dist', not with {self.options.backend!r}")
        settings = getattr(inner, "base_strategy", inner)
        if settings is not None and not isinstance(settings, (TorchDistSaveShardedStrategy, _BackendStrategy)):
            raise TypeError(f"{inner!r} is no TorchDistSaveShardedStrategy, nor a FullyParallel wrapper around one")
        super().__init__("torch_dist", 1, thread_count=getattr(settings, "thread_count", 1))
        self.keep_only_main_replica = getattr(settings, "keep_only_main_replica", True)
        self.inner = inner
        if hasattr(inner, "base_strategy"):
            # A copy: the caller's wrapper goes on to write what it wrote before.
            self.inner = copy(inner)
            self.inner.base_strategy = _BackendStrategy(self)
        self.report: SaveReport | None = None
        self.finished = False
        """Whether the newest save has left this strategy: Megatron's commit is next."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write a checkpoint. Collective.

        The order, on every rank:

        1. check the leaves, gather fragment records to rank 0 and build the manifest there;
        2. rank 0 removes a stale commit marker, then a stale manifest; barrier;
        3. all ranks write their bytes;
        4. rank 0 writes the manifest, with the digest of what was written.

        Megatron writes `metadata.json`, the commit marker, after this returns.

        Raises:
            PlanningError, ManifestError: no tensor was written (1). Before 0.19 Megatron has written `common.pt`; an
                older checkpoint in the directory is marked incomplete then.
            StorageError: the directory holds no complete checkpoint (2 to 4).
        """
        started, self.finished = time.perf_counter(), False
        directory = Path(checkpoint_dir)
        manifest, size = self._prepare(sharded_state_dict, directory)
        if hasattr(self.inner, "base_strategy"):
            self.inner.save(sharded_state_dict, directory)
        else:
            self.writer().write(sharded_state_dict, directory)
        self._finish(manifest, directory, size, started)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *host_args: Any) -> Any:
        """Start an asynchronous save with Megatron's writer. Collective.

        Steps 1 and 2 of `save` are done before this returns; the manifest is written by a finalize function, after
        the data's own and before the one that Megatron appends for `metadata.json`.
        """
        started = time.perf_counter()
        directory = Path(checkpoint_dir)
        manifest, size = self._prepare(sharded_state_dict, directory)
        writer = self.inner.async_save if hasattr(self.inner, "base_strategy") else super().async_save
        request = writer(sharded_state_dict, directory, *host_args)
        request.finalize_fns.append(lambda: self._finish(manifest, directory, size, started))
        return request

    def writer(self) -> TorchDistBackend:
        """The backend that this strategy writes with."""
        return TorchDistBackend(self.thread_count, self.keep_only_main_replica)

    def _prepare(self, sharded_state_dict: Any, directory: Path) -> tuple[Manifest | None, int]:
        """Steps 1 and 2. Returns the manifest without digest (rank 0 alone) and the bytes of all ranks' components."""

        def build() -> Manifest | None:
            if gathered is None:
                return None
            return build_manifest((r for records, _ in gathered for r in records), _writer_versions())

        common_state_written = host_range.COMMON_STATE_FIRST
        try:
            attempt(lambda: _check_leaves(sharded_state_dict))
            gathered = gather_to_first(attempt(lambda: _records(sharded_state_dict)))
            manifest = attempt(build)
        except FP8CheckpointError:
            if common_state_written and rank() == 0:
                # Megatron has put new common state into the directory: an older checkpoint there is not whole any more.
                clear_commit(directory, common_state=False)
            raise
        attempt(lambda: clear_commit(directory, common_state=not common_state_written) if rank() == 0 else None)
        return manifest, sum(size for _, size in gathered or ())

    def _finish(self, manifest: Manifest | None, directory: Path, size: int, started: float) -> None:
        """Step 4, and the report."""

        def write() -> None:
            if manifest is not None and manifest.tensors:
                write_manifest(directory, replace(manifest, digest=metadata_digest(self.writer().index(directory))))

        attempt(write)
        report = None
        if manifest is not None:
            report = SaveReport(
                checkpoint_dir=str(directory),
                tensors=manifest.layers,
                codes=manifest.codes,
                component_bytes=size,
                seconds=time.perf_counter() - started,
            )
            speed = size / 1e9 / max(report.seconds, 1e-9)
            _logger.info(
                "saved %d quantized tensors (%d codes, %d bytes) in %.2f s (%.2f GB/s) to %s",
                report.tensors,
                report.codes,
                size,
                report.seconds,
                speed,
                directory,
            )
        self.report = from_first(report)
        assert self.report is not None
        record(self.report)
        self.finished = True


class _BackendStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron has no types
    """Bytes alone: what a FullyParallelSaveStrategyWrapper inside FP8SaveShardedStrategy writes with."""

    def __init__(self, outer: FP8SaveShardedStrategy) -> None:
        super().__init__("torch_dist", 1, thread_count=outer.thread_count)
        self.keep_only_main_replica = outer.keep_only_main_replica
        self._writer: Callable[[], TorchDistBackend] = outer.writer

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write the bytes."""
        self._writer().write(sharded_state_dict, Path(checkpoint_dir))
