"""The files of a checkpoint directory that are not tensors: the commit marker and the manifest.

`metadata.json` is Megatron's, written last: it is the commit marker. `fp8_manifest.json` is ours, written before it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import IncompleteCheckpointError, ManifestError, PlanningError, Problem
from ..options import BACKENDS
from ..sharding.manifest import FILE_NAME, Manifest

COMMIT_MARKER = "metadata.json"
COMMON_STATE = "common.pt"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_commit(directory: Path, *, common_state: bool) -> None:
    """Make an older checkpoint in `directory` read as incomplete: remove its marker first, then its manifest.

    `common_state` removes its `common.pt` as well: Megatron prefers one that is there to the state that it saves.
    """
    for name in (COMMIT_MARKER, FILE_NAME, *([COMMON_STATE] if common_state else [])):
        path = directory / name
        if path.exists():
            path.unlink()
            _sync_directory(directory)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest under a temporary name, sync it, and put it in place."""
    partial = directory / f".{FILE_NAME}.partial"
    with partial.open("w", encoding="utf-8") as f:
        f.write(manifest.dumps())
        f.flush()
        os.fsync(f.fileno())
    partial.replace(directory / FILE_NAME)
    _sync_directory(directory)


def check_committed(directory: Path) -> None:
    """Refuse a directory without commit marker.

    Raises:
        IncompleteCheckpointError: there is no `metadata.json`, or it is damaged.
        ManifestError: it names a backend that is not ours.
    """
    if not directory.is_dir():
        problem = Problem(str(directory), "no such directory", "a checkpoint directory")
        raise IncompleteCheckpointError("there is no checkpoint", [problem])
    remedy = "The save was interrupted before it was complete: use an earlier checkpoint."
    if not (directory / COMMIT_MARKER).is_file():
        problem = Problem(
            str(directory), f"no {COMMIT_MARKER}", "the commit marker that a complete save leaves", remedy
        )
        raise IncompleteCheckpointError("the checkpoint is not complete", [problem])
    try:
        marker = json.loads((directory / COMMIT_MARKER).read_text(encoding="utf-8"))
    except ValueError as e:
        problem = Problem(COMMIT_MARKER, f"no JSON ({e})", "the commit marker that a complete save leaves", remedy)
        raise IncompleteCheckpointError("the checkpoint is not complete", [problem]) from e
    if not isinstance(marker, dict) or "sharded_backend" not in marker:
        problem = Problem(COMMIT_MARKER, repr(marker), "an object that names its sharded_backend", remedy)
        raise IncompleteCheckpointError("the checkpoint is not complete", [problem])
    if marker["sharded_backend"] not in BACKENDS:
        problem = Problem(COMMIT_MARKER, f"backend {marker['sharded_backend']!r}", f"one of {', '.join(BACKENDS)}")
        raise ManifestError("the checkpoint has a format that this package does not read", [problem])


def check_directory(directory: Path) -> None:
    """Refuse to save into what is no directory.

    Raises:
        PlanningError: there is no such directory.
    """
    if not directory.is_dir():
        problem = Problem(str(directory), "no such directory", "an existing directory", "Create it on rank 0 first.")
        raise PlanningError("the checkpoint cannot be saved", [problem])


def check_common_state(directory: Path) -> None:
    """Refuse a checkpoint whose common state this Megatron cannot find.

    Raises:
        PlanningError: it is complete, and there is no `common.pt`.
    """
    check_committed(directory)
    if not (directory / COMMON_STATE).is_file():
        remedy = "Megatron-core from 0.19 on keeps common state among the tensors; older ones cannot read it."
        problem = Problem(str(directory), f"no {COMMON_STATE}", f"the {COMMON_STATE} that this Megatron reads", remedy)
        raise PlanningError("the checkpoint was written by a newer Megatron-core", [problem])


def read_manifest(checkpoint_dir: str | os.PathLike[str]) -> Manifest:
    """The manifest of a complete checkpoint. Local: reads one small file.

    Args:
        checkpoint_dir: the checkpoint's directory.

    Raises:
        IncompleteCheckpointError: no such directory, or no commit marker.
        ManifestError: there is no manifest (nothing in the checkpoint is quantized), or it is damaged or of a version
            that cannot be read.
    """
    directory = Path(checkpoint_dir)
    manifest = find_manifest(directory)
    if manifest is None:
        problem = Problem(str(directory), f"no {FILE_NAME}", "the manifest of a checkpoint with quantized tensors")
        raise ManifestError("the checkpoint holds no quantized tensors", [problem])
    return manifest


def find_manifest(directory: Path) -> Manifest | None:
    """The manifest of a complete checkpoint, or None where nothing is quantized. Raises as `read_manifest` does."""
    check_committed(directory)
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ManifestError(f"{FILE_NAME} is damaged", [Problem(FILE_NAME, f"no UTF-8 ({e})", "UTF-8 text")]) from e
    return Manifest.loads(text)
