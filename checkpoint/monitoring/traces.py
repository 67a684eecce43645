"""Spans of ranks to files and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from checkpoint.errors import FormatError
from storage import Span, Store, drain, spans_to_json, start_recording, stop_recording
from storage.errors import BadRequest
from storage.spans import set_rank, spans_from_json

_PREFIX: Final = "checkpoint."


@contextmanager
def recording(directory: str | os.PathLike[str], rank: int | None = None) -> Iterator[None]:
    """Record what this process does during a block, in ``<directory>/rank-<5 digits>.json``.

    Args:
        directory: Directory or URL, the same for all ranks.
        rank: Of this process; by default what the environment variable ``RANK`` says, else 0.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    rank_before = set_rank(rank)
    start_recording()
    try:
        yield
    finally:
        spans = drain()
        stop_recording()
        set_rank(rank_before)
        Store(directory).write(f"rank-{rank:05d}.json", json.dumps(spans_to_json(spans)).encode())


def read_spans(paths: Sequence[str | os.PathLike[str]]) -> list[Span]:
    """The spans of this package in files: those that :func:`recording` made, or traces that ``trace_json`` did.

    Args:
        paths: Local files; each may hold any number of ranks.

    Raises:
        FormatError: A file is neither; names it.
        FileNotFoundError: There is none of that name.
    """
    found = []
    for path in paths:
        try:
            document = json.loads(Path(path).read_bytes())
            found += spans_from_json(document) if isinstance(document, list) else _of_trace(document)
        except (BadRequest, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(
                f"{path}: neither spans nor a trace ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from None
    return [one for one in found if one.name.startswith(_PREFIX)]


def _of_trace(document: dict[str, Any]) -> list[Span]:
    origin_ns = int(document["otherData"]["start_unix_ns"])
    events = document["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    return [
        Span(
            name=event["name"],
            start_ns=origin_ns + round(event["ts"] * 1000),
            duration_ns=round(event["dur"] * 1000),
            thread=threads[event["pid"], event["tid"]],
            attributes=dict(event["args"]),
        )
        for event in events
        if event["ph"] == "X"
    ]
