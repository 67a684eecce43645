"""Memory for large arrays, used again once nobody refers to it.

A step's lanes take tens of megabytes, and the blocks they come from as many again. In fresh memory the kernel clears
every page before it is written, which costs as much as the work itself; in memory that was used before it costs
nothing.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_LEAST_BYTES = 1 << 18
"""Smaller arrays are left to numpy."""
_HUGE_BYTES = 2 << 20
"""From there on memory is asked for in huge pages, which are cleared five times as fast, and found faster."""


class Recycler:
    """Makes uninitialised arrays, and takes their memory back when the last view of them is gone. Thread-safe.

    Args:
        max_idle: blocks of memory kept for the next arrays; of more, the oldest are given back to the system.
        most_bytes: larger arrays are left to numpy, so that those kept are bounded in bytes; None if none is too large.
    """

    def __init__(self, max_idle: int = 16, most_bytes: int | None = None) -> None:
        self._max_idle = max_idle
        self._most_bytes = most_bytes
        self._idle: list[mmap.mmap] = []  # changed by operations that are atomic, and so without a lock

    def empty(self, length: int, dtype: npt.DTypeLike) -> np.ndarray:
        """An uninitialised array, as `numpy.empty` gives it.

        Args:
            length: elements.
            dtype: of an element.
        """
        num_bytes = length * np.dtype(dtype).itemsize
        if num_bytes < _LEAST_BYTES or (self._most_bytes is not None and num_bytes > self._most_bytes):
            return np.empty(length, dtype)
        block = self._take(num_bytes)
        array = np.frombuffer(block, dtype, length)
        # A view of an array refers to the array that owns the memory, or, as here, to the one made from a foreign
        # buffer. So while any view lives, tensors made from one included, this array does.
        weakref.finalize(array, _take_back, self._idle, block, self._max_idle).atexit = False
        return array

    def _take(self, num_bytes: int) -> mmap.mmap:
        for block in self._idle[::-1]:
            if num_bytes <= len(block) <= num_bytes + num_bytes // 4:
                with suppress(ValueError):  # another thread has taken it
                    self._idle.remove(block)
                    return block
        # Room for one that is a little larger, too; no page of it is touched before. Private, so that a forked child
        # gets a copy and does not see what this process writes later.
        size = num_bytes + num_bytes // 8
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # of a kernel that is built without them
                block.madvise(mmap.MADV_HUGEPAGE)
        return block


BLOCKS = Recycler(max_idle=8, most_bytes=8 << 20)
"""What blocks are read into, of all sources of a process: they come and go one by one."""


def _take_back(idle: list[mmap.mmap], block: mmap.mmap, max_idle: int) -> None:
    # Runs wherever the last reference went, so it takes no lock.
    idle.append(block)
    while len(idle) > max_idle:
        with suppress(IndexError):
            del idle[0]
