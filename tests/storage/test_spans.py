"""Spans: what is recorded, and that nothing is when recording is off."""

import dis
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import storage.spans
from storage import (
    BadRequest,
    NotFound,
    Span,
    Store,
    drain,
    span,
    spans_to_json,
    start_recording,
    stop_recording,
)
from storage.spans import add_listener, remove_listener, set_rank, spans_from_json


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    set_rank(None)
    start_recording()
    yield
    stop_recording()
    set_rank(None)


@pytest.fixture
def heard() -> Iterator[list[Span]]:
    """Spans that a listener is given."""
    spans: list[Span] = []
    listener = spans.append
    add_listener(listener)
    yield spans
    remove_listener(listener)


def run_script(script: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return found.stdout.strip()


def calls_into_spans(work: Callable[[], object]) -> list[str]:
    """Names of the functions of the module that ``work`` calls, and of built-in ones that those call."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename != storage.spans.__file__:
            return
        if event == "call":
            called.append(frame.f_code.co_name)
        elif event == "c_call":
            called.append(argument.__qualname__)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return called


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


def test_a_span_that_nobody_wants_is_one_test_and_nothing_else() -> None:
    stop_recording()
    instructions = {one.offset: one for one in dis.get_instructions(span)}
    executed: list[dis.Instruction] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not span.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            executed.append(instructions[frame.f_lasti])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        span("storage.read", path="x")
    finally:
        sys.settrace(before)
    assert [one.argval for one in executed if one.opname == "LOAD_GLOBAL"] == ["_listeners", "_OFF"]
    assert sum("JUMP" in one.opname for one in executed) == 1
    assert not any("CALL" in one.opname or "BUILD" in one.opname for one in executed)


def test_a_store_enters_and_leaves_spans_without_further_calls_when_off(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("a", b"1")
    assert len(calls_into_spans(lambda: store.read("a"))) > 4
    stop_recording()
    assert calls_into_spans(lambda: store.read("a")) == ["span", "__enter__", "annotate", "__exit__"]
    assert calls_into_spans(lambda: store.stat("a")) == ["span", "__enter__", "__exit__"]


def test_what_is_nested_in_time_is_nested_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nanosecond, and also when the time of day is set back meanwhile."""
    before_ns = time.time_ns()
    with span("outer"):
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        for _ in range(100):
            with span("inner"):
                pass
    monkeypatch.undo()
    *inner, outer = drain()
    assert len(inner) == 100
    previous_ns = outer.start_ns
    for one in inner:
        assert one.start_ns >= previous_ns
        previous_ns = one.start_ns + one.duration_ns
    assert previous_ns <= outer.start_ns + outer.duration_ns
    assert abs(outer.start_ns - before_ns) < 60 * 10**9, "it is Unix time"


def test_counts_from_many_threads_add_up() -> None:
    def work() -> None:
        for _ in range(1000):
            current.count(num_retries=1, num_waits=2)

    with span("work", num_waits=5) as current:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    [only] = drain()
    assert only.attributes == {"num_retries": 8000, "num_waits": 16005}


def test_a_rank_is_an_attribute_of_every_span() -> None:
    set_rank(3)
    with span("mine"):
        pass
    with span("of another", rank=7):
        pass
    set_rank(None)
    with span("of none"):
        pass
    assert [one.attributes for one in drain()] == [{"rank": 3}, {"rank": 7}, {}]
    with pytest.raises(BadRequest, match="rank is -1"):
        set_rank(-1)


@pytest.mark.parametrize(("variable", "rank"), [("5", "5"), ("", "None"), ("-1", "None"), ("five", "None")])
def test_the_rank_is_what_the_launcher_says(variable: str, rank: str) -> None:
    script = """if True:
        from storage import drain, span, start_recording
        start_recording()
        with span("work"):
            pass
        print(drain()[0].attributes.get("rank"))
    """
    assert run_script(script, RANK=variable) == rank


def test_a_listener_hears_spans_with_and_without_recording(heard: list[Span]) -> None:
    with span("both"):
        pass
    assert heard == drain()
    stop_recording()
    with pytest.raises(ZeroDivisionError), span("heard only", path="x"):
        raise ZeroDivisionError
    assert drain() == []
    assert [one.name for one in heard] == ["both", "heard only"]
    assert heard[1].attributes == {"path": "x", "error": "ZeroDivisionError"}
    assert abs(heard[1].start_ns - time.time_ns()) < 60 * 10**9, "it is Unix time"


def test_a_listener_hears_once_until_it_is_removed(heard: list[Span]) -> None:
    stop_recording()
    add_listener(heard.append)
    with span("first"):
        pass
    remove_listener(heard.append)
    remove_listener(heard.append)
    with span("second"):
        pass
    assert [one.name for one in heard] == ["first"]
    assert span("a") is span("b")


def test_a_forked_child_starts_with_all_of_it_off() -> None:
    script = """if True:
        import os
        from storage import drain, span, start_recording
        from storage.spans import add_listener
        heard = []
        start_recording()
        add_listener(lambda one: heard.append(one.name))
        with span("before"):
            pass
        with span("across"):
            child = os.fork()
        if not child:
            with span("after"):
                pass
            print("child", [one.name for one in drain()], heard, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("parent", [one.name for one in drain()], heard)
    """
    assert run_script(script).splitlines() == [
        "child [] ['before']",
        "parent ['before', 'across'] ['before', 'across']",
    ]


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


def test_spans_come_back_from_json() -> None:
    with span("work", path="x", num_bytes=3):
        pass
    spans = drain()
    assert spans_from_json(json.loads(json.dumps(spans_to_json(spans)))) == spans
    with pytest.raises(BadRequest, match="'thread'"):
        spans_from_json([{"name": "x", "start_ns": 1, "duration_ns": 2, "attributes": {}}])


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
