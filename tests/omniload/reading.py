"""Sources opened by a path and read as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import storage
from omniload.mixture import SourceSpec
from omniload.sources import BadRow, Source, open_source


def open_path(*paths: Path | str, **options: Any) -> Source:
    """The source that these paths name."""
    return open_source("s", SourceSpec(path=tuple(map(str, paths)), weight=1, **options))


def all_rows(source: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any] | BadRow]:
    """The rows of every block of every file, in order."""
    rows: list[dict[str, Any] | BadRow] = []
    for file in range(len(source.files)):
        for block in range(source.num_blocks(file)):
            raw = source.read_block(file, block, columns)
            rows += raw.rows(np.arange(raw.num_rows))
    return rows


@contextmanager
def reads() -> Iterator[list[storage.Span]]:
    """Spans of the byte ranges read inside, filled in at the end."""
    found: list[storage.Span] = []
    storage.start_recording()
    try:
        yield found
        found += [span for span in storage.drain() if span.name == "storage.read_ranges"]
    finally:
        storage.stop_recording()


def num_bytes(spans: Sequence[storage.Span]) -> int:
    """Bytes that reads brought."""
    return sum(int(span.attributes["num_bytes"]) for span in spans)
