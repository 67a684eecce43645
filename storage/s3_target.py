"""Where one S3 object goes, and the requests that store it."""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fsspec.asyn import sync

from storage.errors import Corrupt, NotFound
from storage.retry import Attempt, Retrier
from storage.s3_body import Body
from storage.s3_checksums import hash_parts_once
from storage.s3_errors import classify_s3

__all__ = ["S3Target"]

_MARK: Final = "storage-create"


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

    def put(self, body: memoryview) -> None:
        """Store the whole object by one request."""
        answer = self.retrier.call(partial(self._send, "put_object", body), self.url, classify_s3)
        self.check(answer["ETag"], body.nbytes)

    def put_if_absent(self, body: memoryview, mark: str, this: Attempt) -> str:
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

    def put_part(self, upload_id: str, number: int, body: memoryview, etags: dict[int, str]) -> None:
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

    def _send(self, method: str, body: memoryview, this: Attempt, **arguments: Any) -> Any:
        return sync(self.filesystem.loop, self._send_async, method, body, arguments, timeout=this.timeout_s)

    async def _send_async(self, method: str, body: memoryview, arguments: dict[str, Any]) -> Any:
        # The client is called directly, because s3fs would repeat the call with a body that is sent already.
        await self.filesystem.set_session()
        client = await self.filesystem.get_s3(self.bucket)
        hash_parts_once(client)
        method_of_client = getattr(client, method)
        settings = self.filesystem._get_s3_method_kwargs(
            method_of_client, Bucket=self.bucket, Key=self.key, Body=Body(body), **arguments
        )
        return await method_of_client(**settings)
