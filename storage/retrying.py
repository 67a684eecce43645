"""A backend whose calls are repeated."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from storage.backend import Backend, FileStat, RangeRead, Sink
from storage.buffers import num_bytes_of, split
from storage.errors import AlreadyExists, StorageError
from storage.paths import join
from storage.range_file import open_ranges
from storage.retry import Attempt, Retrier

__all__ = ["RetryingBackend", "create_once"]

T = TypeVar("T")

_COMPARE_BYTES: Final = 8 << 20


class RetryingBackend:
    """A backend around one that does not repeat its requests by itself. Each call is one request.

    What a writer streams is not repeated: the bytes appended before are gone. Drivers that upload in parts repeat
    these themselves.

    Args:
        backend: Does the work.
        url: Full path or URL of its root.
        retrier: Policy and budget.
    """

    def __init__(self, backend: Backend, url: str, retrier: Retrier) -> None:
        self._backend = backend
        self._url = url
        self._below = f"{url.rstrip('/')}/"
        self._retrier = retrier
        self.range_bytes = backend.range_bytes
        self.ranges_per_call = backend.ranges_per_call

    def read(self, path: str) -> bytes:
        """Repeated whole."""
        return self._repeat(path, partial(self._backend.read, path))

    def read_range(self, wanted: RangeRead) -> int:
        """Repeated whole."""
        # Without the detour of the others: a short local read would feel it.
        return self._retrier.call(
            lambda _: self._backend.read_range(wanted), f"{self._below}{wanted.path}", self.classify
        )

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """Repeated whole: it replaces what an attempt before it may have stored."""
        self._repeat(path, partial(self._backend.write, path, views))

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """Repeated; an attempt that succeeded unseen is recognised by its content."""
        create_once(
            self._retrier,
            lambda _: self._backend.create(path, views),
            lambda this: this.repeated and _holds(self._backend, path, views),
            join(self._url, path),
            self.classify,
        )

    def sink(self, path: str, header_bytes: int) -> Sink:
        """As the backend does it."""
        return self._backend.sink(path, header_bytes)

    def open(self, path: str) -> BinaryIO:
        """A plain file if local, else a file that reads ranges, each of which is repeated."""
        if self._backend.local_path(path) is None:
            return open_ranges(self, path, join(self._url, path))
        return self._repeat(path, partial(self._backend.open, path))

    def list_objects(self, prefix: str) -> list[FileStat]:
        """Repeated whole."""
        return self._repeat(prefix, partial(self._backend.list_objects, prefix))

    def list_dirs(self, prefix: str) -> list[str]:
        """Repeated whole."""
        return self._repeat(prefix, partial(self._backend.list_dirs, prefix))

    def stat(self, path: str) -> FileStat:
        """Repeated."""
        return self._repeat(path, partial(self._backend.stat, path))

    def delete(self, path: str) -> None:
        """Repeated: what is gone already is no error."""
        self._repeat(path, partial(self._backend.delete, path))

    def delete_tree(self, prefix: str) -> None:
        """Repeated: what is gone already is no error."""
        self._repeat(prefix, partial(self._backend.delete_tree, prefix))

    def sub(self, path: str) -> "RetryingBackend":
        """Another root, the same budget."""
        return RetryingBackend(self._backend.sub(path), join(self._url, path), self._retrier)

    def local_path(self, path: str) -> Path | None:
        """As the backend says."""
        return self._backend.local_path(path)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As the backend reads it."""
        return self._backend.classify(error, path)

    def _repeat(self, path: str, call: Callable[[], T]) -> T:
        return self._retrier.call(lambda _: call(), join(self._url, path), self.classify)


def create_once(
    retrier: Retrier,
    create: Callable[[Attempt], None],
    is_ours: Callable[[Attempt], bool],
    path: str,
    classify: Callable[[BaseException, str], StorageError | None],
) -> None:
    """Repeat a create-if-absent so that its own success, the answer to which got lost, is no ``AlreadyExists``.

    Args:
        retrier: Policy and budget.
        create: One attempt.
        is_ours: Whether what is stored was stored by us, in an attempt (this one included) that seemed to fail.
        path: Full path or URL.
        classify: Reads the driver's errors.
    """

    def attempt(this: Attempt) -> None:
        try:
            create(this)
        except Exception as error:
            taken = isinstance(classify(error, path), AlreadyExists)
            if not (taken and is_ours(this)):
                raise

    retrier.call(attempt, path, classify)


def _holds(backend: Backend, path: str, views: Sequence[memoryview]) -> bool:
    """Whether an object consists of exactly these bytes."""
    if backend.stat(path).size != num_bytes_of(views):
        return False
    with closing(backend.open(path)) as file:
        return all(
            file.read(num_bytes_of(piece)) == b"".join(piece) for piece in split(views, _COMPARE_BYTES)
        )
