"""The body of a request, sent from where it lies in memory."""

from collections.abc import Sequence
from io import SEEK_CUR, SEEK_END, SEEK_SET
from typing import Final, Self

__all__ = ["Body", "one_view"]

_CHUNK_BYTES: Final = 256 << 10
"""What is handed to the connection at a time: small enough that other requests get their turn."""


def one_view(views: Sequence[memoryview]) -> memoryview:
    """Flat views that follow each other as one, copied only if there are several."""
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


class Body:
    """Memory as botocore and aiohttp want it: a file for the one, which hashes it, chunks for the other.

    aiohttp would read a file by its default executor, 64 KiB each time and copied, and would write a ``bytes`` in one
    piece, which holds up all other requests. For one attempt at one request: what has begun to be sent is not sent
    again by aiohttp.

    Args:
        view: Flat. Must not change until the request is done.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0
        self._num_sent = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, size: int | None = None) -> memoryview:
        """The next bytes, as a view."""
        end = self._view.nbytes if size is None or size < 0 else self._position + size
        found = self._view[self._position : end]
        self._position += found.nbytes
        return found

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Move to another position."""
        self._position = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._view.nbytes}[whence] + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> memoryview:
        chunk = self._view[self._num_sent : self._num_sent + _CHUNK_BYTES]
        if not chunk.nbytes:
            raise StopAsyncIteration
        self._num_sent += chunk.nbytes
        return chunk
