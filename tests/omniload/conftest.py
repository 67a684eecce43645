"""A server that tests of sources share."""

from collections.abc import Iterator

import pytest

from tests.storage.seaweed import S3Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the whole run."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
