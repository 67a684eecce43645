"""Timed spans of work: recorded in memory and taken out as plain data, or handed to listeners as they end.

Both are off by default, and then ``span`` tests one global and returns a shared no-op. They are process-wide: each
process drains its own spans, and the attribute ``rank`` says whose they are once they are put together. A forked
child starts with both off.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias

from storage.errors import BadRequest

__all__ = [
    "Listener",
    "Span",
    "SpanHandle",
    "add_listener",
    "drain",
    "remove_listener",
    "set_rank",
    "span",
    "spans_from_json",
    "spans_to_json",
    "start_recording",
    "stop_recording",
]

MAX_SPANS: Final = 200_000
"""Most spans kept between two drains (about 100 MB); later ones are counted, not kept."""

DROPPED: Final = "spans.dropped"
"""Name of the span that ``drain`` appends when some were dropped; ``num_spans`` holds how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One finished piece of work.

    Attributes:
        name: What was done, dotted: ``storage.write``.
        start_ns: Unix time at which it began, nanoseconds. Within a process exact to the nanosecond relative to other
            spans: the monotonic clock, set to the time of day once, when recording began.
        duration_ns: How long it took, nanoseconds, from the same clock.
        thread: Name of the thread that did it.
        attributes: Whatever the caller said about it; ``error`` holds the class name if it raised, ``num_retries``
            how often a part of it was repeated if any was, and ``rank`` the rank of the process if it is known.
    """

    name: str
    start_ns: int
    duration_ns: int
    thread: str
    attributes: dict[str, object] = field(default_factory=dict)


class SpanHandle(Protocol):
    """What ``with span(...) as handle`` gives."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def annotate(self, **attributes: object) -> None:
        """Add attributes that are known only while the work is going on."""

    def count(self, **amounts: int) -> None:
        """Add to attributes that count, from any of the threads that do the work: ``count(num_retries=1)``."""


Listener: TypeAlias = Callable[[Span], None]
"""Called with each span when it ends, on the thread that did the work: must be quick and must not raise."""


class _Recorder:
    """The spans of this process since the last drain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._num_dropped = 0

    def add(self, finished: Span) -> None:
        with self._lock:
            if len(self._spans) < MAX_SPANS:
                self._spans.append(finished)
            else:
                self._num_dropped += 1

    def drain(self) -> list[Span]:
        with self._lock:
            spans, self._spans = self._spans, []
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            attributes: dict[str, object] = {"num_spans": num_dropped}
            spans.append(
                Span(
                    name=DROPPED,
                    start_ns=time.perf_counter_ns() + _unix_offset_ns,
                    duration_ns=0,
                    thread=threading.current_thread().name,
                    attributes=attributes,
                )
            )
        return spans


class _Recording:
    """A span being timed."""

    __slots__ = ("_attributes", "_began_ns", "_name")

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> Self:
        self._began_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        duration_ns = time.perf_counter_ns() - self._began_ns
        if kind is not None:
            self._attributes["error"] = kind.__name__
        if _rank is not None:
            self._attributes.setdefault("rank", _rank)
        finished = Span(
            name=self._name,
            # One monotonic clock for starts and durations: what is nested in time is nested in the numbers too,
            # even when the time of day is being set meanwhile.
            start_ns=self._began_ns + _unix_offset_ns,
            duration_ns=duration_ns,
            thread=threading.current_thread().name,
            attributes=self._attributes,
        )
        for listener in _listeners:
            listener(finished)

    def annotate(self, **attributes: object) -> None:
        self._attributes.update(attributes)

    def count(self, **amounts: int) -> None:
        with _lock:
            for name, amount in amounts.items():
                self._attributes[name] = self._attributes.get(name, 0) + amount


class _Off:
    """A span while recording is off."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def annotate(self, **attributes: object) -> None:
        pass

    def count(self, **amounts: int) -> None:
        pass


_OFF: Final = _Off()


def _rank_of_environment() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


_lock = threading.Lock()
_recorder: _Recorder | None = None
_listeners: tuple[Listener, ...] = ()
"""Who gets the spans, the recorder included. Replaced and never changed, so that reading it needs no lock."""
_rank: int | None = _rank_of_environment()
_unix_offset_ns = 0
"""Unix time minus the monotonic clock."""


def start_recording() -> None:
    """Record spans from now on. Spans recorded before and not drained are forgotten."""
    global _recorder
    with _lock:
        _forget_recorder()
        _recorder = _Recorder()
        _add(_recorder.add)


def stop_recording() -> None:
    """Stop recording and forget what was not drained."""
    with _lock:
        _forget_recorder()


def add_listener(listener: Listener) -> None:
    """Hand every span that begins from now on to ``listener`` when it ends. Recording need not be on.

    Adding it again changes nothing.
    """
    with _lock:
        _add(listener)


def remove_listener(listener: Listener) -> None:
    """Undo ``add_listener``. Does nothing if it was not added."""
    with _lock:
        _remove(listener)


def set_rank(rank: int | None) -> int | None:
    """Say which rank of a job this process is: the attribute ``rank`` of every span that ends from now on.

    Until it is called, the rank is what the environment variable ``RANK`` held when the process began, as
    ``torchrun`` sets it.

    Args:
        rank: From 0; None if the process is not part of a job.

    Returns:
        What it was before.

    Raises:
        BadRequest: It is negative.
    """
    global _rank
    if rank is not None and rank < 0:
        raise BadRequest(f"rank is {rank}: it must be at least 0")
    before, _rank = _rank, rank
    return before


def span(name: str, **attributes: object) -> SpanHandle:
    """Time a block of work.

    ``with span("storage.write", path=path, num_bytes=n): ...``

    Args:
        name: What is done, dotted.
        attributes: JSON-able facts about it.

    Returns:
        A context manager with ``annotate(**attributes)`` and ``count(**amounts)``. An exception passes through and
        leaves its class name in the attribute ``error``.
    """
    if not _listeners:
        return _OFF
    return _Recording(name, attributes)


def drain() -> list[Span]:
    """Take the spans that finished since the last drain, in order of finishing. Recording goes on."""
    recorder = _recorder
    return [] if recorder is None else recorder.drain()


def spans_to_json(spans: Iterable[Span]) -> list[dict[str, object]]:
    """Spans as plain dicts for ``json.dump``."""
    return [
        {
            "name": one.name,
            "start_ns": one.start_ns,
            "duration_ns": one.duration_ns,
            "thread": one.thread,
            "attributes": one.attributes,
        }
        for one in spans
    ]


def spans_from_json(rows: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans that ``spans_to_json`` made plain.

    Raises:
        BadRequest: A row lacks a field.
    """
    try:
        return [
            Span(
                name=row["name"],
                start_ns=row["start_ns"],
                duration_ns=row["duration_ns"],
                thread=row["thread"],
                attributes=dict(row["attributes"]),
            )
            for row in rows
        ]
    except KeyError as error:
        raise BadRequest(f"a row has no field {error}: not made by spans_to_json") from error


def _add(listener: Listener) -> None:
    global _listeners, _unix_offset_ns
    if not _listeners:
        _unix_offset_ns = time.time_ns() - time.perf_counter_ns()
    if listener not in _listeners:
        _listeners = (*_listeners, listener)


def _remove(listener: Listener) -> None:
    global _listeners
    _listeners = tuple(one for one in _listeners if one != listener)


def _forget_recorder() -> None:
    global _recorder
    if _recorder is not None:
        _remove(_recorder.add)
        _recorder = None


def _off_after_fork() -> None:
    # The child would otherwise report its parent's spans again, through locks that a thread it lacks may hold.
    global _lock, _listeners, _recorder
    _lock = threading.Lock()
    _listeners = ()
    _recorder = None


os.register_at_fork(after_in_child=_off_after_fork)
