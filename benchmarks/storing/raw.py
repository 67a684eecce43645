"""Local files moved by nothing but system calls: what ``dd`` does, on one thread or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CALL_BYTES = 8 << 20
"""Bytes per system call."""


def read_into(path: Path, into: memoryview, pool: ThreadPoolExecutor | None) -> int:
    """Fill memory from the start of a file.

    Args:
        path: at least as long as ``into``.
        into: flat and writable.
        pool: threads that share the work; None: one loop, here.

    Returns:
        Bytes read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:

        def read(begin: int) -> None:
            part = into[begin : begin + _CALL_BYTES]
            while part.nbytes:
                got = os.preadv(fd, [part], begin)
                begin, part = begin + got, part[got:]

        _each(read, range(0, into.nbytes, _CALL_BYTES), pool)
    finally:
        os.close(fd)
    return into.nbytes


def write_files(directory: Path, contents: Sequence[memoryview], pool: ThreadPoolExecutor | None) -> int:
    """Write one file per view, and fsync it. Neither a rename nor an fsync of the directory: the least there is.

    Args:
        directory: exists.
        contents: of one file each.
        pool: threads that take a file each; None: one after the other, here.

    Returns:
        Bytes written.
    """

    def write(index: int) -> None:
        fd = os.open(directory / f"{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = contents[index]
            while rest.nbytes:
                rest = rest[os.write(fd, rest[:_CALL_BYTES]) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    _each(write, range(len(contents)), pool)
    return sum(content.nbytes for content in contents)


def _each(call: Callable[[int], None], values: range, pool: ThreadPoolExecutor | None) -> None:
    if pool is None:
        for value in values:
            call(value)
    else:
        list(pool.map(call, values))
