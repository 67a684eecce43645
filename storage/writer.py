"""Streaming one object into a store, with a header that is known only at the end."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from storage.backend import Backend, Sink, give_up
from storage.buffers import Data, as_views, num_bytes_of
from storage.errors import BadRequest
from storage.spans import span

__all__ = ["Closing", "Writer"]


class Closing(ABC):
    """What a ``with`` block finishes when it is left normally and gives up when it is left by an exception."""

    @abstractmethod
    def close(self) -> None:
        """Finish."""

    @abstractmethod
    def abort(self) -> None:
        """Remove everything stored so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            give_up(self, error)


class Writer(Closing):
    """One object being written; made by ``Store.writer``.

    Nothing is visible until ``close``. Leaving a ``with`` block normally closes, leaving it by an exception aborts.
    Used by one thread at a time.

    Args:
        backend: Where to.
        path: Of the object, relative to the backend.
        url: Full path or URL, for messages.
        header_bytes: Room reserved before the data.
    """

    def __init__(self, backend: Backend, path: str, url: str, header_bytes: int) -> None:
        self._backend = backend
        self._url = url
        self._header_bytes = header_bytes
        self._header: bytes | None = None if header_bytes else b""
        self._num_bytes = header_bytes
        self._sink: Sink | None = backend.sink(path, header_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the object so far, reserved header included; the offset of the next byte written."""
        return self._num_bytes

    def write(self, data: Data) -> None:
        """Append bytes.

        Args:
            data: A C-contiguous buffer, or a list or tuple of some, which may be reused when this returns.

        Raises:
            StorageError: It failed; the object is given up.
        """
        sink = self._open_sink()
        views = as_views(data)
        if not views:
            return
        try:
            sink.append(views)
        except BaseException as error:
            self._fail(error)
            raise
        self._num_bytes += num_bytes_of(views)

    def set_header(self, header: bytes) -> None:
        """Give the bytes of the reserved room, at any time before ``close``; the last call counts.

        Raises:
            BadRequest: Not exactly ``header_bytes`` long.
        """
        self._open_sink()
        if len(header) != self._header_bytes:
            raise BadRequest(
                f"{self._url}: header of {len(header)} bytes, {self._header_bytes} are reserved: pad it to that"
            )
        self._header = bytes(header)

    def close(self) -> None:
        """Make the object visible, whole and durable. A second call does nothing.

        Raises:
            BadRequest: The reserved header was never set; the object is given up.
            StorageError: It failed; the object is given up.
        """
        if self._sink is None:
            return
        header = self._header
        if header is None:
            self.abort()
            raise BadRequest(f"{self._url}: the header was never set: call set_header before closing")
        with span("storage.commit", path=self._url, num_bytes=self._num_bytes):
            try:
                self._sink.commit(header)
            except BaseException as error:
                self._fail(error)
                raise
        self._sink = None

    def abort(self) -> None:
        """Give the object up and remove what was stored of it. After ``close`` it does nothing."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()

    def _open_sink(self) -> Sink:
        if self._sink is None:
            raise BadRequest(f"{self._url}: this writer is closed: make a new one")
        return self._sink

    def _fail(self, error: BaseException) -> None:
        """Give up after an error, and raise it classified if it is one of I/O."""
        sink, self._sink = self._sink, None
        if sink is not None:
            give_up(sink, error)
        classified = self._backend.classify(error, self._url)
        if classified is not None and classified is not error:
            try:
                raise classified from error
            finally:
                del classified
