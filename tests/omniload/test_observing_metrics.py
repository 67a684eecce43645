"""Metrics of a job, as Prometheus reads them, and the dashboard made of them."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import urllib.error
import urllib.request
from importlib.resources import files

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from omniload.errors import ObservingError
from omniload.observing import metrics
from omniload.observing.dashboard import NOT_SHOWN, ROWS, dashboard
from omniload.observing.exporter import MetricsServer
from omniload.observing.metrics import MAX_SERIES, METRICS, JobCollector, Metric
from omniload.observing.stats import JobStats
from storage.metrics import SpanMetrics
from tests.omniload.observing import actor, client, job, source

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(text: str) -> Series:
    """Every sample in an exposition, which must not hold one twice."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    found = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}
    assert len(found) == len(samples), "a sample is there twice: Prometheus would refuse all"
    return found


def exposed(stats: JobStats | None) -> Series:
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: stats))
    return series(generate_latest(registry).decode())


def collected(stats: JobStats) -> Series:
    """What `exposed` gives, without text in between."""
    samples = [one for family in JobCollector(lambda: stats).collect() for one in family.samples]
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}


def value(found: Series, name: str, **labels: str) -> float | None:
    return found.get((name, tuple(sorted({"job_name": "pretrain", **labels}.items()))))


def test_numbers_become_metrics_in_base_units() -> None:
    found = exposed(job())
    assert value(found, "omniload_step") == 1_232
    assert value(found, "omniload_plan_seconds", quantile="0.99") == 0.011
    assert value(found, "omniload_imbalance_ratio") == 1.0375
    assert value(found, "omniload_loader_stall_seconds", rank="1", quantile="0.99") == 0.00475
    assert value(found, "omniload_queue_bytes", actor="web-0", role="loader") == 12_600_000
    assert value(found, "omniload_actor_restarts_total", actor="web-shadow", role="loader") == 1
    assert value(found, "omniload_actor_shadow", actor="web-shadow", role="loader") == 1
    assert value(found, "omniload_source_realised_ratio", source="code") == 0.2
    assert value(found, "omniload_source_failures_total", source="code") == 17


def test_every_metric_is_exposed_as_it_is_defined() -> None:
    registry = CollectorRegistry()
    registry.register(JobCollector(job))
    families = {one.name: one for one in text_string_to_metric_families(generate_latest(registry).decode())}
    assert families.keys() == {one.name.removesuffix("_total") for one in METRICS}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        assert {one.name for one in family.samples} == {metric.name}
        for sample in family.samples:
            assert sample.labels.keys() == {"job_name", *metric.labels}
            assert sample.labels["job_name"] == "pretrain"


def test_every_metric_that_is_defined_is_listed_once() -> None:
    defined = [one for one in vars(metrics).values() if isinstance(one, Metric)]
    assert sorted(one.name for one in defined) == sorted(one.name for one in METRICS)
    assert len({one.name for one in METRICS}) == len(METRICS)
    assert all(one.name.endswith("_total") == (one.kind == "counter") for one in METRICS)


def test_what_is_not_known_is_not_exposed() -> None:
    found = exposed(job(imbalance=math.nan, clients=(client(stall_p99_ms=math.nan),)))
    assert value(found, "omniload_imbalance_ratio") is None
    assert value(found, "omniload_loader_stall_seconds", rank="0", quantile="0.99") is None
    assert value(found, "omniload_loader_stall_seconds", rank="0", quantile="0.5") == 0.00025
    assert not any(math.isnan(one) for one in found.values())
    assert exposed(None) == {}


def test_names_may_hold_anything() -> None:
    odd = 'a "b"\\ {c}\nd 数'
    found = exposed(job(sources=(source(name=odd),)))
    assert value(found, "omniload_source_emitted_tokens_total", source=odd) == 7_012_345


def test_a_job_of_any_size_has_a_bounded_number_of_series() -> None:
    many = MAX_SERIES + 3
    large = job(
        actors=tuple(actor(name=f"{i:06}") for i in range(many)),
        sources=tuple(source(name=f"{i:06}") for i in range(many)),
        clients=tuple(client(rank=i) for i in reversed(range(many))),
    )
    found = collected(large)
    for name in ("omniload_queue_bytes", "omniload_source_declared_ratio", "omniload_client_step"):
        assert sum(sample == name for sample, _ in found) == MAX_SERIES
    assert value(found, "omniload_client_step", rank="0") == 1_233
    assert value(found, "omniload_client_step", rank=str(MAX_SERIES)) is None
    for kind in ("actor", "source", "client"):
        assert value(found, "omniload_series_left_out", kind=kind) == 3
        assert value(collected(job()), "omniload_series_left_out", kind=kind) == 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def test_prometheus_reads_them_over_http_together_with_others() -> None:
    registry = CollectorRegistry()
    current: list[JobStats | None] = [None]
    with SpanMetrics(registry), MetricsServer(lambda: current[0], registry=registry) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "omniload_step" not in get(server.url)
        current[0] = job()
        assert value(series(get(server.url)), "omniload_step") == 1_232
        assert "omniload_operation_seconds" in get(server.url)
    with MetricsServer(job, registry=registry):
        pass  # the names are free again


def test_closing_leaves_no_thread_and_no_open_port() -> None:
    before = set(threading.enumerate())
    server = MetricsServer(job)
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
        get(server.url)  # so the silent one has been accepted, and a thread waits for its request
        assert len(set(threading.enumerate()) - before) >= 2
        server.close()
        assert set(threading.enumerate()) == before
        server.close()
        silent.settimeout(30)
        assert silent.recv(1) == b""
    with pytest.raises(urllib.error.URLError):
        get(server.url)


def test_a_port_that_is_taken_is_one_line() -> None:
    with MetricsServer(job) as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        registry = CollectorRegistry()
        with pytest.raises(ObservingError, match=f"cannot listen on 127.0.0.1:{port}"):
            MetricsServer(job, port=port, registry=registry)
        MetricsServer(job, registry=registry).close()  # nothing was left in the registry
    with pytest.raises(ObservingError, match="65536"):
        MetricsServer(job, port=65536)


def test_a_failing_source_of_numbers_fails_the_scrape_and_not_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers: list[JobStats] = []
    with MetricsServer(lambda: answers[0]) as server:
        with pytest.raises(urllib.error.HTTPError) as failed:
            get(server.url)
        failed.value.close()
        answers.append(job())
        assert value(series(get(server.url)), "omniload_step") == 1_232
    assert "IndexError" in capsys.readouterr().err


def test_the_dashboard_in_the_package_is_that_of_the_metrics() -> None:
    text = files("omniload.observing").joinpath("dashboard.json").read_text(encoding="ascii")
    assert text == json.dumps(dashboard(), indent=1) + "\n", "python -m omniload.observing.dashboard"


def test_the_dashboard_asks_for_every_metric_and_for_no_other() -> None:
    text = json.dumps([one["targets"] for one in dashboard()["panels"] if one["type"] != "row"])
    asked = set(re.findall(r"omniload_\w+", text))
    known = {one.name for one in METRICS}
    assert asked | NOT_SHOWN.keys() == known
    assert not asked & NOT_SHOWN.keys()


def test_panels_name_labels_that_their_metrics_have() -> None:
    for panels in ROWS.values():
        for panel in panels:
            for query in panel.queries:
                labels = {label for metric in query.metrics for label in metric.labels}
                assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels, panel.title
                grouped = re.findall(r"by \((\w+)\)", query.expression)
                assert set(grouped) <= labels, panel.title
                counters = [metric for metric in query.metrics if metric.kind == "counter"]
                assert bool(counters) == ("$__rate_interval" in query.expression), panel.title


def test_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
