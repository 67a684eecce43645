"""Spans: what is recorded, and that nothing is when recording is off."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage.spans
from storage import NotFound, Store, drain, span, spans_to_json, start_recording, stop_recording


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    start_recording()
    yield
    stop_recording()


def test_a_span_says_what_and_when_and_where() -> None:
    with span("outer", path="x") as outer:
        with span("inner"):
            pass
        outer.annotate(num_bytes=3)
    inner, outer_span = drain()
    assert (inner.name, outer_span.name) == ("inner", "outer")
    assert outer_span.attributes == {"path": "x", "num_bytes": 3}
    assert outer_span.start_ns <= inner.start_ns
    assert outer_span.duration_ns >= inner.duration_ns >= 0
    assert outer_span.thread == threading.current_thread().name
    assert drain() == []


def test_an_error_passes_and_is_noted() -> None:
    with pytest.raises(ZeroDivisionError), span("work"):
        raise ZeroDivisionError
    [only] = drain()
    assert only.attributes == {"error": "ZeroDivisionError"}


def test_nothing_is_recorded_when_off() -> None:
    stop_recording()
    with span("work") as off:
        off.annotate(num_bytes=1)
    assert drain() == []
    assert span("a") is span("b")


def test_what_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.spans, "MAX_SPANS", 2)
    for _ in range(5):
        with span("work"):
            pass
    assert [(one.name, one.attributes) for one in drain()] == [
        ("work", {}),
        ("work", {}),
        ("spans.dropped", {"num_spans": 3}),
    ]
    assert drain() == []


def test_json_holds_everything() -> None:
    with span("work", path="x"):
        pass
    spans = drain()
    [plain] = json.loads(json.dumps(spans_to_json(spans)))
    assert plain == {
        "name": "work",
        "start_ns": spans[0].start_ns,
        "duration_ns": spans[0].duration_ns,
        "thread": spans[0].thread,
        "attributes": {"path": "x"},
    }


def test_a_store_records_its_operations(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("a", [b"12", b"345"])
    store.read("a")
    store.read_ranges([("a", 0, 2), ("a", 1, 2)])
    with pytest.raises(NotFound):
        store.read("b")
    write, read, ranges, failed = drain()
    assert (write.name, write.attributes) == ("storage.write", {"path": f"{tmp_path}/a", "num_bytes": 5})
    assert (read.name, read.attributes) == ("storage.read", {"path": f"{tmp_path}/a", "num_bytes": 5})
    assert ranges.name == "storage.read_ranges"
    assert ranges.attributes == {"path": str(tmp_path), "num_bytes": 3, "num_ranges": 2}
    assert failed.attributes == {"path": f"{tmp_path}/b", "error": "NotFound"}
