"""Which Megatron-core is installed, and whether this package has been tested with it."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from packaging.version import Version

from ..errors import HostError

MINIMUM = Version("0.14.0")
TESTED = (Version("0.16.1"), Version("0.19.2"))
"""The ends of the tested range."""

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

    Logs a warning, once, where it is outside the tested range.

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
    if not TESTED[0] <= Version(version.base_version) <= TESTED[1]:
        _logger.warning("megatron-core %s is outside the tested range %s to %s", version, *TESTED)
    return version
