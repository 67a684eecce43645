"""Spans as a trace file for https://ui.perfetto.dev and ``chrome://tracing``.

The file is one JSON object in the Trace Event Format: a process per rank, in it a track per thread, on it a complete
event (``"ph": "X"``) per span with its attributes as arguments. Put the spans of all ranks into one call: they lie on
one time axis, as exactly as their times of day agreed when recording began.

::

    Store("runs/x").write("trace.json", trace_json(drain()))
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from storage.spans import Span

__all__ = ["trace_json"]

_Event: TypeAlias = dict[str, object]
_Track: TypeAlias = tuple[int, str]
"""Rank (-1: not known) and name of a thread."""

_NO_RANK: Final = -1


def trace_json(spans: Iterable[Span]) -> bytes:
    """The content of a trace file.

    Viewers drop or distort events that overlap on one track without one being inside the other. Spans of one thread
    never do, but several threads may bear one name; those that would overlap get tracks ``name (2)``, ``name (3)``, …

    Args:
        spans: Of any number of ranks and threads, in any order. The attribute ``rank`` says whose each is; those
            without one share the process ``no rank``. Attributes that JSON cannot hold become text.

    Returns:
        ASCII JSON. Times are microseconds with three decimals, so exact, since the start of the first span;
        ``otherData.start_unix_ns`` holds that start as text (nanoseconds of Unix time exceed a double).
    """
    # A parent before what it contains: viewers rely on this order where both begin in the same nanosecond.
    ordered = sorted(spans, key=lambda one: (one.start_ns, -one.duration_ns))
    origin_ns = ordered[0].start_ns if ordered else 0
    threads: dict[_Track, list[Span]] = {}
    for one in ordered:
        threads.setdefault((_rank(one), one.thread), []).append(one)

    events: list[_Event] = []
    processes: dict[int, int] = {}
    num_tracks = 0
    # Ids count from 1, because viewers take 0 for the idle process of the kernel; a track's is its own in the file.
    for rank, thread in sorted(threads, key=_track_order):
        if rank not in processes:
            processes[rank] = len(processes) + 1
            events += _process(processes[rank], rank)
        for number, lane in enumerate(_lanes(threads[rank, thread]), start=1):
            num_tracks += 1
            name = thread if number == 1 else f"{thread} ({number})"
            events.append(_metadata("thread_name", processes[rank], num_tracks, name=_text(name)))
            events.append(_metadata("thread_sort_index", processes[rank], num_tracks, sort_index=num_tracks))
            events += [_complete(one, origin_ns, processes[rank], num_tracks) for one in lane]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_ns": str(origin_ns)},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def _rank(one: Span) -> int:
    rank = one.attributes.get("rank")
    return rank if isinstance(rank, int) else _NO_RANK


def _track_order(track: _Track) -> tuple[int, list[str | int]]:
    # ``storage_2`` before ``storage_10``; text and numbers alternate, so they are never compared with each other.
    rank, thread = track
    return rank, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", thread)]


def _lanes(ordered: Sequence[Span]) -> list[list[Span]]:
    """Deal spans, in order of start and longest first, each to the first lane on which it is properly nested."""
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []  # per lane, the ends of the spans that are not over yet, outermost first
    for one in ordered:
        end_ns = one.start_ns + one.duration_ns
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= one.start_ns:
                ends.pop()
            if not ends or end_ns <= ends[-1]:
                lane.append(one)
                ends.append(end_ns)
                break
        else:
            lanes.append([one])
            open_ends.append([end_ns])
    return lanes


def _process(pid: int, rank: int) -> list[_Event]:
    name = "no rank" if rank == _NO_RANK else f"rank {rank}"
    return [
        _metadata("process_name", pid, 0, name=name),
        _metadata("process_sort_index", pid, 0, sort_index=pid),
    ]


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> _Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _complete(one: Span, origin_ns: int, pid: int, tid: int) -> _Event:
    return {
        "ph": "X",
        "name": _text(one.name),
        "cat": _text(one.name.partition(".")[0]),
        "ts": (one.start_ns - origin_ns) / 1000,
        "dur": one.duration_ns / 1000,
        "pid": pid,
        "tid": tid,
        "args": {name: _argument(value) for name, value in one.attributes.items()},
    }


def _argument(value: object) -> object:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _text(str(value))


def _text(text: str) -> str:
    # Names of local files that are no UTF-8 hold lone surrogates, which are no JSON to a strict parser.
    return text.encode("utf-8", "replace").decode()
