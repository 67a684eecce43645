"""Prepared samples, bounded in bytes; what is let go, least recently used first, is derived again if asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

BUFFER_BYTES = 256 << 20
"""Default bound on the payload that a loader keeps."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(kw_only=True, slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    pieces: int


class Buffer(Generic[K, V]):
    """A byte-bounded cache whose entries also go when all the pieces they hold have been released. Thread-safe.

    Args:
        limit_bytes: bound on what is held; one entry that is larger by itself is held alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, if it is held."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def add(self, key: K, value: V, num_bytes: int, pieces: int) -> None:
        """Hold a value until ``pieces`` more of its pieces are released, or its place is needed."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(value=value, num_bytes=num_bytes, pieces=pieces)
                self.num_bytes += num_bytes
            else:
                entry.pieces += pieces
                self._entries.move_to_end(key)
            while self.num_bytes > self._limit_bytes and len(self._entries) > 1:
                self._drop(next(iter(self._entries)))

    def release(self, key: K, pieces: int) -> None:
        """Say that ``pieces`` of an entry's pieces will not be asked for again."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.pieces -= pieces
                if entry.pieces <= 0:
                    self._drop(key)

    def evict(self, fraction: float) -> None:
        """Let go of at least this fraction of the bytes held, least recently used first."""
        with self._lock:
            keep = self.num_bytes * (1 - fraction)
            while self._entries and self.num_bytes > keep:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: K) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
