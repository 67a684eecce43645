"""A store that notes which bytes of payload are read, and may be told to fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from storage import Store

Range = tuple[str, int, int]


class CountingStore(Store):
    """Notes every range of a payload file that is read below it.

    Attributes:
        ranges: Every (path, first byte, one past the last byte) so far; paths are names without directories.
        before: Called with the ranges of a read before it is done; may raise or wait.
    """

    def __init__(
        self, url: str | os.PathLike[str], before: Callable[[Sequence[Range]], None] = lambda _: None
    ) -> None:
        super().__init__(url)
        self.ranges: list[Range] = []
        self.before = before
        self._lock = threading.Lock()

    def local_path(self, path: str) -> None:
        """None: the engine reads local files by itself, and here they are to be asked for."""

    def read_ranges(self, ranges: Any, into: Any = None) -> list[memoryview]:
        payload = [
            (path.rpartition("/")[2], begin, end)
            for path, begin, end in ranges
            if path.endswith(".safetensors")
        ]
        if payload:
            self.before(payload)
        with self._lock:
            self.ranges += payload
        return super().read_ranges(ranges, into)

    def sub(self, path: str) -> Store:
        below = super().sub(path)
        below.__class__ = CountingStore
        vars(below).update(ranges=self.ranges, before=self.before, _lock=self._lock)
        return below

    def num_bytes(self) -> int:
        """Bytes read so far, those read twice counted twice."""
        return sum(end - begin for _, begin, end in self.ranges)

    def read_twice(self) -> list[Range]:
        """Ranges that begin before another one of their object has ended."""
        found = []
        reached: tuple[str, int] = ("", 0)
        for path, begin, end in sorted(self.ranges):
            if path == reached[0] and begin < reached[1]:
                found.append((path, begin, end))
                end = max(end, reached[1])
            reached = path, end
        return found
