"""What storage tests share: a server, a proxy in front of it, recording; and the table of what faults led to."""

from collections import defaultdict
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each fault with what it led to, and for which operations."""
    lines: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "fault_cell" and report.when == "call":
                backend, fault, operation, outcome = value  # type: ignore[misc]
                lines[backend, fault, outcome].append(operation)
    if not lines:
        return
    num_cells = sum(map(len, lines.values()))
    terminalreporter.section(f"faults: {num_cells} cells (backend × fault × operation)")
    for (backend, fault, outcome), operations in sorted(lines.items()):
        terminalreporter.write_line(f"{backend:<11} {fault:<22} {outcome:<16} {', '.join(operations)}")
