"""Many messages as one, equal ones once."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

_HEAD: Final = struct.Struct("<II")


def pack(messages: Sequence[bytes]) -> bytes:
    """Join messages; each that is equal to another takes four bytes."""
    numbers: dict[bytes, int] = {}
    index = [numbers.setdefault(message, len(numbers)) for message in messages]
    sizes = [len(message) for message in numbers]
    head = _HEAD.pack(len(index), len(sizes))
    return b"".join(
        [head, np.asarray(index, dtype="<u4").tobytes(), np.asarray(sizes, dtype="<u8").tobytes(), *numbers]
    )


def unpack(data: bytes) -> list[bytes]:
    """What :func:`pack` joined; equal messages are one object."""
    num_messages, num_distinct = _HEAD.unpack_from(data)
    index = np.frombuffer(data, dtype="<u4", count=num_messages, offset=_HEAD.size)
    sizes = np.frombuffer(data, dtype="<u8", count=num_distinct, offset=_HEAD.size + index.nbytes)
    ends = (_HEAD.size + index.nbytes + sizes.nbytes + np.cumsum(sizes)).tolist()
    distinct = [data[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    return [distinct[number] for number in index.tolist()]


def unpack_all(packed: Iterable[bytes]) -> list[bytes]:
    """What several calls of :func:`pack` joined, in order."""
    return [message for one in packed for message in unpack(one)]
