"""Ways to write staged bytes beside a training that keeps every core busy."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, Self

import torch
import xxhash
from torch import Tensor

import checkpoint
from benchmarks.checkpointing.formats import TorchDcp
from benchmarks.checkpointing.ranks import TIMEOUT_S
from benchmarks.checkpointing.state import TrainingState

_PIECE_BYTES = 4 * 2**20


class Worker(Protocol):
    """Something that saves in the background; one save at a time."""

    def begin(self, path: Path) -> Callable[[], bool]:
        """Begin; gives a call that says whether it is done, and raises if it failed."""


def write(staged: Tensor, path: Path) -> None:
    """The work of every worker: digest and write pieces of 4 MiB, then fsync.

    Args:
        staged: uint8, flat.
        path: new file.
    """
    data = staged.numpy().data
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for offset in range(0, len(data), _PIECE_BYTES):
            piece = data[offset : offset + _PIECE_BYTES]
            xxhash.xxh3_64_intdigest(piece)
            assert os.pwrite(file, piece, offset) == len(piece), "local files take a piece at once"
        os.fsync(file)
    finally:
        os.close(file)


class Priority(StrEnum):
    """How much of a core a thread gets that others want, too."""

    NORMAL = "normal"
    NICE = "nice 19"
    """About a sixtieth."""
    IDLE = "SCHED_IDLE"
    """About a three-hundredth; whoever wakes up gets the core at once."""

    def take(self) -> None:
        """Give it to the calling thread, and to no other."""
        thread = threading.get_native_id()
        if self is Priority.NICE:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        elif self is Priority.IDLE:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


class Thread:
    """A thread of this process.

    Args:
        staged: what it writes; uint8, flat.
        priority: of the thread.
    """

    def __init__(self, staged: Tensor, *, priority: Priority = Priority.NORMAL) -> None:
        self._staged = staged
        self._priority = priority

    def begin(self, path: Path) -> Callable[[], bool]:
        """See `Worker`."""
        thread = threading.Thread(target=self._run, args=(path,))
        thread.start()
        return lambda: not thread.is_alive()

    def _run(self, path: Path) -> None:
        self._priority.take()
        write(self._staged, path)


class Process:
    """A process that shares the staging memory. Use as a context manager.

    Args:
        staged: what it writes; uint8, flat; is moved to shared memory.
        priority: of the process.
    """

    def __init__(self, staged: Tensor, priority: Priority) -> None:
        staged.share_memory_()  # type: ignore[no-untyped-call]  # unannotated in torch
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, staged, priority), daemon=True)
        self._process.start()
        there.close()

    def begin(self, path: Path) -> Callable[[], bool]:
        """See `Worker`."""
        self._connection.send(path)

        def done() -> bool:
            return self._connection.poll() and bool(self._connection.recv())

        return done

    def __enter__(self) -> Self:
        assert self._connection.poll(TIMEOUT_S), "the process did not start"
        self._connection.recv()
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()
        self._process.join(TIMEOUT_S)


def _serve(connection: Connection, staged: Tensor, priority: Priority) -> None:
    priority.take()
    torch.set_num_threads(1)
    try:
        connection.send(True)
        while True:
            write(staged, connection.recv())
            connection.send(True)
    except EOFError:  # the other end is closed
        pass


class Ours:
    """``checkpoint.async_save``, from its return on.

    Args:
        state: what is saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = {"model": state.model, "optimizer": state.optimizer}

    def begin(self, path: Path) -> Callable[[], bool]:
        """See `Worker`."""
        handle = checkpoint.async_save(path, self._state)
        return lambda: handle.done() and bool(handle.result(TIMEOUT_S))


class Dcp:
    """torch's ``async_save``, from its return on.

    Args:
        state: what is saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self._form = TorchDcp(state, keep_staging=True)

    def begin(self, path: Path) -> Callable[[], bool]:
        """See `Worker`."""
        finish = self._form.begin(path)
        thread = threading.Thread(target=finish)
        thread.start()
        return lambda: not thread.is_alive()
