"""A cluster that the tests of this folder share."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.omniload.ray.jobs import Jobs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node, in which this process is; its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNILOAD_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture
def jobs(cluster: str, tmp_path: Path, request: pytest.FixtureRequest) -> Jobs:
    """Jobs of one test on the cluster."""
    return Jobs(re.sub(r"[^a-z0-9]+", "-", request.node.name)[:80], tmp_path)
