"""Digests and pieces. They detect accidents, not attackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES: Final = 4 << 20
"""Stored bytes of a box are digested, read and verified in pieces of this size; the last one may be shorter."""


def digest64(data: Buffer) -> int:
    """xxh3-64 of some bytes as an unsigned integer."""
    return int(xxhash.xxh3_64_intdigest(data))


def digest_hex(data: Buffer) -> str:
    """xxh3-64 of some bytes as 16 lower-case hex digits, most significant first."""
    return f"{digest64(data):016x}"


def num_pieces(num_bytes: int) -> int:
    """Number of pieces that hold ``num_bytes`` stored bytes."""
    return -(-num_bytes // PIECE_BYTES)
