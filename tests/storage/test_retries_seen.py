"""Retries of a store, as its spans, traces and metrics show them."""

import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prometheus_client import CollectorRegistry

from storage import RetryPolicy, Store, Transient, drain, start_recording, stop_recording
from storage.metrics import SpanMetrics
from storage.spans import set_rank
from storage.trace import trace_json

LARGE_BYTES = 20 << 20  # three ranges of the backend, so that the threads of the process read them


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory; the next ``num_faults`` reads find the connection reset."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    num_faults = 0
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        with self._lock:
            if FlakyFileSystem.num_faults:
                FlakyFileSystem.num_faults -= 1
                raise ConnectionResetError("reset by peer")
        return bytes(super().cat_file(path, start=start, end=end, **options))


@pytest.fixture
def flaky() -> Iterator[Store]:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem().pipe_file("/x", bytes(LARGE_BYTES))
    set_rank(None)
    start_recording()
    yield Store("flaky://", retry=RetryPolicy(max_attempts=5, first_delay_s=0.001))
    stop_recording()
    FlakyFileSystem.num_faults = 0
    FlakyFileSystem.store.clear()


def test_a_span_says_how_often_its_work_was_repeated(flaky: Store) -> None:
    FlakyFileSystem.num_faults = 3
    assert flaky.read("x") == bytes(LARGE_BYTES)
    assert flaky.read("x") == bytes(LARGE_BYTES)
    *waits, repeated, smooth = drain()
    assert [one.name for one in waits] == ["storage.backoff"] * 3
    assert repeated.attributes["num_retries"] == 3
    assert "num_retries" not in smooth.attributes
    assert sum(one.duration_ns for one in waits) <= repeated.duration_ns


def test_retries_on_several_threads_are_added_to_one_span(flaky: Store) -> None:
    FlakyFileSystem.num_faults = 4
    [view] = flaky.read_ranges([("x", 0, LARGE_BYTES)])
    assert view == bytes(LARGE_BYTES)
    spans = drain()
    [ranges] = [one for one in spans if one.name == "storage.read_ranges"]
    assert ranges.attributes["num_retries"] == 4
    waits = [one for one in spans if one.name == "storage.backoff"]
    assert len(waits) == 4
    assert ranges.thread not in {one.thread for one in waits}
    events = json.loads(trace_json(spans))["traceEvents"]
    [of_ranges] = [one for one in events if one["name"] == "storage.read_ranges"]
    assert of_ranges["args"]["num_retries"] == 4
    assert all(one["tid"] != of_ranges["tid"] for one in events if one["name"] == "storage.backoff")


def test_metrics_count_retries_of_work_that_succeeds_and_of_work_that_fails(flaky: Store) -> None:
    registry = CollectorRegistry()

    def value(name: str, operation: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"omniload_operation_{name}", {"operation": operation, "rank": "", **labels}
        )

    with SpanMetrics(registry):
        FlakyFileSystem.num_faults = 2
        flaky.read("x")
        assert value("retries_total", "storage.read") == 2
        FlakyFileSystem.num_faults = 100
        with pytest.raises(Transient, match="tried 5 times"):
            flaky.read("x")
        assert value("retries_total", "storage.read") == 6
        assert value("errors_total", "storage.read", error="Transient") == 1
        assert value("bytes_total", "storage.read") == LARGE_BYTES
        assert value("seconds_count", "storage.backoff") == 6
