"""Writes the golden checkpoints of this format version: `python -m scripts.golden`, at the repository's root.

Every later version of the package must read them as they are, so that a checkpoint is never written over by accident:
`--replace` does it on purpose. What they hold is in tests/goldens.py.
"""

from __future__ import annotations

import argparse
import shutil
from os.path import relpath
from pathlib import Path

import torch.distributed as dist

from megatron_fp8_dist.compat.host import HOST_VERSION, host_range
from tests import goldens, groups


def write(name: str, *, replace: bool) -> Path:
    """Write the checkpoint of a scheme.

    Raises:
        FileExistsError: it is there already, and is not to be replaced.
    """
    # Relative: torch's writer notes the path that it was given.
    target = Path(relpath(goldens.folder(name)))
    if target.exists():
        if not replace:
            raise FileExistsError(f"{target} exists: pass --replace to lose it")
        shutil.rmtree(target)
    target.mkdir(parents=True)
    goldens.write(name, target)
    return target


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", help="names of schemes; all of them by default")
    parser.add_argument("--replace", action="store_true", help="write over checkpoints that are there")
    arguments = parser.parse_args()
    if unknown := set(arguments.schemes) - set(goldens.FIRST):
        parser.error(f"found {', '.join(sorted(unknown))}; known schemes are {', '.join(goldens.FIRST)}")
    if not host_range.COMMON_STATE_FIRST:
        parser.error(f"Megatron-core {HOST_VERSION}: an older one could not read its common state; use 0.16")
    groups.join(dist.HashStore(), 0, 1)
    try:
        written = [write(name, replace=arguments.replace) for name in arguments.schemes or goldens.FIRST]
    except FileExistsError as e:
        parser.error(str(e))
    finally:
        groups.leave()
    parser.exit(message="".join(f"{target}\n" for target in written))


if __name__ == "__main__":
    main()
