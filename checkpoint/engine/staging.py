"""Host memory that asynchronous saves copy into, kept for the next save.

A buffer is the byte image of the payload files of one save, without headers and before compression. Page faults cost
more than the copy itself, so buffers are reused; two of them allow one save to be staged while the previous one is
still being written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch

from checkpoint.engine.files import FileLayout
from checkpoint.engine.memory import Bytes, copy_into, fault_in, flat_bytes, is_flat
from checkpoint.errors import CoordinationTimeout
from storage.background import BackgroundThread

_MAX_BUFFERS: Final = 2
_FILE_ALIGN: Final = 4096


class StagingPool:
    """At most two reusable buffers, allocated when first needed or before, pinned where CUDA is present."""

    def __init__(self) -> None:
        self._preparation: threading.Thread | None = None
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []  # by size
        self._num_taken = 0

    def prepare(self, num_bytes: int) -> None:
        """Begin to allocate the first buffer, on a thread of its own; :meth:`take` then waits for it.

        Does nothing if there is one already.
        """
        if self._free or self._num_taken or self._preparation is not None:
            return
        self._preparation = BackgroundThread(partial(self._prepare, num_bytes), name="checkpoint-staging")
        self._preparation.start()

    def _prepare(self, num_bytes: int) -> None:
        try:
            buffer = _allocate(num_bytes)
        except (MemoryError, RuntimeError):
            return  # the save that needs it will run into the same, and say so
        with self._changed:
            self._free.append(buffer)

    @property
    def exhausted(self) -> bool:
        """Whether :meth:`take` would wait for a buffer to be given back."""
        return self._num_taken >= _MAX_BUFFERS

    def take(self, num_bytes: int, timeout_s: float) -> torch.Tensor:
        """A uint8 tensor of at least ``num_bytes``, until it is given back.

        Raises:
            CoordinationTimeout: Both buffers are still being written after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        if self._preparation is not None:
            self._preparation.join(timeout_s)
            self._preparation = None
        with self._changed:
            while self.exhausted:
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
                return _allocate(num_bytes)
            except BaseException:
                self._forget()
                raise
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nothing reads any more."""
        with self._changed:
            self._free.append(buffer)
            self._free.sort(key=torch.Tensor.numel)
            self._num_taken -= 1
            self._changed.notify()

    def _forget(self) -> None:
        with self._changed:
            self._num_taken -= 1
            self._changed.notify()


def _allocate(num_bytes: int) -> torch.Tensor:
    pinned = torch.cuda.is_available()
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    if not pinned:
        # Not in huge pages: to find them the kernel may first move others about, for seconds.
        fault_in(buffer)
    return buffer


def staging_bytes(layouts: Sequence[FileLayout]) -> int:
    """Bytes of staging memory that :func:`stage` needs."""
    return sum(_aligned(layout.image_bytes) for layout in layouts)


def stage(
    layouts: Sequence[FileLayout], views: Sequence[Sequence[torch.Tensor]], buffer: torch.Tensor
) -> list[Bytes]:
    """Copy the data of payload files into staging memory.

    When this returns the tensors may change.

    Args:
        layouts: The files.
        views: The tensor memory of each entry of each file.
        buffer: uint8 host memory of at least :func:`staging_bytes`.

    Returns:
        The image of each file without its header, before compression; uint8, in ``buffer``.
    """
    images = []
    flat: list[tuple[Bytes, Bytes]] = []
    on_device = False
    start = 0
    for layout, of_file in zip(layouts, views, strict=True):
        memory = buffer[start : start + layout.image_bytes]
        image = flat_bytes(memory)
        ends = (layout.image_offsets + layout.raw_bytes).tolist()
        for begin, end, view in zip(layout.image_offsets.tolist(), ends, of_file, strict=True):
            if is_flat(view):
                flat.append((image[begin:end], flat_bytes(view)))
            else:
                copy_into(memory[begin:end], view, non_blocking=True)
                on_device |= view.device.type == "cuda"
        images.append(image)
        start += _aligned(layout.image_bytes)
    # In a loop that does nothing else: code between two copies of megabytes finds none of itself in the cache. By this
    # thread alone: PyTorch's copy spreads over its OpenMP threads, and waits for all of them while training keeps the
    # cores busy.
    for destination, source in flat:
        np.copyto(destination, source)
    if on_device:
        torch.cuda.synchronize()
    return images


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _FILE_ALIGN) * _FILE_ALIGN
