"""Jobs on the cluster that tests share, and of processes of their own."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.omniload.ray.jobs import Jobs
from tests.omniload.ray.ranks import Rank


@pytest.fixture
def jobs(cluster: str, tmp_path: Path, request: pytest.FixtureRequest) -> Jobs:
    """Jobs of one test on the cluster."""
    return Jobs(re.sub(r"[^a-z0-9]+", "-", request.node.name)[:80], tmp_path)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Rank]]:
    """Ranks that are ended in any case."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()
