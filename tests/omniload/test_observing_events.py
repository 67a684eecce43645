"""The event log: whole lines whatever happens, of bounded size, from any number of writers."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from omniload.errors import ObservingError
from omniload.observing.events import EventKind, EventLog, read_events
from tests.elsewhere import printed


def test_an_event_is_one_json_line(tmp_path: Path) -> None:
    before = time.time()
    log = EventLog(tmp_path / "events.jsonl", "pretrain")
    log.write(EventKind.PROMOTED, source="web", actor="web-0-shadow")
    log.write(EventKind.JOB_ENDED, step=300, reason="数据\nü", event="also a field")
    lines = (tmp_path / "events.jsonl").read_text(encoding="ascii").splitlines()
    assert len(lines) == 2
    plain = json.loads(lines[0])
    assert before <= plain.pop("time") <= time.time()
    assert plain == {
        "job": "pretrain",
        "event": "promoted",
        "fields": {"source": "web", "actor": "web-0-shadow"},
    }
    first, last = read_events(tmp_path / "events.jsonl")
    assert (first.event, last.event) == (EventKind.PROMOTED, EventKind.JOB_ENDED)
    assert last.fields == {"step": 300, "reason": "数据\nü", "event": "also a field"}


def test_no_file_means_no_events_and_is_not_made(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []
    assert not list(tmp_path.iterdir())


def test_events_since_a_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "pretrain")
    for step in range(5):
        log.write(EventKind.STEP_SLOW, step=step)
        threading.Event().wait(0.002)
    third = read_events(path)[2].time
    assert [event.fields["step"] for event in read_events(path, since=third)] == [2, 3, 4]


def test_a_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "pretrain")
    log.write(EventKind.STEP_SLOW, step=0)
    log.write(EventKind.STEP_SLOW, step=1)
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for end in range(second + 1, len(whole)):
        path.write_bytes(whole[:end])
        survivors = [0] if end < len(whole) - 1 else [0, 1]  # only the line's end was missing
        assert [event.fields["step"] for event in read_events(path)] == survivors
        log.write(EventKind.STEP_SLOW, step=2)
        EventLog(path, "pretrain").write(EventKind.STEP_SLOW, step=3)
        assert [event.fields["step"] for event in read_events(path)] == [*survivors, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\xff\xfe",
        b"[" * 100_000,
        b"17",
        b"{}",
        b'{"time": "then", "job": "j", "event": "promoted", "fields": {}}',
        b'{"time": 1, "job": "j", "event": "lunch", "fields": {}}',
        b'{"time": 1, "job": "j", "event": "promoted", "fields": 3}',
        b'{"time": 1' + b"0" * 400 + b', "job": "j", "event": "promoted", "fields": {}}',
    ],
)
def test_lines_that_are_no_events_are_passed_over(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "pretrain").write(EventKind.STEP_SLOW, step=0)
    with path.open("ab") as file:
        file.write(line + b"\n")
    EventLog(path, "pretrain").write(EventKind.STEP_SLOW, step=1)
    assert [event.fields["step"] for event in read_events(path)] == [0, 1]


def circle() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    "odd", [math.nan, {1, 2}, Path("a"), {(1, 2): 3}, circle(), "\udcff", ZeroDivisionError("x"), b"\xff"]
)
def test_what_json_cannot_hold_becomes_text(odd: object, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "pretrain").write(EventKind.ACTOR_LOST, actor="web-0", reason=odd)
    [event] = read_events(path)
    assert event.fields == {"actor": "web-0", "reason": str(odd)}
    json.loads(path.read_bytes(), parse_constant=pytest.fail)


def test_a_very_long_event_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "pretrain").write(EventKind.ACTOR_LOST, actor="web-0", reason="数" * 1_000_000)
    [event] = read_events(path)
    assert event.fields["actor"] == "web-0"
    assert set(event.fields["reason"]) == {"数"}
    assert path.stat().st_size < 10_000


def test_the_file_is_put_aside_when_it_is_large_and_size_stays_bounded(tmp_path: Path) -> None:
    path, bound = tmp_path / "events.jsonl", 4096
    log = EventLog(path, "pretrain", max_file_bytes=bound)
    put_aside = 0
    for step in range(400):
        log.write(EventKind.STEP_SLOW, step=step)
        put_aside += not path.exists()
        steps = [event.fields["step"] for event in read_events(path)]
        assert steps == list(range(steps[0], step + 1)), "the last ones, without a gap"
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * (bound + 200)
    assert put_aside >= 3
    assert len(steps) * 200 > bound


def test_a_reader_that_meets_a_rotation_sees_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "pretrain")
    log.write(EventKind.STEP_SLOW, step=0)
    # The moment between its opening the one name and the other: both lead to the same file.
    path.with_name("events.jsonl.1").hardlink_to(path)
    assert [event.fields["step"] for event in read_events(path)] == [0]


def test_two_threads_lose_nothing_over_a_rotation(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 150
    log = EventLog(path, "pretrain", max_file_bytes=24_000)

    def write(number: int) -> None:
        for step in range(count):
            log.write(EventKind.STEP_SLOW, thread=number, step=step)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert path.with_name("events.jsonl.1").exists(), "it was put aside"
    assert log.num_lost == 0
    events = read_events(path)
    for number in range(2):
        assert [one.fields["step"] for one in events if one.fields["thread"] == number] == list(range(count))


WRITER = """
import sys
from pathlib import Path
from omniload.observing.events import EventKind, EventLog
log = EventLog(Path(sys.argv[1]), "pretrain", max_file_bytes=24_000)
for step in range(150):
    log.write(EventKind.STEP_SLOW, thread=int(sys.argv[2]), step=step)
assert log.num_lost == 0
"""


def test_two_processes_lose_nothing_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(i)]) for i in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert path.with_name("events.jsonl.1").exists(), "it was put aside"
    events = read_events(path)
    for writer in range(2):
        assert [one.fields["step"] for one in events if one.fields["thread"] == writer] == list(range(150))


def test_who_cannot_have_the_lock_appends_without_it(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "events.jsonl"
    log = EventLog(path, "pretrain", max_file_bytes=1)
    with (tmp_path / ".events.jsonl.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        log.write(EventKind.STEP_SLOW, step=0)
        assert path.exists(), "nothing was put aside"
    assert [event.fields["step"] for event in read_events(path)] == [0]


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ObservingError, match=r"events: .*events\.jsonl cannot be written \(No such file"):
        EventLog(tmp_path / "gone/events.jsonl", "pretrain")
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(ObservingError, match="Is a directory"):
        EventLog(tmp_path / "events.jsonl", "pretrain")
    with pytest.raises(ObservingError, match=r"events: .* cannot be read"):
        read_events(tmp_path / "events.jsonl")


def test_a_log_that_becomes_unwritable_fails_no_work_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "job/events.jsonl"
    path.parent.mkdir()
    log = EventLog(path, "pretrain")
    path.unlink()
    (path.parent / ".events.jsonl.lock").unlink()
    path.parent.rmdir()
    with caplog.at_level(logging.WARNING):
        log.write(EventKind.STEP_SLOW, step=0)
        log.write(EventKind.STEP_SLOW, step=1)
    assert log.num_lost == 2
    assert len(caplog.records) == 1
    assert "events are lost" in caplog.text


FULL = """
import resource, sys
from pathlib import Path
from omniload.observing.events import EventKind, EventLog
log = EventLog(Path(sys.argv[1]), "pretrain")
log.write(EventKind.STEP_SLOW, step=0)
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
log.write(EventKind.STEP_SLOW, step=1)
log.write(EventKind.STEP_SLOW, step=2)
print(log.num_lost, Path(sys.argv[1]).stat().st_size - size)
"""


def test_a_full_disk_loses_what_it_has_no_room_for_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert printed(FULL, str(path)) == "2 10\n", "two events are lost, one with its first bytes written"
    EventLog(path, "pretrain").write(EventKind.STEP_SLOW, step=3)
    assert [event.fields["step"] for event in read_events(path)] == [0, 3]
