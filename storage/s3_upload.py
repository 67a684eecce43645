"""Storing one S3 object, the part with the header last.

An S3 object is visible only once it is complete, whatever order its parts arrive in. So the first part, if it holds
a header known only at the end, is kept in memory while the others go up in parallel. A process that is killed
leaves an unfinished upload, which is invisible; a bucket rule ``AbortIncompleteMultipartUpload`` removes it.
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from io import SEEK_END, BytesIO
from typing import Any, BinaryIO, Final

from fsspec.asyn import sync

from storage.errors import Corrupt, NotFound
from storage.parallel import Group
from storage.retry import Attempt, Retrier
from storage.s3_errors import classify_s3

__all__ = ["FIRST_PART_BYTES", "MAX_PENDING_PARTS", "S3Sink", "S3Target", "part_bytes"]

FIRST_PART_BYTES: Final = 16 << 20
"""Size of the first parts of an upload. S3 wants at least 5 MiB for all but the last."""

MAX_PENDING_PARTS: Final = 8
"""Parts in flight; with the one being filled and the one held back they bound the memory of a writer."""


_MARK: Final = "storage-create"


def part_bytes(number: int) -> int:
    """Size of part ``number`` (from 1).

    Doubles every 2,000 parts, so that 10,000 parts, the most S3 takes, hold more than 900 GiB. Equal up to 31 GiB,
    because some servers want that.
    """
    return FIRST_PART_BYTES << (number - 1) // 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Target:
    """Where one object goes, and the requests that store it; each is repeated by itself.

    Attributes:
        filesystem: An ``s3fs.S3FileSystem``.
        bucket: Name of the bucket.
        key: Full key in it.
        retrier: Policy and budget.
    """

    filesystem: Any
    bucket: str
    key: str
    retrier: Retrier

    @property
    def url(self) -> str:
        """Full URL."""
        return f"s3://{self.bucket}/{self.key}"

    def put(self, body: BinaryIO) -> None:
        """Store the whole object by one request."""
        answer = self.retrier.call(partial(self._send, "put_object", body), self.url, classify_s3)
        self.check(answer["ETag"], body.seek(0, SEEK_END))

    def put_if_absent(self, body: BinaryIO, mark: str, this: Attempt) -> str:
        """Store the whole object, marked in its metadata, by one request that fails if there is one; return its tag.

        Not repeated.
        """
        return str(self._send("put_object", body, this, IfNoneMatch="*", Metadata={_MARK: mark})["ETag"])

    def etag_of_marked(self, mark: str, this: Attempt) -> str:
        """The tag of the object if it has this mark, else nothing. Not repeated."""
        try:
            head = self._call("head_object", this)
        except FileNotFoundError:
            return ""
        return str(head["ETag"]) if head["Metadata"].get(_MARK) == mark else ""

    def begin(self) -> str:
        """Begin a multipart upload; return its id."""
        answer = self.retrier.call(partial(self._call, "create_multipart_upload"), self.url, classify_s3)
        return str(answer["UploadId"])

    def put_part(self, upload_id: str, number: int, body: BinaryIO, etags: dict[int, str]) -> None:
        """Upload part ``number`` (from 1) and note its tag in ``etags``."""
        send = partial(self._send, "upload_part", body, UploadId=upload_id, PartNumber=number)
        etags[number] = self.retrier.call(send, self.url, classify_s3)["ETag"]

    def complete(self, upload_id: str, etags: dict[int, str]) -> str:
        """Make the object of parts visible; return its tag."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]

        def attempt(this: Attempt) -> str:
            try:
                answer = self._call(
                    "complete_multipart_upload", this, UploadId=upload_id, MultipartUpload={"Parts": parts}
                )
            except Exception as error:
                # An upload that was completed, and only the answer got lost, is not known any more.
                gone = isinstance(classify_s3(error, self.url), NotFound)
                if not (gone and this.repeated and self._consists_of(this, etags)):
                    raise
                answer = self._call("head_object", this)
            return str(answer["ETag"])

        return self.retrier.call(attempt, self.url, classify_s3)

    def check(self, etag: str, num_bytes: int) -> None:
        """Ask the server whether it has what was sent.

        Args:
            etag: What the server called it.
            num_bytes: How much was sent.

        Raises:
            Corrupt: It has not. An object of another tag was stored by somebody else meanwhile and is none of ours.
        """
        try:
            head = self.retrier.call(partial(self._call, "head_object"), self.url, classify_s3)
        except NotFound as error:
            raise Corrupt(
                self.url, "the server took it and does not have it: lost, or deleted at once"
            ) from error
        if head["ETag"] == etag and head["ContentLength"] != num_bytes:
            raise Corrupt(self.url, f"{num_bytes} bytes were sent, the server has {head['ContentLength']}")

    def abort(self, upload_id: str) -> None:
        """Remove the parts of an upload, if it is still known."""

        def attempt(this: Attempt) -> None:
            try:
                self._call("abort_multipart_upload", this, UploadId=upload_id)
            except Exception as error:
                if not (this.repeated and isinstance(classify_s3(error, self.url), NotFound)):
                    raise

        self.retrier.call(attempt, self.url, classify_s3)

    def _consists_of(self, this: Attempt, etags: dict[int, str]) -> bool:
        """Whether the object is the one made of these parts, by the rule of the tag of such an object.

        Where the server makes its tags by another rule the answer is no, and the error stays.
        """
        try:
            tags = [bytes.fromhex(etags[number].strip('"')) for number in sorted(etags)]
        except ValueError:
            return False
        digest = hashlib.md5(b"".join(tags), usedforsecurity=False).hexdigest()
        return bool(self._call("head_object", this)["ETag"].strip('"') == f"{digest}-{len(tags)}")

    def _call(self, method: str, this: Attempt, **arguments: Any) -> Any:
        return self.filesystem.call_s3(
            method, Bucket=self.bucket, Key=self.key, timeout=this.timeout_s, **arguments
        )

    def _send(self, method: str, body: BinaryIO, this: Attempt, **arguments: Any) -> Any:
        return sync(self.filesystem.loop, self._send_async, method, body, arguments, timeout=this.timeout_s)

    async def _send_async(self, method: str, body: BinaryIO, arguments: dict[str, Any]) -> Any:
        # A body is a file and not bytes, because aiohttp would write bytes in one piece and hold up all other
        # requests. The client is called directly, because s3fs would repeat the call without rewinding the file.
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
        self._held_back = header_bytes > 0
        self._upload_id: str | None = None
        self._etags: dict[int, str] = {}
        self._num_bytes = header_bytes
        self._group = Group(f"s3://{target.bucket}/{target.key}", max_pending=MAX_PENDING_PARTS)

    def append(self, view: memoryview) -> None:
        """Copy into parts; those that are full go up, the one with a header excepted."""
        while view.nbytes:
            if not self._room:
                self._next_part()
            taken = view[: self._room]
            self._filling.write(taken)
            self._room -= taken.nbytes
            self._num_bytes += taken.nbytes
            view = view[taken.nbytes :]

    def commit(self, header: bytes) -> None:
        """Upload what is left, the header's part last; or everything by one request if that is all there is."""
        if self._held_back:  # else it may be on its way
            self._first.seek(0)
            self._first.write(header)
        if self._upload_id is None:
            self._target.put(self._first)
            return
        self._start_part(self._upload_id)
        self._group.finish()
        if self._held_back:
            self._target.put_part(self._upload_id, 1, self._first, self._etags)
        etag = self._target.complete(self._upload_id, self._etags)
        self._upload_id = None
        self._target.check(etag, self._num_bytes)

    def abort(self) -> None:
        """Cancel what is in flight, then abort: a part that arrived later would stay for ever."""
        self._group.cancel()
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None:
            self._target.abort(upload_id)

    def _next_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._target.begin()
        if self._number > 1 or not self._held_back:
            self._start_part(self._upload_id)
        self._number += 1
        self._filling = BytesIO()
        self._room = part_bytes(self._number)

    def _start_part(self, upload_id: str) -> None:
        self._group.start(partial(self._target.put_part, upload_id, self._number, self._filling, self._etags))
