"""Jobs on the cluster that tests share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.omniload.ray.jobs import Jobs


@pytest.fixture
def jobs(cluster: str, tmp_path: Path, request: pytest.FixtureRequest) -> Jobs:
    """Jobs of one test on the cluster."""
    return Jobs(re.sub(r"[^a-z0-9]+", "-", request.node.name)[:80], tmp_path)
