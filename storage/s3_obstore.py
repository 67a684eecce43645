"""S3 with its bytes moved by obstore, which is written in Rust.

Only bodies go that way. Questions, listings, deletions and ``create`` stay with s3fs, because obstore normalises keys
(it shows the marker ``a/`` of an empty folder as an object ``a``) and takes a conflict that would pass for
``AlreadyExists``. So do objects in several parts: obstore cannot upload the first part last, nor repeat one part
under our policy, and leaves behind the parts of an upload that is cut off.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeVar

import obstore
from fsspec.asyn import sync
from obstore.exceptions import GenericError, PreconditionError
from obstore.store import S3Store

from storage.backend import RangeRead
from storage.buffers import num_bytes_of
from storage.errors import StorageError
from storage.paths import join
from storage.retry import Attempt, Retrier
from storage.s3 import SINGLE_PUT_BYTES, S3Backend
from storage.s3_obstore_client import ObstoreClient
from storage.s3_obstore_errors import classify_obstore, obstore_status

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

__all__ = ["S3ObstoreBackend"]

T = TypeVar("T")

_PARTS_AT_ONCE: Final = 8
"""Parts of one object that are read at a time: a single connection to S3 brings some 50 to 100 MB/s."""

_CHUNK_BYTES: Final = 1 << 20
"""Least of a body that is waited for at a time, when it is written to its place."""


class S3ObstoreBackend(S3Backend):
    """Backend for a prefix of a bucket; see ``S3Backend`` for what is not said here.

    Args:
        filesystem: An ``s3fs.S3FileSystem``.
        root: ``bucket`` or ``bucket/prefix``.
        retrier: Repeats each request.
        client: Of that bucket, if there is one already.

    Raises:
        UnsupportedURL: No bucket.
    """

    def __init__(
        self, filesystem: Any, root: str, retrier: Retrier, client: ObstoreClient | None = None
    ) -> None:
        super().__init__(filesystem, root, retrier)
        self._client = client or ObstoreClient(filesystem, self._bucket)

    def read(self, path: str) -> bytes:
        """In parallel parts if it is long, all of one version of the object."""
        return self._request(path, partial(_get, part_bytes=self.range_bytes))

    def read_range(self, wanted: RangeRead) -> int:
        """One request; the body is copied to the caller's memory."""

        async def get_range(store: S3Store, key: str) -> memoryview:
            try:
                return memoryview(
                    await obstore.get_range_async(store, key, start=wanted.start, end=wanted.end)
                )
            except GenericError as error:
                if obstore_status(error) == 416:  # the range begins after the end of the object
                    return memoryview(b"")
                raise

        data = self._request(wanted.path, get_range)
        wanted.into[: data.nbytes] = data
        return data.nbytes

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """One put if small, else a multipart upload by s3fs."""
        num_bytes = num_bytes_of(views)
        if num_bytes > SINGLE_PUT_BYTES:
            super().write(path, views)
            return

        async def put(store: S3Store, key: str) -> str:
            return (await obstore.put_async(store, key, views, use_multipart=False))["e_tag"] or ""

        self._target(path).check(self._request(path, put), num_bytes)

    def sub(self, path: str) -> "S3ObstoreBackend":
        """Another prefix of the bucket."""
        return S3ObstoreBackend(self._filesystem, join(self._root, path), self._retrier, self._client)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """By S3 error code."""
        return classify_obstore(error, path)

    def _request(self, path: str, request: Callable[[S3Store, str], Coroutine[Any, Any, T]]) -> T:
        """Make a request, repeatedly if need be. On the loop of s3fs, because only there it can be cut off."""

        def attempt(this: Attempt) -> T:
            store = self._client.store(this.timeout_s)
            result: T = sync(self._filesystem.loop, request, store, self._key(path), timeout=this.timeout_s)
            return result

        return self._retrier.call(attempt, f"s3://{join(self._root, path)}", classify_obstore)


async def _get(store: S3Store, key: str, part_bytes: int) -> bytes:
    """A whole object, in parallel parts if it is longer than one."""
    try:
        first = await obstore.get_async(store, key, options={"range": (0, part_bytes)})
    except GenericError as error:
        if obstore_status(error) == 416:  # no byte of an empty object can be asked for
            return await _get_at_once(store, key)
        raise
    num_bytes, etag = first.meta["size"], first.meta["e_tag"]
    if num_bytes <= part_bytes:
        return bytes(await first.bytes_async())
    if etag is None:  # nothing would tell parts of two versions apart
        return await _get_at_once(store, key)
    turns = asyncio.Semaphore(_PARTS_AT_ONCE)
    # Gives its memory away without a copy; ``bytes`` of zeros cost nothing before they are written to.
    file = BytesIO(bytes(num_bytes))
    with file.getbuffer() as memory:

        async def get_part(begin: int) -> None:
            async with turns:
                options: GetOptions = {"range": (begin, begin + part_bytes), "if_match": etag}
                result = await obstore.get_async(store, key, options=options)
                await _fill(memory[begin : begin + part_bytes], result)

        parts = [asyncio.create_task(get_part(begin)) for begin in range(part_bytes, num_bytes, part_bytes)]
        parts.append(asyncio.create_task(_fill(memory[:part_bytes], first)))
        try:
            await asyncio.gather(*parts)
        except PreconditionError as error:
            raise ConnectionError("it was replaced while it was read") from error
        finally:
            for part in parts:
                part.cancel()
    return file.getvalue()


async def _fill(into: memoryview, result: "GetResult") -> None:
    """Write a body into memory as it arrives, and not once more at its end, when all of it is out of the caches."""
    begin = 0
    async for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
        into[begin : begin + len(chunk)] = chunk
        begin += len(chunk)
    if begin < into.nbytes:
        raise ConnectionError(f"{begin} bytes came instead of {into.nbytes}")


async def _get_at_once(store: S3Store, key: str) -> bytes:
    return bytes(await (await obstore.get_async(store, key)).bytes_async())
