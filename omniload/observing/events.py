"""What happened in a job, as JSON lines: appended whole, bounded in size, readable after any crash.

::

    {"time": 1790000000.25, "job": "pretrain", "event": "promoted", "fields": {"source": "web", "actor": "web-1"}}

A line torn by a crash is left as it is, passed over by readers, and ended by the next writer.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

from omniload.errors import ObservingError
from storage.file_lock import locked

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 8 << 20
"""Size at which the file is put aside, in place of the one put aside before."""

_LOCK_TIMEOUT_S: Final = 1.0
_MAX_LINE_BYTES: Final = 64 << 10
_MAX_TEXT: Final = 500
_ENCODE: Final = json.JSONEncoder(allow_nan=False, default=str).encode


class EventKind(StrEnum):
    """What can happen."""

    STREAM_OPENED = "stream_opened"
    """A stream begins or goes on: step."""
    ACTOR_STARTED = "actor_started"
    """actor, role, node, pid."""
    ACTOR_LOST = "actor_lost"
    """actor, role, reason."""
    PROMOTED = "promoted"
    """A shadow takes the place of a loader: source, actor."""
    LEASE_MOVED = "lease_moved"
    """A window goes to another loader: source, epoch, window, generation, reason."""
    STALE_ANSWER_REFUSED = "stale_answer_refused"
    """A loader answered for a window that it no longer holds: source, actor, epoch, window, generation."""
    DECISION = "decision"
    """A decision about the stream: its JSON form."""
    SOURCE_LOST = "source_lost"
    """A source became unreachable: source, reason."""
    SCALED = "scaled"
    """A source has more or fewer loaders: source, actors_before, actors_after, reason."""
    STEP_SLOW = "step_slow"
    """A rank waited long for a step: rank, step, stall_s."""
    JOB_ENDED = "job_ended"
    """step, reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened."""

    time: float
    """Unix time, seconds."""
    job: str
    """Job that it happened in."""
    event: EventKind
    """What it was."""
    fields: Mapping[str, Any]
    """More about it; see `EventKind`."""


class EventLog:
    """Appends events to a file. Several threads and processes of a machine may write to the same file.

    It watches the work and must not fail it: an event that cannot be written is counted, and warned about once.

    Args:
        path: the file; its folder has to be there.
        job: name of the job.
        max_file_bytes: size at which the file is put aside as ``<path>.1``; together they take about twice as much.

    Raises:
        ObservingError: the file cannot be written.
    """

    def __init__(self, path: Path, job: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._job = job
        self._max_file_bytes = max_file_bytes
        self.num_lost = 0
        """Events that could not be written."""
        try:
            self._append(b"")
        except OSError as error:
            raise ObservingError(f"events: {path} cannot be written ({error.strerror})") from None

    def write(self, event: EventKind, /, **fields: object) -> None:
        """Append an event that happens now; it is in the file on return.

        Args:
            event: what happened.
            fields: more about it. What JSON cannot hold becomes text, and so does everything if it is very long.
        """
        try:
            self._append(self._line(event, fields))
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning("events are lost: %s cannot be written (%s)", self._path, error.strerror)

    def _line(self, event: EventKind, fields: Mapping[str, object]) -> bytes:
        values = {"time": time.time(), "job": self._job, "event": event}
        try:
            line = _ENCODE({**values, "fields": fields})
        except (ValueError, TypeError, RecursionError):  # nan, a key that is no text, or a circle
            line = ""
        if not 0 < len(line) <= _MAX_LINE_BYTES:
            texts = {name: str(value)[:_MAX_TEXT] for name, value in fields.items()}
            line = _ENCODE({**values, "fields": texts})
        return line.encode("ascii") + b"\n"

    def _append(self, line: bytes) -> None:
        with ExitStack() as stack:
            # Opened for each event: it may be put aside by others, and nothing is held open over a fork.
            lock = stack.enter_context(
                locked(self._path.with_name(f".{self._path.name}.lock"), _LOCK_TIMEOUT_S)
            )
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, file)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Only under the lock: two who put the file aside at the same time would throw away the older events.
            if lock is not None and size + len(line) > self._max_file_bytes:
                self._path.replace(_aside(self._path))


def read_events(path: Path, since: float = 0.0) -> list[Event]:
    """The events in a file and the one put aside, in order of writing.

    Args:
        path: the file; without it there are no events.
        since: Unix time; earlier ones are left out.

    Raises:
        ObservingError: the file cannot be read.
    """
    try:
        with ExitStack() as stack:
            # The newer file first: if it is put aside meanwhile, both are the same one, and nothing is missed.
            newer, older = (_opened(one, stack) for one in (path, _aside(path)))
            if newer and older and os.path.sameopenfile(newer.fileno(), older.fileno()):
                older = None
            lines = [line for file in (older, newer) if file for line in file]
    except OSError as error:
        raise ObservingError(f"events: {path} cannot be read ({error.strerror})") from None
    return [event for event in map(_event, lines) if event and event.time >= since]


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _opened(path: Path, stack: ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None


def _event(line: bytes) -> Event | None:
    """The event in a line; None if it is torn, or none of ours."""
    try:
        values = json.loads(line)
        return Event(
            time=float(values["time"]),
            job=str(values["job"]),
            event=EventKind(values["event"]),
            fields=dict(values["fields"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
