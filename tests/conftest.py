"""Fixtures and settings that the whole suite shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests import groups
from tests.rankpool import RankPool

# Small and the same each time, so that a red run means the change and not the draw. The full profile looks further.
settings.register_profile("ci", max_examples=25, derandomize=True, deadline=None)
settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=["light", "te"], help="the environment that this is; found out by default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the te tests where Transformer Engine is absent, except where the lane promises it: there they must fail."""
    if config.getoption("--lane") == "te" or find_spec("transformer_engine"):
        return
    for item in items:
        if item.get_closest_marker("te"):
            item.add_marker(pytest.mark.skip(reason="no Transformer Engine in the light lane; the te lane runs it"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """The session's pool of gloo ranks."""
    with RankPool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture
def single() -> Iterator[None]:
    """A default process group of one rank, in the pytest process itself."""
    groups.join(dist.HashStore(), 0, 1)
    yield
    groups.leave()
