"""Metrics: what spans add up to, as Prometheus reads it."""

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from storage import NotFound, Store, drain, span, start_recording, stop_recording
from storage.metrics import SpanMetrics
from storage.spans import set_rank


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """A registry that is being fed, by spans that nobody records."""
    stop_recording()
    drain()
    set_rank(None)
    registry = CollectorRegistry()
    with SpanMetrics(registry):
        yield registry
    set_rank(None)


def value(
    registry: CollectorRegistry, name: str, operation: str, rank: str = "", **labels: str
) -> float | None:
    return registry.get_sample_value(
        f"omniload_operation_{name}", {"operation": operation, "rank": rank, **labels}
    )


def test_a_store_is_counted_without_recording(registry: CollectorRegistry, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("a", b"12345")
    store.write("b", [b"12", b"3"])
    store.read("a")
    with pytest.raises(NotFound):
        store.read("c")
    assert drain() == []
    assert value(registry, "seconds_count", "storage.write") == 2
    assert value(registry, "bytes_total", "storage.write") == 8
    assert value(registry, "seconds_count", "storage.read") == 2
    assert value(registry, "bytes_total", "storage.read") == 5
    assert value(registry, "errors_total", "storage.read", error="NotFound") == 1
    assert value(registry, "retries_total", "storage.read") == 0
    assert value(registry, "errors_total", "storage.write", error="NotFound") is None


def test_bytes_of_failed_work_are_not_counted_but_its_retries_are(registry: CollectorRegistry) -> None:
    def fail_after_retries() -> None:
        with span("work", num_bytes=100) as current:
            current.count(num_retries=2)
            current.count(num_retries=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_retries()
    with span("work", num_bytes=7):
        pass
    assert value(registry, "bytes_total", "work") == 7
    assert value(registry, "retries_total", "work") == 3
    assert value(registry, "errors_total", "work", error="ZeroDivisionError") == 1
    assert value(registry, "seconds_count", "work") == 2


def test_ranks_are_apart(registry: CollectorRegistry) -> None:
    for rank in (0, 3, 3):
        set_rank(rank)
        with span("work", num_bytes=1):
            pass
    assert value(registry, "bytes_total", "work", rank="0") == 1
    assert value(registry, "bytes_total", "work", rank="3") == 2
    assert value(registry, "bytes_total", "work") is None


def test_durations_lie_in_the_bucket_that_holds_them(registry: CollectorRegistry) -> None:
    start_recording()
    with span("work"):
        threading.Event().wait(0.011)
    [only] = drain()
    stop_recording()
    buckets = {
        le: value(registry, "seconds_bucket", "work", le=le) for le in ("1e-05", "0.01", "300.0", "+Inf")
    }
    assert buckets == {"1e-05": 0, "0.01": 0, "300.0": 1, "+Inf": 1}
    assert value(registry, "seconds_sum", "work") == only.duration_ns / 1e9


def test_nothing_is_lost_between_threads(registry: CollectorRegistry) -> None:
    def work() -> None:
        for _ in range(500):
            with span("work", num_bytes=2):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert value(registry, "seconds_count", "work") == 4000
    assert value(registry, "bytes_total", "work") == 8000


@pytest.mark.parametrize("odd", ["many", -5, None, float("nan"), [1]])
def test_odd_attributes_never_fail_the_work(registry: CollectorRegistry, odd: object) -> None:
    with span("work", num_bytes=odd, num_retries=odd, rank=odd):
        pass
    assert value(registry, "bytes_total", "work", rank=str(odd)) == 0
    assert value(registry, "retries_total", "work", rank=str(odd)) == 0


def test_prometheus_reads_them_over_http(registry: CollectorRegistry, tmp_path: Path) -> None:
    Store(tmp_path).write("a", b"12345")
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items() if not name.endswith("_created")} == {
        "omniload_operation_seconds": "histogram",
        "omniload_operation_bytes": "counter",
        "omniload_operation_retries": "counter",
        "omniload_operation_errors": "counter",
    }
    assert all(family.documentation for family in families.values())
    [total] = [one for one in families["omniload_operation_bytes"].samples if one.name.endswith("_total")]
    assert (total.labels, total.value) == ({"operation": "storage.write", "rank": ""}, 5)


def test_closing_stops_counting_and_frees_the_names() -> None:
    registry = CollectorRegistry()
    metrics = SpanMetrics(registry)
    with pytest.raises(ValueError, match="omniload_operation_seconds"):
        SpanMetrics(registry)
    with span("work"):
        pass
    assert value(registry, "seconds_count", "work") == 1
    metrics.close()
    metrics.close()
    assert list(registry.collect()) == []
    assert span("a") is span("b"), "spans are off again"
    with SpanMetrics(registry):
        assert value(registry, "seconds_count", "work") is None


def test_the_client_is_loaded_only_when_metrics_are_wanted() -> None:
    script = "import sys, storage, storage.trace; print('prometheus_client' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "False"
