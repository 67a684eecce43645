"""What storage tests share: a server, a proxy in front of it, and recording."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from storage import start_recording, stop_recording
from tests.storage.proxy import FaultProxy, fault_proxy
from tests.storage.seaweed import S3Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the whole run."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of that server, which does as it is told."""
    address = urlsplit(s3.endpoint_url)
    with fault_proxy(str(address.hostname), int(address.port or 80)) as running:
        yield running


@pytest.fixture
def recording() -> Iterator[None]:
    """Spans are recorded during the test."""
    start_recording()
    yield
    stop_recording()
