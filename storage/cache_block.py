"""One block of a remote object as a file of the cache.

File format, version 1::

    identity      16 bytes   BLAKE2b of format version, URL, tag, size, block size and number
    digests       8 bytes for each page of 64 KiB of the data (the last may be shorter): its XXH3-64, big-endian
    padding       zeros to a multiple of 4 KiB, so that the data lie on pages of the system
    data          the bytes of the block

A reader knows the lengths from the identity's ingredients, and MUST take nothing from a file whose identity or digest
of a page it needs differs. So a file that a power cut left torn or zeroed, or a disk changed, is never served,
and none of it has to be synced. Pages have digests of their own so that a short read verifies a page and not a block.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

__all__ = ["Block", "BlockPart", "Version", "file_bytes", "parts_of", "read_block", "write_block"]

_FORMAT: Final = 1
_IDENTITY_BYTES: Final = 16
_DIGEST_BYTES: Final = 8
_PAGE_BYTES: Final = 64 << 10
_ALIGN_BYTES: Final = 4096

_RUN_BYTES: Final = 4 * _PAGE_BYTES
"""Read by one call and then hashed: many enough to make calls rare, few enough to be in the processor's cache still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What an object holds at one time.

    Attributes:
        url: Full URL.
        etag: The server's tag of the content: equal tags of one URL mean equal bytes.
        size: Bytes.
    """

    url: str
    etag: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of bytes of one version of an object, the unit that is fetched, kept and evicted.

    Attributes:
        url: Of the object, for spans.
        identity: 16 bytes that differ for any two blocks.
        start: Offset in the object.
        num_bytes: Length; only the last block of an object is shorter than the others.
    """

    url: str
    identity: bytes
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPart:
    """The bytes ``begin .. begin + into.nbytes`` of a block, wanted in ``into``."""

    block: Block
    begin: int
    into: memoryview

    @property
    def is_whole(self) -> bool:
        """Whether all of the block is wanted."""
        return self.into.nbytes == self.block.num_bytes


def parts_of(version: Version, block_bytes: int, start: int, into: memoryview) -> Iterator[BlockPart]:
    """Cut the range ``start .. start + into.nbytes``, empty or inside the object, at the borders of blocks."""
    assert not into.nbytes or start + into.nbytes <= version.size
    done = 0
    while done < into.nbytes:
        index, begin = divmod(start + done, block_bytes)
        block = _block(version, block_bytes, index)
        length = min(block.num_bytes - begin, into.nbytes - done)
        yield BlockPart(block=block, begin=begin, into=into[done : done + length])
        done += length


def file_bytes(block: Block) -> int:
    """Size of the file of a block."""
    return _header_bytes(block) + block.num_bytes


def write_block(fd: int, block: Block, data: memoryview) -> None:
    """Fill a new file.

    Raises:
        OSError: As ``pwritev`` does; the file is then worth nothing.
    """
    assert data.nbytes == block.num_bytes
    digests = [
        xxhash.xxh3_64_digest(data[first : first + _PAGE_BYTES])
        for first in range(0, data.nbytes, _PAGE_BYTES)
    ]
    header = (block.identity + b"".join(digests)).ljust(_header_bytes(block), b"\0")
    pending = [memoryview(header), data]
    offset = 0
    while pending:
        num_written = os.pwritev(fd, pending, offset)
        offset += num_written
        while pending and num_written >= pending[0].nbytes:
            num_written -= pending.pop(0).nbytes
        if num_written:
            pending[0] = pending[0][num_written:]


def read_block(fd: int, part: BlockPart) -> bool:
    """Read and verify a part of a block.

    Returns:
        Whether the file is of that block and sound as far as it was read. If not, ``part.into`` is undefined.

    Raises:
        OSError: As ``preadv`` does.
    """
    digests = _read_digests(fd, part.block)
    if digests is None:
        return False
    data_start = _header_bytes(part.block)
    end = part.begin + part.into.nbytes
    for start, stop in _runs(part.begin, end, part.block.num_bytes):
        wanted = part.into[max(start, part.begin) - part.begin : min(stop, end) - part.begin]
        is_whole = wanted.nbytes == stop - start
        view = wanted if is_whole else memoryview(bytearray(stop - start))
        if os.preadv(fd, [view], data_start + start) != view.nbytes:
            return False
        for page_start in range(start, stop, _PAGE_BYTES):
            digest = xxhash.xxh3_64_digest(view[page_start - start : page_start - start + _PAGE_BYTES])
            at = page_start // _PAGE_BYTES * _DIGEST_BYTES
            if digest != digests[at : at + _DIGEST_BYTES]:
                return False
        if not is_whole:
            begin = max(start, part.begin) - start
            wanted[:] = view[begin : begin + wanted.nbytes]
    return True


def _runs(begin: int, end: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a block into runs of pages that are wanted whole, and single pages of which a part is wanted."""
    whole_end = end if end == num_bytes else end - end % _PAGE_BYTES
    at = begin
    while at < end:
        start = at - at % _PAGE_BYTES
        stop = min(start + _PAGE_BYTES, num_bytes)
        if start == at < whole_end:
            stop = min(start + _RUN_BYTES, whole_end)
        yield start, stop
        at = stop


@lru_cache(maxsize=4096)
def _block(version: Version, block_bytes: int, index: int) -> Block:
    key = f"{_FORMAT}\0{version.url}\0{version.etag}\0{version.size}\0{block_bytes}\0{index}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_IDENTITY_BYTES)
    start = index * block_bytes
    return Block(
        url=version.url,
        identity=digest.digest(),
        start=start,
        num_bytes=min(block_bytes, version.size - start),
    )


def _table_bytes(block: Block) -> int:
    return _IDENTITY_BYTES + _DIGEST_BYTES * -(-block.num_bytes // _PAGE_BYTES)


def _header_bytes(block: Block) -> int:
    return -(-_table_bytes(block) // _ALIGN_BYTES) * _ALIGN_BYTES


def _read_digests(fd: int, block: Block) -> bytes | None:
    """The digests of all pages, or None if the file is not one of this block."""
    table = os.pread(fd, _table_bytes(block), 0)
    if len(table) != _table_bytes(block) or table[:_IDENTITY_BYTES] != block.identity:
        return None
    return table[_IDENTITY_BYTES:]
