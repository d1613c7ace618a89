"""Which Megatron-core is installed, and whether this package has been tested with it."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from packaging.version import Version

from ..errors import HostError

MINIMUM = Version("0.14.0")
TESTED = ("0.16", "0.19")
"""The releases that this package has been tested with."""

_logger = logging.getLogger("megatron_fp8_dist")


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def host_version() -> Version:
    """Version of the Megatron-core that can be imported.

    Logs a warning, once, where it has not been tested.

    Raises:
        HostError: Megatron-core is missing or older than `MINIMUM`.
    """
    try:
        from megatron import core
    except ImportError as e:
        raise HostError("megatron-core cannot be imported. Install megatron-fp8-dist[megatron].") from e
    # Megatron appends the commit of whatever checkout the process runs in as a local version.
    version = Version(Version(core.__version__).public)
    if version < MINIMUM:
        raise HostError(f"megatron-core {version} is too old: found {version}, expected {MINIMUM} or newer.")
    if f"{version.major}.{version.minor}" not in TESTED:
        _logger.warning("megatron-core %s has not been tested; tested: %s", version, ", ".join(TESTED))
    return version
