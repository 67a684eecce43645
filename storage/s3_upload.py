"""Storing one S3 object in parts, the one with the header last.

An S3 object is visible only once it is complete, whatever order its parts arrive in. So the first part, if it holds
a header known only at the end, is kept in memory while the others go up in parallel. A process that is killed
leaves an unfinished upload, which is invisible; a bucket rule ``AbortIncompleteMultipartUpload`` removes it.
"""

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import Final

from storage.buffers import num_bytes_of, split
from storage.parallel import Group
from storage.s3_body import one_view
from storage.s3_target import S3Target

__all__ = ["FIRST_PART_BYTES", "MAX_PENDING_PARTS", "S3Sink", "Upload", "equal_part_bytes", "part_bytes"]

FIRST_PART_BYTES: Final = 16 << 20
"""Size of the first parts of an upload. S3 wants at least 5 MiB for all but the last."""

MAX_PENDING_PARTS: Final = 8
"""Parts in flight; with the one being filled and the one held back they bound the memory of a writer."""

_MAX_PARTS: Final = 10_000  # limit of the protocol


def part_bytes(number: int) -> int:
    """Size of part ``number`` (from 1) of an object whose size is not known.

    Doubles every 2,000 parts, so that 10,000 parts, the most S3 takes, hold more than 900 GiB. Equal up to 31 GiB,
    because some servers want that.
    """
    return FIRST_PART_BYTES << (number - 1) // 2000


def equal_part_bytes(num_bytes: int) -> int:
    """Size of the parts of an object of ``num_bytes`` bytes: the same for all but the last, and few enough."""
    size = FIRST_PART_BYTES
    while size * _MAX_PARTS < num_bytes:
        size *= 2
    return size


class Upload:
    """The parts of one object on their way. Used by one thread.

    Args:
        target: Where to.
    """

    def __init__(self, target: S3Target) -> None:
        self._target = target
        self._id: str | None = None
        self._etags: dict[int, str] = {}
        self._num_bytes = 0
        self._group = Group(target.url, max_pending=MAX_PENDING_PARTS)

    def start(self, number: int, body: memoryview) -> None:
        """Begin to send part ``number`` (from 1), after waiting for room. The memory must stay as it is meanwhile."""
        if self._id is None:
            self._id = self._target.begin()
        self._num_bytes += body.nbytes
        self._group.start(partial(self._target.put_part, self._id, number, body, self._etags))

    def complete(self) -> None:
        """Wait for all parts, make the object visible, and ask the server whether it has it."""
        assert self._id is not None
        self._group.finish()
        etag = self._target.complete(self._id, self._etags)
        self._id = None
        self._target.check(etag, self._num_bytes)

    def abort(self) -> None:
        """Cancel what is in flight, then abort: a part that arrived later would stay for ever."""
        self._group.cancel()
        upload_id, self._id = self._id, None
        if upload_id is not None:
            self._target.abort(upload_id)


class S3Sink:
    """One object being uploaded. Appended bytes are copied once, into the part they belong to.

    Args:
        target: Where to.
        header_bytes: Room reserved at the start.
    """

    def __init__(self, target: S3Target, header_bytes: int) -> None:
        self._target = target
        self._upload = Upload(target)
        self._number = 1  # of the part being filled
        self._room = max(0, part_bytes(1) - header_bytes)  # bytes that the part being filled still takes
        self._filling = BytesIO(bytes(header_bytes))
        self._filling.seek(header_bytes)
        self._held_back = self._filling if header_bytes else None

    def append(self, views: Sequence[memoryview]) -> None:
        """Copy into parts; those that are full go up, the one with a header excepted."""
        for view in views:
            while view.nbytes:
                if not self._room:
                    self._next_part()
                taken = view[: self._room]
                self._filling.write(taken)
                self._room -= taken.nbytes
                view = view[taken.nbytes :]

    def store(self, views: Sequence[memoryview]) -> None:
        """Upload a whole object from where it lies, instead of ``append`` and ``commit``.

        A part that several views make up is copied.
        """
        for number, part in enumerate(split(views, equal_part_bytes(num_bytes_of(views))), 1):
            self._upload.start(number, one_view(part))
        self._upload.complete()

    def commit(self, header: bytes) -> None:
        """Upload what is left, the header with it; or everything by one request if that is all there is."""
        if self._held_back:
            self._held_back.seek(0)
            self._held_back.write(header)
        if self._number == 1:
            self._target.put(self._filling.getbuffer())
            return
        if self._held_back:
            self._upload.start(1, self._held_back.getbuffer())
        self._upload.start(self._number, self._filling.getbuffer())
        self._upload.complete()

    def abort(self) -> None:
        """Remove what the server has."""
        self._upload.abort()

    def _next_part(self) -> None:
        if self._filling is not self._held_back:
            self._upload.start(self._number, self._filling.getbuffer())
        self._number += 1
        self._filling = BytesIO()
        self._room = part_bytes(self._number)
