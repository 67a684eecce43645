"""What tests share: a server for those of sources, a cluster for those of loaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.omniload.plan_logging import memory
from tests.storage.seaweed import S3Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the whole run."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def log_url() -> Iterator[str]:
    """A directory in memory, for a plan log."""
    with memory() as url:
        yield url


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node of a Ray cluster, in which this process is; its address."""
    import ray

    from tests.omniload.ray.jobs import start_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNILOAD_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        start_ray()
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the roles of loaders run that do not say it themselves; a test of this fixture runs once for each."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    monkeypatch.setenv("OMNILOAD_EXECUTION", request.param)
    return str(request.param)
