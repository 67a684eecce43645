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

from storage.local_file import pwrite_all

__all__ = [
    "PAGE_BYTES",
    "Block",
    "BlockPart",
    "Version",
    "data_start",
    "file_bytes",
    "parts_of",
    "read_digests",
    "write_block",
]

_FORMAT: Final = 1
_IDENTITY_BYTES: Final = 16
_DIGEST_BYTES: Final = 8
_ALIGN_BYTES: Final = 4096

PAGE_BYTES: Final = 64 << 10
"""What one digest is of."""


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
        name: The same as hex digits: of its file.
        start: Offset in the object.
        num_bytes: Length; only the last block of an object is shorter than the others.
    """

    url: str
    identity: bytes
    name: str
    start: int
    num_bytes: int


@dataclass(kw_only=True, slots=True)  # frozen, it would take as long to make as to read a few KiB
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
        block = _block(version.url, version.etag, version.size, block_bytes, index)
        length = min(block.num_bytes - begin, into.nbytes - done)
        yield BlockPart(block=block, begin=begin, into=into[done : done + length])
        done += length


def file_bytes(block: Block) -> int:
    """Size of the file of a block."""
    return data_start(block) + block.num_bytes


def data_start(block: Block) -> int:
    """Offset of the data in the file of a block."""
    return -(-_table_bytes(block) // _ALIGN_BYTES) * _ALIGN_BYTES


def write_block(fd: int, block: Block, data: memoryview) -> None:
    """Fill a new file.

    Raises:
        OSError: As ``pwritev`` does; the file is then worth nothing.
    """
    assert data.nbytes == block.num_bytes
    digests = [
        xxhash.xxh3_64_digest(data[first : first + PAGE_BYTES]) for first in range(0, data.nbytes, PAGE_BYTES)
    ]
    header = (block.identity + b"".join(digests)).ljust(data_start(block), b"\0")
    pwrite_all(fd, [memoryview(header), data], 0)


def read_digests(fd: int, block: Block) -> list[bytes] | None:
    """The digests of all pages, or None if the file is not one of this block.

    Raises:
        OSError: As ``pread`` does.
    """
    table = os.pread(fd, _table_bytes(block), 0)
    if len(table) != _table_bytes(block) or table[:_IDENTITY_BYTES] != block.identity:
        return None
    return [table[at : at + _DIGEST_BYTES] for at in range(_IDENTITY_BYTES, len(table), _DIGEST_BYTES)]


@lru_cache(maxsize=4096)
def _block(url: str, etag: str, size: int, block_bytes: int, index: int) -> Block:
    key = f"{_FORMAT}\0{url}\0{etag}\0{size}\0{block_bytes}\0{index}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_IDENTITY_BYTES)
    start = index * block_bytes
    return Block(
        url=url,
        identity=digest.digest(),
        name=digest.hexdigest(),
        start=start,
        num_bytes=min(block_bytes, size - start),
    )


def _table_bytes(block: Block) -> int:
    return _IDENTITY_BYTES + _DIGEST_BYTES * -(-block.num_bytes // PAGE_BYTES)
