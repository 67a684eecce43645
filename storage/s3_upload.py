"""Storing one S3 object, the first part last.

An S3 object is visible only once it is complete, whatever order its parts arrive in. So the first part, which holds
a header known only at the end, is kept in memory while the others go up in parallel. A process that is killed
leaves an unfinished upload, which is invisible; a bucket rule ``AbortIncompleteMultipartUpload`` removes it.
"""

from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, Final

from fsspec.asyn import sync

from storage.parallel import Group

__all__ = ["FIRST_PART_BYTES", "MAX_PENDING_PARTS", "S3Sink", "S3Target", "part_bytes"]

FIRST_PART_BYTES: Final = 16 << 20
"""Size of the first parts of an upload. S3 wants at least 5 MiB for all but the last."""

MAX_PENDING_PARTS: Final = 8
"""Parts in flight; with the one being filled and the one held back they bound the memory of a writer."""


def part_bytes(number: int) -> int:
    """Size of part ``number`` (from 1).

    Doubles every 2,000 parts, so that 10,000 parts, the most S3 takes, hold more than 900 GiB. Equal up to 31 GiB,
    because some servers want that.
    """
    return FIRST_PART_BYTES << (number - 1) // 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Target:
    """Where one object goes, and the requests that store it.

    Attributes:
        filesystem: An ``s3fs.S3FileSystem``.
        bucket: Name of the bucket.
        key: Full key in it.
    """

    filesystem: Any
    bucket: str
    key: str

    def put(self, body: BinaryIO, *, if_absent: bool = False) -> None:
        """Store the whole object by one request."""
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        self._send("put_object", body, **condition)

    def begin(self) -> str:
        """Begin a multipart upload; return its id."""
        return str(self._call("create_multipart_upload")["UploadId"])

    def put_part(self, upload_id: str, number: int, body: BinaryIO, etags: dict[int, str]) -> None:
        """Upload part ``number`` (from 1) and note its tag in ``etags``."""
        answer = self._send("upload_part", body, UploadId=upload_id, PartNumber=number)
        etags[number] = answer["ETag"]

    def complete(self, upload_id: str, etags: dict[int, str]) -> None:
        """Make the object of parts visible."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        self._call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})

    def abort(self, upload_id: str) -> None:
        """Remove the parts of an upload."""
        self._call("abort_multipart_upload", UploadId=upload_id)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self.filesystem.call_s3(method, Bucket=self.bucket, Key=self.key, **arguments)

    def _send(self, method: str, body: BinaryIO, **arguments: Any) -> Any:
        return sync(self.filesystem.loop, self._send_async, method, body, arguments)

    async def _send_async(self, method: str, body: BinaryIO, arguments: dict[str, Any]) -> Any:
        # A body is a file and not bytes, because aiohttp would write bytes in one piece and hold up all other
        # requests. s3fs repeats a failed call without rewinding the file, so the client is called directly:
        # botocore's own retries do rewind it.
        body.seek(0)
        await self.filesystem.set_session()
        method_of_client = getattr(await self.filesystem.get_s3(self.bucket), method)
        settings = self.filesystem._get_s3_method_kwargs(
            method_of_client, Bucket=self.bucket, Key=self.key, Body=body, **arguments
        )
        return await method_of_client(**settings)


class S3Sink:
    """One object being uploaded. Appended bytes are copied once, into the part they belong to.

    Args:
        target: Where to.
        header_bytes: Room reserved at the start.
    """

    def __init__(self, target: S3Target, header_bytes: int) -> None:
        self._target = target
        self._number = 1  # of the part being filled
        self._room = max(0, part_bytes(1) - header_bytes)  # bytes that the part being filled still takes
        self._filling = BytesIO(bytes(header_bytes))
        self._filling.seek(header_bytes)
        self._first = self._filling
        self._upload_id: str | None = None
        self._etags: dict[int, str] = {}
        self._group = Group(f"s3://{target.bucket}/{target.key}", max_pending=MAX_PENDING_PARTS)

    def append(self, view: memoryview) -> None:
        """Copy into parts; those that are full go up, the first excepted."""
        while view.nbytes:
            if not self._room:
                self._next_part()
            taken = view[: self._room]
            self._filling.write(taken)
            self._room -= taken.nbytes
            view = view[taken.nbytes :]

    def commit(self, header: bytes) -> None:
        """Upload what is left, the first part last; or everything by one request if that is all there is."""
        self._first.seek(0)
        self._first.write(header)
        if self._upload_id is None:
            self._target.put(self._first)
            return
        self._start_part(self._upload_id)
        self._group.finish()
        self._target.put_part(self._upload_id, 1, self._first, self._etags)
        self._target.complete(self._upload_id, self._etags)
        self._upload_id = None

    def abort(self) -> None:
        """Cancel what is in flight, then abort: a part that arrived later would stay for ever."""
        self._group.cancel()
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None:
            self._target.abort(upload_id)

    def _next_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._target.begin()
        else:
            self._start_part(self._upload_id)
        self._number += 1
        self._filling = BytesIO()
        self._room = part_bytes(self._number)

    def _start_part(self, upload_id: str) -> None:
        self._group.start(partial(self._target.put_part, upload_id, self._number, self._filling, self._etags))
