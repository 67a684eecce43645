"""Whether the decompressed sizes that record batches claim can be true, before memory is asked for by them.

Each compressed buffer begins with its size decompressed, -1 if it is stored as it is. LZ4 packs at most 255 bytes into
one; a frame of Zstandard states its own size.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from omniload.sources.arrow_file import DICTIONARY_BATCH, RECORD_BATCH, header_bounds, parse_message
from omniload.sources.flatbuffer import FlatTable

_BUFFER = np.dtype([("at", "<i8"), ("num_bytes", "<i8")])
_SIZE_BYTES = 8
_AS_IT_IS = -1
_ZSTD = 1
_LZ4_RATIO = 255
_ZSTD_HEADER_BYTES = 18
_UNKNOWN = -1


def check_lengths(stream: memoryview) -> None:
    """Check all messages of a stream.

    Raises:
        ValueError: a buffer claims what it cannot hold, or lies outside its message.
    """
    at = 0
    while at < len(stream):
        header = header_bounds(stream[at : at + 8], at, len(stream))
        if header is None:
            return
        message = parse_message(at, header[1], stream[slice(*header)], len(stream))
        body = stream[message.body : message.end]
        if message.kind == RECORD_BATCH:
            _check(message.content, body)
        elif message.kind == DICTIONARY_BATCH and (content := message.content.table(1)) is not None:
            _check(content, body)
        at = message.end


def _check(batch: FlatTable, body: memoryview) -> None:
    compression = batch.table(3)
    if compression is None:
        return
    is_zstd = compression.number(0, "<b") == _ZSTD
    for at, num_bytes in batch.structs(2, _BUFFER).tolist():
        if not num_bytes:
            continue
        if not (0 <= at <= len(body) and _SIZE_BYTES <= num_bytes <= len(body) - at):
            raise ValueError(f"a buffer of {num_bytes} bytes from byte {at} of {len(body)}")
        (claimed,) = struct.unpack_from("<q", body, at)
        packed = body[at + _SIZE_BYTES : at + num_bytes]
        if claimed != _AS_IT_IS and not _may_be(claimed, packed, is_zstd=is_zstd):
            raise ValueError(f"a buffer that claims {claimed} bytes, packed in {len(packed)}")


def _may_be(claimed: int, packed: memoryview, *, is_zstd: bool) -> bool:
    if not is_zstd:
        return 0 <= claimed <= _LZ4_RATIO * len(packed)
    try:
        stated = zstandard.frame_content_size(packed[:_ZSTD_HEADER_BYTES])
    except zstandard.ZstdError:
        return False
    return claimed == stated or (claimed >= 0 and stated == _UNKNOWN)
