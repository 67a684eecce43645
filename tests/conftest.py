"""Settings of all tests, their order, and the table of what faults led to.

The hooks are here, in the file that the process in front of several reads too.
"""

import signal
from collections import defaultdict

import pytest
from hypothesis import settings

# A deadline would make a test fail on a busy machine, and time is measured in benchmarks, not here.
settings.register_profile("omniload", deadline=None)
settings.load_profile("omniload")


# A shell that starts the tests in the background has them ignore Ctrl-C, and so all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests in front, so that no process of several is left with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
