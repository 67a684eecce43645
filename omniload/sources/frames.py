r"""Where the frames of a compressed file are: a table at its end, which tools that do not know it read over.

What a rewritten file holds:

- frames (zstd) or members (gzip), each of whole rows, one after the other from byte 0, no stored size over 4 GiB and no
  content over 1 GiB;
- the table: for each frame ``<II``, its stored and its decompressed size;
- the mark: ``b"omniload"`` and the XXH3-64 of the table, little-endian.

Written for zstd as a skippable frame that holds the mark, then a skippable frame that holds the table and the footer of
the `seekable format <https://github.com/facebook/zstd/blob/dev/contrib/seekable_format>`_, whose readers can use it.
Written for gzip as empty members: the table in extra fields ``OM`` (RFC 1952, 2.3.1.1) of at most 64,000 bytes, then
the number of frames (``<I``) and the mark in a last one. A file without a mark has no table for us, also if it is of
the seekable format: only the mark says that no row straddles two frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import xxhash

from omniload.errors import CorruptSource
from omniload.sources.protocol import FileEntry
from storage import Store

Packing: TypeAlias = Literal["gzip", "zstd"]

MAX_CONTENT_BYTES = 1 << 30
"""Most bytes that a frame may hold."""

_NAME = b"omniload"
_MARK = struct.Struct("<8sQ")

_SKIPPABLE = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A50
_TABLE_MAGIC = 0x184D2A5E
_FOOTER = struct.Struct("<IBI")
_FOOTER_MAGIC = 0x8F92EAB1

_MEMBER_START = bytes.fromhex("1f8b08040000000000ff")  # deflate, extra field, no time, no system
_MEMBER_END = b"\x03\x00" + bytes(8)  # nothing, deflated; its checksum and its size
_EXTRA = struct.Struct("<H2sH")
_MEMBER_BYTES = len(_MEMBER_START) + _EXTRA.size + len(_MEMBER_END)
_PIECE_BYTES = 64_000
_LOCATOR = struct.Struct("<I8sQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """The frames of one file."""

    packing: Packing
    """How they are compressed."""
    stored: np.ndarray
    """``int64[n + 1]``: first byte of each in the file, and the end of the last."""
    content: np.ndarray
    """``int64[n + 1]``: first byte of each in the decompressed file, and the end of the last."""

    @property
    def num_frames(self) -> int:
        """How many there are."""
        return len(self.stored) - 1


def find_frames(store: Store, entry: FileEntry, packing: Packing) -> Frames | None:
    """Read the table of a file.

    Returns:
        Its frames; None if it has no table.

    Raises:
        CorruptSource: it has one that is damaged.
    """
    file = _End(store, entry)
    found = (_zstd_table if packing == "zstd" else _gzip_table)(file)
    if found is None:
        return None
    table, digest, end = found
    sizes = np.frombuffer(table, dtype="<u4").reshape(-1, 2).astype(np.int64)
    stored = np.concatenate([[0], np.cumsum(sizes[:, 0])])
    content = np.concatenate([[0], np.cumsum(sizes[:, 1])])
    if xxhash.xxh3_64_intdigest(table) != digest or stored[-1] != end:
        raise CorruptSource(
            f"{entry.url}: the table of its frames, at byte {end}, is damaged; copy or compress it again"
        )
    return Frames(packing=packing, stored=stored, content=content)


def encode_frames(sizes: Sequence[tuple[int, int]], packing: Packing) -> bytes:
    """What follows the frames in a file, given the stored and the decompressed size of each."""
    table = np.array(sizes, dtype="<u4").reshape(-1, 2).tobytes()
    digest = xxhash.xxh3_64_intdigest(table)
    if packing == "zstd":
        footer = _FOOTER.pack(len(sizes), 0, _FOOTER_MAGIC)
        mark = _MARK.pack(_NAME, digest)
        return b"".join(
            _SKIPPABLE.pack(magic, len(data)) + data
            for magic, data in ((_SKIPPABLE_MAGIC, mark), (_TABLE_MAGIC, table + footer))
        )
    pieces = [table[at : at + _PIECE_BYTES] for at in range(0, len(table), _PIECE_BYTES)]
    return b"".join(_member(piece) for piece in [*pieces, _LOCATOR.pack(len(sizes), _NAME, digest)])


class _End:
    """A file read from its end."""

    def __init__(self, store: Store, entry: FileEntry) -> None:
        self._store = store
        self._path = entry.path
        self.left = entry.size
        """Bytes before what was taken so far."""

    def take(self, num_bytes: int) -> bytes:
        """The bytes before those taken so far; none if there are not as many."""
        if num_bytes > self.left:
            return b""
        self.left -= num_bytes
        ranges = [(self._path, self.left, self.left + num_bytes)]
        return bytes(self._store.read_ranges(ranges)[0])


def _zstd_table(file: _End) -> tuple[bytes, int, int] | None:
    """Table, its digest as the mark says, and where the frames end."""
    footer = file.take(_FOOTER.size)
    num_frames, descriptor, magic = _FOOTER.unpack(footer) if footer else (0, 0, 0)
    if magic != _FOOTER_MAGIC or descriptor:
        return None
    before = file.take(_SKIPPABLE.size * 2 + _MARK.size + num_frames * 8)
    mark_start = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, _MARK.size) + _NAME
    if not before.startswith(mark_start):
        return None
    _, digest = _MARK.unpack_from(before, _SKIPPABLE.size)
    return before[_SKIPPABLE.size * 2 + _MARK.size :], digest, file.left


def _gzip_table(file: _End) -> tuple[bytes, int, int] | None:
    """As `_zstd_table`."""
    locator = _data_of_member(file.take(_MEMBER_BYTES + _LOCATOR.size))
    num_frames, name, digest = _LOCATOR.unpack(locator) if locator else (0, b"", 0)
    if name != _NAME:
        return None
    num_bytes = num_frames * 8
    members = file.take(num_bytes + -(-num_bytes // _PIECE_BYTES) * _MEMBER_BYTES)
    step = _PIECE_BYTES + _MEMBER_BYTES
    pieces = [_data_of_member(members[at : at + step]) for at in range(0, len(members), step)]
    return b"".join(pieces), digest, file.left


def _member(data: bytes) -> bytes:
    return _MEMBER_START + _EXTRA.pack(len(data) + 4, b"OM", len(data)) + data + _MEMBER_END


def _data_of_member(member: bytes) -> bytes:
    """What an empty member carries; empty if it is not such a member."""
    data = member[len(_MEMBER_START) + _EXTRA.size : -len(_MEMBER_END)]
    return data if member == _member(data) else b""
