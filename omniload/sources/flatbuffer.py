"""The few things to read of a flatbuffer without its generated classes, each checked against the buffer's bounds.

The encoding: a table begins with the distance back to its vtable, which lists where in the table each field lies (0:
left out); tables and vectors are referred to by the distance forward (flatbuffers.dev, "Internals").
"""

from __future__ import annotations

import struct

import numpy as np


class FlatTable:
    """A table.

    Args:
        data: the buffer.
        at: where the table begins.

    Raises:
        ValueError: it reaches beyond the buffer; so for all methods.
    """

    __slots__ = ("_data", "_vtable", "_vtable_bytes", "at")

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self.at = at
        self._vtable = at - _read(data, "<i", at)
        self._vtable_bytes = _read(data, "<H", self._vtable)

    @classmethod
    def root(cls, data: memoryview) -> FlatTable:
        """The table that a buffer holds."""
        return cls(data, _read(data, "<I", 0))

    def number(self, field: int, format_: str) -> int:
        """An integer, by its `struct` format; 0 if it is left out."""
        at = self._find(field)
        return _read(self._data, format_, at) if at else 0

    def table(self, field: int) -> FlatTable | None:
        """A table, if it is there."""
        at = self._find(field)
        return FlatTable(self._data, at + _read(self._data, "<I", at)) if at else None

    def structs(self, field: int, dtype: np.dtype[np.void]) -> np.ndarray:
        """``dtype[n]``: a vector of structs as a view; empty if it is left out."""
        at = self._find(field)
        if not at:
            return np.empty(0, dtype)
        at += _read(self._data, "<I", at)
        count = _read(self._data, "<I", at)
        if count * dtype.itemsize > len(self._data) - at - 4:
            raise ValueError(f"a vector of {count} elements in {len(self._data)} bytes")
        return np.frombuffer(self._data, dtype, count, at + 4)

    def _find(self, field: int) -> int:
        """Where a field lies; 0 if it is left out."""
        slot = 4 + 2 * field
        offset = _read(self._data, "<H", self._vtable + slot) if slot + 2 <= self._vtable_bytes else 0
        return self.at + offset if offset else 0


def _read(data: memoryview, format_: str, at: int) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(format_):
        raise ValueError(f"a reference to byte {at} of {len(data)}")
    value: int = struct.unpack_from(format_, data, at)[0]
    return value
