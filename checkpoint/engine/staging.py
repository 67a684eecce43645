"""Host memory that asynchronous saves copy into, kept for the next save.

A buffer is the byte image of the payload files of one save. Page faults cost more than the copy itself, so buffers
are reused; two of them allow one save to be staged while the previous one is still being written.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import torch

from checkpoint.errors import CoordinationTimeout

_MAX_BUFFERS: Final = 2


class StagingPool:
    """At most two reusable buffers, allocated when first needed, pinned where CUDA is present."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._num_taken = 0

    def take(self, num_bytes: int, timeout_s: float) -> torch.Tensor:
        """A uint8 tensor of at least ``num_bytes``, until it is given back.

        Raises:
            CoordinationTimeout: Both buffers are still being written after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._num_taken >= _MAX_BUFFERS:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise CoordinationTimeout(
                        f"{_MAX_BUFFERS} earlier saves are still being written after {timeout_s:g} s; "
                        "save less often, or raise timeout_s"
                    )
            self._num_taken += 1
            buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.numel() < num_bytes:
            del buffer  # freed before the larger one is allocated
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            except BaseException:
                self._forget()
                raise
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nothing reads any more."""
        with self._changed:
            self._free.append(buffer)
            self._num_taken -= 1
            self._changed.notify()

    def _forget(self) -> None:
        with self._changed:
            self._num_taken -= 1
            self._changed.notify()
