"""Timed spans of work, recorded in memory and taken out as plain data.

Recording is off by default, and then ``span`` costs one global read and returns a shared no-op. It is process-wide:
each process (rank) drains its own spans, and whoever collects them adds the rank.
"""

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

__all__ = ["Span", "SpanHandle", "drain", "span", "spans_to_json", "start_recording", "stop_recording"]

MAX_SPANS: Final = 200_000
"""Most spans kept between two drains (about 100 MB); later ones are counted, not kept."""

DROPPED: Final = "spans.dropped"
"""Name of the span that ``drain`` appends when some were dropped; ``num_spans`` holds how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One finished piece of work.

    Attributes:
        name: What was done, dotted: ``storage.write``.
        start_ns: Unix time at which it began, nanoseconds.
        duration_ns: How long it took, nanoseconds, from a monotonic clock.
        thread: Name of the thread that did it.
        attributes: Whatever the caller said about it; ``error`` holds the class name if it raised.
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
                    start_ns=time.time_ns(),
                    duration_ns=0,
                    thread=threading.current_thread().name,
                    attributes=attributes,
                )
            )
        return spans


class _Recording:
    """A span being timed."""

    __slots__ = ("_attributes", "_began_ns", "_name", "_recorder", "_start_ns")

    def __init__(self, recorder: _Recorder, name: str, attributes: dict[str, object]) -> None:
        self._recorder = recorder
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> Self:
        self._start_ns = time.time_ns()
        self._began_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        duration_ns = time.perf_counter_ns() - self._began_ns
        if kind is not None:
            self._attributes["error"] = kind.__name__
        self._recorder.add(
            Span(
                name=self._name,
                start_ns=self._start_ns,
                duration_ns=duration_ns,
                thread=threading.current_thread().name,
                attributes=self._attributes,
            )
        )

    def annotate(self, **attributes: object) -> None:
        self._attributes.update(attributes)


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


_OFF: Final = _Off()
_recorder: _Recorder | None = None


def start_recording() -> None:
    """Record spans from now on. Spans recorded before and not drained are forgotten."""
    global _recorder
    _recorder = _Recorder()


def stop_recording() -> None:
    """Stop recording and forget what was not drained."""
    global _recorder
    _recorder = None


def span(name: str, **attributes: object) -> SpanHandle:
    """Time a block of work.

    ``with span("storage.write", path=path, num_bytes=n): ...``

    Args:
        name: What is done, dotted.
        attributes: JSON-able facts about it.

    Returns:
        A context manager with ``annotate(**attributes)``. An exception passes through and leaves its class name in
        the attribute ``error``.
    """
    if _recorder is None:
        return _OFF
    return _Recording(_recorder, name, attributes)


def drain() -> list[Span]:
    """Take the spans that finished since the last drain, in order of finishing. Recording goes on."""
    return [] if _recorder is None else _recorder.drain()


def spans_to_json(spans: list[Span]) -> list[dict[str, object]]:
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
