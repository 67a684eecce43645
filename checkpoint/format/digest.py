"""Digests and pieces. They detect accidents, not attackers."""

from __future__ import annotations

from collections.abc import Iterable
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


class Digester:
    """Digests pieces whose bytes follow each other and come in parts of any size.

    Attributes:
        digests: Those of the pieces that have come so far, in order.

    Args:
        sizes: Bytes of each piece.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self.digests: list[int] = []
        self._sizes = iter(sizes)
        self._state = xxhash.xxh3_64()
        self._missing = 0  # bytes of the piece that has begun

    def update(self, data: memoryview) -> None:
        """Take the next bytes; no more than the pieces have."""
        begin, num_bytes = 0, len(data)
        while begin < num_bytes:
            if not self._missing:
                size = next(self._sizes)
                if size <= num_bytes - begin:  # by one call, which for small pieces takes a third of the time
                    self.digests.append(digest64(data[begin : begin + size]))
                    begin += size
                    continue
                self._state.reset()
                self._missing = size
            part = data[begin : begin + self._missing]
            self._state.update(part)
            begin += len(part)
            self._missing -= len(part)
            if not self._missing:
                self.digests.append(self._state.intdigest())
