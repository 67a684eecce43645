"""Writing a directory of many files so that all of them appear together or not at all.

Every attempt writes below a directory of its own, and the only commit is to create the marker if it is absent. So of
any number of attempts at one place one wins, nothing is ever overwritten, and a process that dies at any point leaves
nothing visible. ``storage.tree`` describes what then lies there.

::

    open ── write, writer … ──► commit ──► committed
      │                           │
      │ exception, abort          ├─ another attempt was first: aborted, AlreadyExists
      ▼                           └─ outcome unknown (connection lost): files stay, the error is raised
    aborted: own files removed
"""

import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from storage.backend import give_up
from storage.buffers import Data, as_views, num_bytes_of
from storage.errors import AlreadyExists, BadRequest, NoSpace, PermissionDenied, StorageError, Unsupported
from storage.paths import check_object
from storage.store import Store
from storage.tree import (
    ATTEMPT,
    MARKER,
    FileDigest,
    TreeFile,
    attempt_of,
    data_dir,
    encode_marker,
    read_marker,
    remove_attempt,
)
from storage.writer import Closing, Writer

__all__ = ["Transaction", "TransactionWriter", "remove_uncommitted"]

# Errors after which the marker is certainly not there and never will be.
_REFUSED: Final = (AlreadyExists, NoSpace, PermissionDenied, Unsupported)


class Transaction:
    """An attempt to fill a directory. Leaving a ``with`` block commits; leaving it by an exception aborts.

    ``write`` and ``writer`` may be called from many threads. Several processes fill one tree together by giving the
    same ``attempt``: each writes files of its own and sends its ``files`` to one of them, which calls ``include``
    and ``commit``. ``close`` ends the part of the others.

    Args:
        store: The directory to be.
        attempt: 32 hex digits of the attempt to take part in; None begins a new one.

    Raises:
        AlreadyExists: Something is committed there.
        BadRequest: A malformed attempt.
    """

    def __init__(self, store: Store, *, attempt: str | None = None) -> None:
        self._attempt = uuid.uuid4().hex if attempt is None else attempt
        if not ATTEMPT.fullmatch(self._attempt):
            raise BadRequest(f"attempt {attempt!r} is not 32 hex digits: take it from another Transaction")
        self._store = store
        self._data = store.sub(data_dir(self._attempt))
        self._lock = threading.Lock()
        self._files: dict[str, TreeFile] = {}
        self._taken: set[str] = set()
        self._open_writers: set[str] = set()
        self._finished = False
        if read_marker(store) is not None:  # spares the writes; the commit decides
            raise self._already_exists()

    def __repr__(self) -> str:
        return f"Transaction({self._store.url!r}, attempt={self._attempt!r})"

    @property
    def attempt(self) -> str:
        """32 hex digits that name this attempt."""
        return self._attempt

    @property
    def files(self) -> list[TreeFile]:
        """What was written or included so far, by path."""
        with self._lock:
            return [self._files[path] for path in sorted(self._files)]

    def write(self, path: str, data: Data) -> None:
        """Write one file.

        Raises:
            BadRequest: The path was used before, or the transaction is over.
            StorageError: It failed; the path may be used again.
        """
        views = as_views(data)
        self._take(path)
        try:
            self._data.write(path, list(views))
        except BaseException:
            self._give_back(path)
            raise
        digest = FileDigest()
        for view in views:
            digest.update(view)
        self._add(TreeFile(path=path, num_bytes=num_bytes_of(views), xxh3=digest.hexdigest()))

    def writer(self, path: str, header_bytes: int = 0) -> "TransactionWriter":
        """Stream one file, as ``Store.writer`` does; it belongs to the tree once it is closed.

        Raises:
            BadRequest: The path was used before, or the transaction is over.
        """
        self._take(path)
        try:
            return TransactionWriter(self, path, self._data.writer(path, header_bytes), header_bytes)
        except BaseException:
            self._give_back(path)
            raise

    def include(self, files: Iterable[TreeFile]) -> None:
        """Count in what another process wrote in the same attempt.

        Raises:
            BadRequest: A path was used before.
        """
        for file in files:
            self._take(file.path)
            self._add(file)

    def commit(self) -> None:
        """Make all files visible, durable and unchangeable.

        Raises:
            AlreadyExists: Another attempt was committed meanwhile; it is untouched.
            BadRequest: A writer is still open, or the transaction is over.
            StorageError: The marker could not be created. Unless it was refused outright the tree may exist all the
                same, so the files stay; ``remove_uncommitted`` takes them if it does not.
        """
        with self._lock:
            self._require_open()
            if self._open_writers:
                raise BadRequest(
                    f"{self._store.url}: {min(self._open_writers)!r} is still being written: close it"
                )
            marker = encode_marker(self._attempt, [self._files[path] for path in sorted(self._files)])
            self._finished = True
        try:
            self._store.create(MARKER, marker)
        except BaseException as error:
            if not self._was_committed(error):
                raise

    def abort(self) -> None:
        """Remove what was written in this attempt, by all who take part. After ``commit`` it does nothing."""
        with self._lock:
            finished, self._finished = self._finished, True
        if not finished:
            remove_attempt(self._store, self._attempt)

    def close(self) -> None:
        """End this process's part of an attempt that another one commits."""
        with self._lock:
            self._finished = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            give_up(self, error, "tree")
        elif not self._finished:
            try:
                self.commit()
            except BadRequest:
                self.abort()
                raise

    def _was_committed(self, error: BaseException) -> bool:
        """Whether a commit that raised ``error`` succeeded all the same; if it surely did not, remove its files."""
        try:
            marker = read_marker(self._store)
            winner = None if marker is None else attempt_of(marker, f"{self._store.url}/{MARKER}")
        except StorageError as second:
            error.add_note(f"whether the tree was committed is unknown, its files stay: {second}")
            return False
        if winner == self._attempt:
            # Over a network our own success may come back as a loss. Any other error leaves open whether the marker
            # survives a power cut: it is not reported as success, nor are its files removed.
            return isinstance(error, AlreadyExists)
        if winner is not None or isinstance(error, _REFUSED):
            with suppress(StorageError):  # the first error is the one to act on
                remove_attempt(self._store, self._attempt)
        if winner is not None:
            raise self._already_exists() from error
        return False

    def _already_exists(self) -> AlreadyExists:
        return AlreadyExists(
            f"{self._store.url}/{MARKER}", "a tree is committed here: write to another place"
        )

    def _take(self, path: str) -> None:
        check_object(path)
        with self._lock:
            self._require_open()
            if path in self._taken:
                raise BadRequest(f"{self._store.url}: {path!r} was written before: a tree has each file once")
            self._taken.add(path)
            self._open_writers.add(path)

    def _give_back(self, path: str) -> None:
        with self._lock:
            self._taken.discard(path)
            self._open_writers.discard(path)

    def _add(self, file: TreeFile) -> None:
        with self._lock:
            self._files[file.path] = file
            self._open_writers.discard(file.path)

    def _require_open(self) -> None:
        if self._finished:
            raise BadRequest(f"{self._store.url}: this transaction is over: begin a new one")


class TransactionWriter(Closing):
    """One file of a transaction being streamed; made by ``Transaction.writer``, used like ``Writer``."""

    def __init__(self, transaction: Transaction, path: str, writer: Writer, header_bytes: int) -> None:
        self._transaction = transaction
        self._path = path
        self._writer = writer
        self._header_bytes = header_bytes
        self._header = b""
        self._digest = FileDigest()
        self._over = False

    @property
    def num_bytes(self) -> int:
        """As ``Writer.num_bytes``."""
        return self._writer.num_bytes

    def write(self, data: Data) -> None:
        """As ``Writer.write``."""
        views = as_views(data)
        self._writer.write(views)
        for view in views:
            self._digest.update(view)

    def set_header(self, header: bytes) -> None:
        """As ``Writer.set_header``."""
        self._writer.set_header(header)
        self._header = bytes(header)

    def close(self) -> None:
        """Finish the file and count it in. A second call does nothing."""
        if self._over:
            return
        self._over = True
        try:
            self._writer.close()
        except BaseException:
            self._transaction._give_back(self._path)
            raise
        self._digest.update(self._header)
        self._transaction._add(
            TreeFile(
                path=self._path,
                num_bytes=self._writer.num_bytes,
                xxh3=self._digest.hexdigest(),
                header_bytes=self._header_bytes,
            )
        )

    def abort(self) -> None:
        """Give the file up; its path may be used again. After ``close`` it does nothing."""
        if not self._over:
            self._over = True
            self._transaction._give_back(self._path)
            self._writer.abort()


def remove_uncommitted(store: Store) -> list[str]:
    """Remove what killed processes left of attempts at the tree ``store``.

    Only for when nobody is writing there: it cannot tell a dead attempt from a slow one.

    Returns:
        The attempts removed.
    """
    marker = read_marker(store)
    committed = None if marker is None else attempt_of(marker, f"{store.url}/{MARKER}")
    found = [name for name in store.list_dirs("data") if ATTEMPT.fullmatch(name) and name != committed]
    for attempt in found:
        remove_attempt(store, attempt)
    return found
