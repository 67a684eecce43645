"""What is known of the files used last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps what was made of the files used last; what it lets go of is made again.

    Args:
        limit: how many to keep.
        make: makes it, by the number of the file.
    """

    def __init__(self, limit: int, make: Callable[[int], T]) -> None:
        self._limit = limit
        self._make = make
        self._kept: dict[int, T] = {}  # least recently used first

    def get(self, file: int) -> T:
        """That of a file. Before another is made, one is let go of if there are too many."""
        if file in self._kept:
            self._kept[file] = self._kept.pop(file)
        else:
            while len(self._kept) >= self._limit:
                del self._kept[next(iter(self._kept))]
            self._kept[file] = self._make(file)
        return self._kept[file]
