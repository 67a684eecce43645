"""The quarantine file: bad rows as JSON lines, each once per epoch, whoever reads it how often.

A row is written when the step that consumed it is handed out, so that rows read ahead are not in the file. A run that
is resumed consumes rows again that are in the file already, and processes that share a data-parallel rank all consume
the same; so a writer looks first at what the file holds, under a lock, and appends only what is not there. Lines are
appended whole; a line torn by a crash is cut off by the next writer, and comes again when its step does. Lines of
others are left as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from omniload.errors import LoaderTimeout, QuarantineError
from omniload.pieces import Failure
from storage.file_lock import locked

_LOCK_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 20
_LINE_BEGINS = b'{"source": '


class Quarantine:
    """Appends to a quarantine file. Fields of a line: those of `Failure`, its ``row_id`` as ``row``, and ``step``.

    Args:
        path: the file; it is created, with its folder, if it is not there.

    Raises:
        QuarantineError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._known_file: int | None = None  # its inode
        self._known_end = 0
        self._known: set[int] = set()
        with self._open() as file:
            self._learn(file)

    def add(self, failures: Iterable[Failure], step: int) -> None:
        """Append the rows that are not in the file yet; when it returns they are.

        Args:
            failures: the rows.
            step: the step that consumed them.

        Raises:
            QuarantineError: the file cannot be written.
            LoaderTimeout: another process holds its lock.
        """
        failures = list(failures)
        if not failures:
            return
        with self._open() as file:
            self._learn(file)
            lines = bytearray()
            for failure in failures:
                key = _key(failure.source, failure.path, failure.row_id, failure.epoch)
                if key not in self._known:
                    self._known.add(key)
                    lines += _line(failure, step)
            view = memoryview(lines)
            while view:
                written = os.pwrite(file, view, self._known_end)
                self._known_end, view = self._known_end + written, view[written:]

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, opened and locked. Opened anew each time: it may be rotated, and survives a fork."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not self._path.is_file():
                raise FileExistsError("not a regular file")
            self._path.open("ab").close()  # says why if it cannot be written
            with locked(self._path, _LOCK_TIMEOUT_S) as file:
                if file is None:
                    raise LoaderTimeout(
                        f"quarantine: {self._path} was locked by another process for {_LOCK_TIMEOUT_S:g} s;"
                        " end that process, or give another file"
                    )
                yield file
        except LoaderTimeout:
            raise
        except (OSError, ValueError) as error:
            self._known_file = None  # which of the last lines were written is read from the file next time
            raise QuarantineError(
                f"quarantine: {self._path} cannot be written ({error}); free it, or give another file"
            ) from error

    def _learn(self, file: int) -> None:
        """Take note of what was appended since the last look, and cut off a torn line."""
        stat = os.fstat(file)
        if stat.st_ino != self._known_file or stat.st_size < self._known_end:
            self._known_file, self._known_end, self._known = stat.st_ino, 0, set()
        rest = b""
        while data := os.pread(file, _READ_BYTES, self._known_end + len(rest)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._known_end += len(line) + 1
                if (key := _key_of(line)) is not None:
                    self._known.add(key)
        if rest[: len(_LINE_BEGINS)] != _LINE_BEGINS[: len(rest)]:
            raise FileExistsError("its last line does not end, and is none that was written here")
        if rest:
            os.ftruncate(file, self._known_end)


def _key(source: object, path: object, row: object, epoch: object) -> int:
    return int(xxhash.xxh3_128_intdigest(json.dumps([source, path, row, epoch]).encode()))


def _key_of(line: bytes) -> int | None:
    """The key of a line; None if it is none of ours."""
    try:
        values = json.loads(line)
        return _key(values["source"], values["path"], values["row"], values["epoch"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _line(failure: Failure, step: int) -> bytes:
    values = {
        "source": failure.source,
        "path": failure.path,
        "row": failure.row_id,
        "epoch": failure.epoch,
        "window": failure.window,
        "position": failure.position,
        "reason": failure.reason,
        "step": step,
    }
    return json.dumps(values).encode() + b"\n"
