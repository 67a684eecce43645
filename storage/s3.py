"""S3 and everything that speaks its protocol, through s3fs.

s3fs brings the connections, credentials and endpoints. The calls themselves are made here and not by its file
methods: those cache listings, read large objects by several unpinned requests, and cannot upload the first part of an
object last. Each request is repeated by itself, so that a listing or an upload does not begin anew, and is cut off at
its time-out: fsspec cancels the coroutine then, so a late answer touches nobody's memory.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from storage.backend import FileStat, RangeRead, give_up
from storage.buffers import num_bytes_of
from storage.errors import StorageError, UnsupportedURL
from storage.paths import join
from storage.range_file import open_ranges
from storage.retry import Attempt, Retrier
from storage.retrying import create_once
from storage.s3_body import one_view
from storage.s3_errors import classify_s3, http_status
from storage.s3_target import S3Target
from storage.s3_upload import S3Sink

__all__ = ["S3Backend"]

T = TypeVar("T")

SINGLE_PUT_BYTES: Final = 32 << 20
"""Objects up to this size are stored by one request; longer ones in parallel parts."""

_MAX_KEYS_PER_DELETE: Final = 1000  # limit of DeleteObjects


class S3Backend:
    """Backend for a prefix of a bucket.

    Args:
        filesystem: An ``s3fs.S3FileSystem``.
        root: ``bucket`` or ``bucket/prefix``.
        retrier: Repeats each request.

    Raises:
        UnsupportedURL: No bucket.
    """

    range_bytes = 8 << 20
    ranges_per_call = 1

    def __init__(self, filesystem: Any, root: str, retrier: Retrier) -> None:
        self._filesystem = filesystem
        self._root = root
        self._retrier = retrier
        self._bucket, _, self._prefix = root.partition("/")
        if not self._bucket:
            raise UnsupportedURL("s3:// names no bucket: write s3://bucket/prefix")

    def read(self, path: str) -> bytes:
        """One request, so that the bytes are of one version of the object."""
        return self._repeat(
            path,
            lambda this: bytes(
                self._filesystem.cat_file(join(self._root, path), max_concurrency=1, timeout=this.timeout_s)
            ),
        )

    def read_range(self, wanted: RangeRead) -> int:
        """One request; the body is copied to the caller's memory."""
        full = join(self._root, wanted.path)

        def fetch(this: Attempt) -> bytes:
            try:
                return bytes(
                    self._filesystem.cat_file(
                        full, start=wanted.start, end=wanted.end, timeout=this.timeout_s
                    )
                )
            except OSError as error:
                if http_status(error) == 416:  # the range begins after the end of the object
                    return b""
                raise

        data = self._repeat(wanted.path, fetch)
        wanted.into[: len(data)] = data
        return len(data)

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """One put if small, else a multipart upload."""
        if num_bytes_of(views) <= SINGLE_PUT_BYTES:
            self._target(path).put(one_view(views))
            return
        sink = self.sink(path, 0)
        try:
            sink.store(views)
        except BaseException as error:
            give_up(sink, error)
            raise

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """One put with ``If-None-Match: *``; at most 5 GiB, the limit of the protocol.

        A mark in the metadata tells our own object from another's, whoever repeated the request: aiohttp does so too,
        once, when a connection breaks.
        """
        target, body, mark = self._target(path), one_view(views), uuid.uuid4().hex
        etag = ""

        def attempt(this: Attempt) -> None:
            nonlocal etag
            etag = target.put_if_absent(body, mark, this)

        def is_ours(this: Attempt) -> bool:
            nonlocal etag
            etag = target.etag_of_marked(mark, this)
            return bool(etag)

        create_once(self._retrier, attempt, is_ours, target.url, classify_s3)
        target.check(etag, num_bytes_of(views))

    def sink(self, path: str, header_bytes: int) -> S3Sink:
        """Multipart upload whose first part goes last."""
        return S3Sink(self._target(path), header_bytes)

    def open(self, path: str) -> BinaryIO:
        """A file that reads ranges."""
        return open_ranges(self, path, f"s3://{join(self._root, path)}")

    def list_objects(self, prefix: str) -> list[FileStat]:
        """All pages of a listing without delimiter."""
        below = self._below(prefix)
        return [
            FileStat(
                path=join(prefix, one["Key"].removeprefix(below)),
                size=one["Size"],
                etag=one["ETag"].strip('"') if "ETag" in one else None,
            )
            for page in self._pages(prefix)
            for one in page.get("Contents", [])
            if not one["Key"].endswith("/")  # markers that consoles make for empty folders
        ]

    def list_dirs(self, prefix: str) -> list[str]:
        """Common prefixes of a listing with delimiter."""
        below = self._below(prefix)
        return [
            one["Prefix"].removeprefix(below).rstrip("/")
            for page in self._pages(prefix, Delimiter="/")
            for one in page.get("CommonPrefixes", [])
        ]

    def stat(self, path: str) -> FileStat:
        """One HEAD request."""
        head = self._call("head_object", path, Key=self._key(path))
        return FileStat(path=path, size=head["ContentLength"], etag=head["ETag"].strip('"'))

    def delete(self, path: str) -> None:
        """One request; S3 does not tell whether there was one."""
        self._call("delete_object", path, Key=self._key(path))

    def delete_tree(self, prefix: str) -> None:
        """Batches of 1000 keys."""
        keys = [one["Key"] for page in self._pages(prefix) for one in page.get("Contents", [])]
        for first in range(0, len(keys), _MAX_KEYS_PER_DELETE):
            batch = [{"Key": key} for key in keys[first : first + _MAX_KEYS_PER_DELETE]]
            answer = self._call("delete_objects", prefix, Delete={"Objects": batch, "Quiet": True})
            for failed in answer.get("Errors", []):
                raise OSError(f"{failed['Key']} was not deleted: {failed['Message']} ({failed['Code']})")

    def sub(self, path: str) -> "S3Backend":
        """Another prefix of the bucket."""
        return S3Backend(self._filesystem, join(self._root, path), self._retrier)

    def local_path(self, path: str) -> Path | None:
        """None."""
        return None

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """By S3 error code."""
        return classify_s3(error, path)

    def _key(self, path: str) -> str:
        return join(self._prefix, path)

    def _below(self, prefix: str) -> str:
        key = self._key(prefix)
        return f"{key}/" if key else ""

    def _target(self, path: str) -> S3Target:
        return S3Target(
            filesystem=self._filesystem, bucket=self._bucket, key=self._key(path), retrier=self._retrier
        )

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._repeat(
            path,
            lambda this: self._filesystem.call_s3(
                method, Bucket=self._bucket, timeout=this.timeout_s, **arguments
            ),
        )

    def _repeat(self, path: str, attempt: Callable[[Attempt], T]) -> T:
        return self._retrier.call(attempt, f"s3://{join(self._root, path)}", self.classify)

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[Any]:
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", prefix, Prefix=self._below(prefix), **arguments, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}
