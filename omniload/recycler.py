"""Memory for large arrays, used again once nobody refers to it.

A step's lanes take tens of megabytes. In fresh memory the kernel clears every page before it is written, which costs
as much as filling the lanes; in memory that was used before it costs nothing.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import numpy.typing as npt

MAX_IDLE = 8
"""Blocks of one size kept for the next array: a few steps' worth. More are given back to the system."""


class Recycler:
    """Makes uninitialised arrays, and takes their memory back when the last view of them is gone."""

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}

    def empty(self, length: int, dtype: npt.DTypeLike) -> np.ndarray:
        """An uninitialised array, as `numpy.empty` gives it.

        Args:
            length: elements, at least 1.
            dtype: of an element.
        """
        num_bytes = length * np.dtype(dtype).itemsize
        idle = self._idle.setdefault(num_bytes, [])
        # Private, so that a forked child gets a copy and does not see what this process writes later.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = idle.pop() if idle else mmap.mmap(-1, num_bytes, flags=flags)
        array = np.frombuffer(block, dtype)
        # A view of an array refers to the array that owns the memory, or, as here, to the one made from a foreign
        # buffer. So while any view lives, tensors made from one included, this array does.
        weakref.finalize(array, _take_back, idle, block).atexit = False
        return array


def _take_back(idle: list[mmap.mmap], block: mmap.mmap) -> None:
    # Runs wherever the last reference went, so it takes no lock; list operations are atomic.
    if len(idle) < MAX_IDLE:
        idle.append(block)
