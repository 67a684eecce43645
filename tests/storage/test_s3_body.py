"""A request's body: the same bytes to whoever hashes them and to whoever sends them, and not a copy."""

import asyncio
import hashlib
from io import SEEK_CUR, SEEK_END

from aiobotocore.httpchecksum import AioAwsChunkedWrapper
from hypothesis import given
from hypothesis import strategies as st

from storage.s3_body import Body, one_view
from tests.storage.conformance import content


def sent(body: Body) -> list[memoryview]:
    async def take() -> list[memoryview]:
        return [chunk async for chunk in body]

    return asyncio.run(take())


@given(data=st.binary(max_size=100), sizes=st.lists(st.integers(1, 40)), offset=st.integers(0, 100))
def test_it_reads_like_a_file(data: bytes, sizes: list[int], offset: int) -> None:
    body = Body(memoryview(data))
    assert len(body) == body.seek(0, SEEK_END) == len(data)
    assert not body.read(1)
    body.seek(min(offset, len(data)))
    begin = body.tell()
    for size in sizes:
        assert body.read(size) == data[begin : begin + size]
        begin = body.tell()
    assert body.seek(0, SEEK_CUR) == begin
    assert body.read() == data[begin:]
    assert not body.read(-1)


def test_all_of_it_is_sent_whatever_was_read_before() -> None:
    data = content((1 << 20) + 1)
    body = Body(memoryview(data))
    assert hashlib.file_digest(_AsFile(body), "sha256").digest() == hashlib.sha256(data).digest()
    chunks = sent(body)
    assert len(chunks) == 5
    assert b"".join(chunks) == data
    assert all(chunk.obj is data for chunk in chunks), "no copies"
    assert sent(body) == [], "for one attempt only"
    assert sent(Body(memoryview(b""))) == []


def test_it_can_be_framed_as_https_wants_it() -> None:
    """What botocore makes of a body that it sends with a checksum behind it."""
    data = content(3 << 20)

    async def framed() -> bytes:
        return await AioAwsChunkedWrapper(Body(memoryview(data)), chunk_size=1 << 20).read()

    frames = b"".join(
        b"100000\r\n%s\r\n" % data[begin : begin + (1 << 20)] for begin in range(0, 3 << 20, 1 << 20)
    )
    assert asyncio.run(framed()) == frames + b"0\r\n\r\n"


def test_only_views_that_must_be_joined_are_copied() -> None:
    view = memoryview(b"12345")[1:3]
    assert one_view([view]) is view
    assert one_view([view, view]) == b"2323"
    assert one_view([]) == b""


class _AsFile:
    """What ``hashlib.file_digest`` asks of a file, by ``read`` alone."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def readable(self) -> bool:
        return True

    def readinto(self, into: bytearray) -> int:
        found = self._body.read(len(into))
        into[: found.nbytes] = found
        return found.nbytes
