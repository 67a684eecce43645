"""Trace files: strict JSON that viewers can nest, with every span in it exactly."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Span, Store, drain, span, start_recording, stop_recording
from storage.spans import set_rank, spans_from_json, spans_to_json
from storage.trace import trace_json


def a_span(
    start_ns: int, duration_ns: int, *, thread: str = "t", name: str = "a.b", **attributes: Any
) -> Span:
    return Span(name=name, start_ns=start_ns, duration_ns=duration_ns, thread=thread, attributes=attributes)


def load_strictly(content: bytes) -> dict[str, Any]:
    """The document, refusing what Python reads but JSON does not allow."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(content.decode("ascii"), parse_constant=refuse)
    return document


def check_structure(content: bytes) -> list[dict[str, Any]]:
    """Hold a file against the format and what viewers make of it; returns the complete events."""
    document = load_strictly(content)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    complete = []
    for event in document["traceEvents"]:
        types = [type(event[field]) for field in ("pid", "tid", "name", "args")]
        assert types == [int, int, str, dict]
        match event["ph"], event["name"]:
            case "M", "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            case "M", "thread_name":
                assert (event["pid"], event["tid"]) not in threads
                threads[event["pid"], event["tid"]] = event["args"]["name"]
            case "M", "process_sort_index" | "thread_sort_index":
                assert type(event["args"]["sort_index"]) is int
            case "X", _:
                assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
                for field in ("ts", "dur"):
                    assert isinstance(event[field], int | float)
                    assert event[field] >= 0
                complete.append(event)
            case other:
                raise AssertionError(f"unknown event {other}")
    assert 0 not in processes
    assert len(set(processes.values())) == len(processes)
    tids = [tid for _, tid in threads]
    assert len(set(tids)) == len(tids), "viewers know threads by their id alone"
    assert {event["pid"] for event in complete} == set(processes)
    assert {(event["pid"], event["tid"]) for event in complete} == set(threads)
    for track in threads:
        check_nesting([event for event in complete if (event["pid"], event["tid"]) == track])
    return complete


def check_nesting(events: list[dict[str, Any]]) -> None:
    """In file order, every event begins no earlier than the one before and ends within what is still open."""
    open_ends: list[int] = []
    previous_ns = 0
    for event in events:
        start_ns, end_ns = nanoseconds(event)
        assert start_ns >= previous_ns
        previous_ns = start_ns
        while open_ends and open_ends[-1] <= start_ns:
            open_ends.pop()
        assert not open_ends or end_ns <= open_ends[-1], "overlaps without being nested"
        open_ends.append(end_ns)


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    start_ns = round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)


def names_of(content: bytes, kind: str) -> list[str]:
    return [event["args"]["name"] for event in load_strictly(content)["traceEvents"] if event["name"] == kind]


@pytest.fixture
def recording() -> Iterator[None]:
    start_recording()
    yield
    stop_recording()
    set_rank(None)


UNIX_NS = 1_800_000_000 * 10**9
SPANS = st.lists(
    st.builds(
        a_span,
        st.one_of(st.integers(0, 20), st.integers(0, 10**15)).map(lambda ns: UNIX_NS + ns),
        st.one_of(st.integers(0, 20), st.integers(0, 10**15)),
        thread=st.sampled_from(["MainThread", "storage_1", "storage_10", "t\n2²"]),
        name=st.sampled_from(["storage.read", "storage.write", "step"]),
        rank=st.sampled_from([None, 0, 1, 17]),
    ),
    max_size=40,
)


@given(SPANS)
def test_any_spans_become_tracks_on_which_all_are_nested_and_exact(spans: list[Span]) -> None:
    content = trace_json(spans)
    events = check_structure(content)
    origin_ns = int(load_strictly(content)["otherData"]["start_unix_ns"])
    found = sorted(
        (event["name"], *nanoseconds(event), -1 if event["args"]["rank"] is None else event["args"]["rank"])
        for event in events
    )
    wanted = sorted(
        (
            one.name,
            one.start_ns - origin_ns,
            one.start_ns - origin_ns + one.duration_ns,
            -1 if one.attributes["rank"] is None else one.attributes["rank"],
        )
        for one in spans
    )
    assert found == wanted


@given(SPANS)
def test_the_order_in_which_spans_are_given_does_not_matter_to_the_tracks(spans: list[Span]) -> None:
    assert names_of(trace_json(spans), "thread_name") == names_of(trace_json(spans[::-1]), "thread_name")


def test_real_work_is_one_track_per_thread_below_its_rank(recording: None, tmp_path: Path) -> None:
    store = Store(tmp_path)
    together = threading.Barrier(3)

    def work(number: int) -> None:
        together.wait(30)
        with span("test.outer", number=number):
            store.write(f"{number}", b"1234")
            store.read(f"{number}")

    spans = []
    for rank in (1, 0):
        set_rank(rank)
        threads = [
            threading.Thread(target=work, args=(number,), name=f"worker-{number}") for number in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        spans += drain()

    content = trace_json(spans)
    events = check_structure(content)
    assert names_of(content, "process_name") == ["rank 0", "rank 1"]
    assert names_of(content, "thread_name") == ["worker-0", "worker-1", "worker-2"] * 2
    assert len(events) == 2 * 3 * 3
    for event in events:
        assert event["cat"] == event["name"].partition(".")[0]
        if event["name"].startswith("storage."):
            assert event["args"]["num_bytes"] == 4
            assert event["args"]["path"].startswith(str(tmp_path))
    for tid in {event["tid"] for event in events}:
        outer, write, read = [event for event in events if event["tid"] == tid]
        assert [outer["name"], write["name"], read["name"]] == ["test.outer", "storage.write", "storage.read"]
        assert nanoseconds(outer)[1] >= nanoseconds(read)[1]


def test_a_trace_is_the_same_after_the_spans_went_through_files(recording: None, tmp_path: Path) -> None:
    with span("outer", path="x", share=0.25), span("inner"):
        pass
    spans = drain()
    lines = [json.dumps(row) for row in spans_to_json(spans)]
    assert trace_json(spans_from_json(map(json.loads, lines))) == trace_json(spans)


def test_threads_of_one_name_get_tracks_of_their_own_where_they_overlap() -> None:
    content = trace_json(
        [a_span(0, 10), a_span(5, 10), a_span(6, 2), a_span(20, 5), a_span(21, 1), a_span(25, 5)]
    )
    events = check_structure(content)
    assert names_of(content, "thread_name") == ["t", "t (2)"]
    assert [(event["tid"], event["ts"]) for event in events] == [
        (1, 0),
        (1, 0.006),
        (1, 0.02),
        (1, 0.021),
        (1, 0.025),
        (2, 0.005),
    ]


def test_threads_are_in_the_order_of_their_numbers() -> None:
    content = trace_json([a_span(0, 1, thread=name) for name in ("storage_10", "storage_2", "MainThread")])
    assert names_of(content, "thread_name") == ["MainThread", "storage_2", "storage_10"]


def test_attributes_of_any_kind_make_strict_json() -> None:
    odd = a_span(
        0,
        1,
        path="ü\udcff",
        where=Path("a/b"),
        ratio=float("nan"),
        most=float("inf"),
        done=True,
        tag=None,
        n=2**70,
    )
    [event] = check_structure(trace_json([odd]))
    assert event["args"] == {
        "path": "ü?",
        "where": "a/b",
        "ratio": "nan",
        "most": "inf",
        "done": True,
        "tag": None,
        "n": 2**70,
    }


def test_no_spans_make_an_empty_trace() -> None:
    assert check_structure(trace_json([])) == []


def test_the_checker_of_these_tests_notices_an_overlap() -> None:
    """What the other tests rely on can fail."""
    track = {"pid": 1, "tid": 1, "ph": "X", "name": "a", "cat": "a", "args": {}}
    with pytest.raises(AssertionError, match="overlaps"):
        check_nesting([track | {"ts": 0, "dur": 10}, track | {"ts": 5, "dur": 10}])
