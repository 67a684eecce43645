"""Whole compressed MDS shards: checked by the digests that the index has, and unpacked to the size it states."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import xxhash

from omniload.errors import CorruptSource
from omniload.sources.mds_index import Shard

_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}


def unpack(data: memoryview, shard: Shard, url: str) -> np.ndarray:
    """Decompress a shard; no more memory is taken than the index says.

    Args:
        data: the stored file.
        shard: what the index says of it.
        url: where it is, for messages.

    Returns:
        ``uint8[shard.raw_data.bytes]``.

    Raises:
        CorruptSource: a digest or the size differ, the stream is damaged, or of an unknown kind.
    """
    for name, expected in shard.stored.hashes.items():
        actual = _digest(name, data)
        if actual not in (None, expected):
            raise CorruptSource(f"{url}: its {name} is {actual}, not {expected}; copy it again")
    try:
        found = _decompress(data, shard)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise CorruptSource(
            f"{url}: cannot be decompressed by {shard.compression} ({reason}); copy or write it again"
        ) from error
    if len(found) != shard.raw_data.bytes:
        raise CorruptSource(
            f"{url}: decompresses to {'more' if len(found) > shard.raw_data.bytes else 'fewer'} than the"
            f" {shard.raw_data.bytes} bytes that the index says; copy or write it again"
        )
    return np.frombuffer(found, dtype=np.uint8)


def _decompress(data: memoryview, shard: Shard) -> pa.Buffer:
    algorithm = str(shard.compression).partition(":")[0]
    wanted = shard.raw_data.bytes
    if algorithm == "snappy":  # cannot be streamed, and of too large a buffer Arrow leaves the rest as it was
        if _snappy_size(data) != wanted:
            raise pa.ArrowInvalid(f"it begins with another size than the index's, {wanted}")
        return pa.decompress(data, decompressed_size=wanted, codec="snappy")
    if algorithm not in _CODECS:
        raise pa.ArrowInvalid("an unknown algorithm")
    with pa.CompressedInputStream(pa.BufferReader(data), _CODECS[algorithm]) as stream:
        return stream.read_buffer(wanted + 1)


def _snappy_size(data: memoryview) -> int:
    """The size that a snappy block begins with: groups of seven bits, lowest first, all but the last marked."""
    size = 0
    for i, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    return size


def _digest(algorithm: str, data: memoryview) -> str | None:
    """Hex digest, or None if the algorithm is not known here."""
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if algorithm in xxhash.algorithms_available:
        return str(getattr(xxhash, f"{algorithm}_hexdigest")(data))
    return None
