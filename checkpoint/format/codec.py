"""Compressed pieces: one zstd frame each, of elements split into byte planes.

Weights are noise in their low bytes and nearly alike in their high ones. Byte planes (all first bytes of the
elements, then all second ones, ...) keep the two apart, so that zstd finds what there is to find and passes over
the rest. A piece holds a bounded number of elements and depends on no other piece: a range is read by reading the
pieces that it lies in.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import zstandard

from checkpoint.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CODEC_NONE: Final = "none"
CODEC_ZSTD: Final = "zstd"

CODECS: Final = (CODEC_NONE, CODEC_ZSTD)
"""Every codec that a stored box may have."""

RAW_PIECE_BYTES: Final = 1 << 20
"""A compressed box is cut into pieces of this size before compression, a whole number of elements of any type; the
last one may be shorter."""

# What looks like a match in weights is mostly chance, and costs more than it saves: with a small table of long matches
# the coder is twice as fast as level 1 and its output a little smaller. Runs of equal bytes are found all the same.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, source_size=RAW_PIECE_BYTES, hash_log=8, min_match=7
)

# A reader may be given frames of other writers, which may ask for a window as large as RFC 8878 recommends to allow.
_MAX_WINDOW_BYTES: Final = 8 << 20


def max_stored_bytes(raw_bytes: int) -> int:
    """Most bytes that a piece of ``raw_bytes`` may take when stored: what cannot be compressed grows a little."""
    return raw_bytes + raw_bytes // 256 + 64


def encode_piece(raw: Buffer, itemsize: int) -> bytes:
    """Compress one piece.

    Args:
        raw: The elements in row-major order, at most :data:`RAW_PIECE_BYTES`.
        itemsize: Size of an element, bytes.

    Returns:
        A zstd frame that declares its content size.
    """
    return _contexts.compressor.compress(
        _split(np.frombuffer(memoryview(raw), dtype=np.uint8), itemsize).data
    )


def decode_piece(stored: Buffer, itemsize: int, out: npt.NDArray[np.uint8], where: str) -> None:
    """Decompress one piece. Allocates no more than the size of ``out``, whatever the frame claims to hold.

    Args:
        stored: A zstd frame whose digest has been checked.
        itemsize: Size of an element, bytes.
        out: Receives the elements in row-major order; contiguous, exactly the bytes of the piece.
        where: File and tensor, for messages.

    Raises:
        FormatError: Not one whole zstd frame of exactly ``len(out)`` bytes.
    """
    try:
        claimed = zstandard.get_frame_parameters(memoryview(stored)).content_size
        if claimed != len(out):
            raise FormatError(
                f"{where}: a compressed piece that claims to hold {claimed} bytes, not {len(out)}"
            )
        planes = _contexts.decompressor.decompress(memoryview(stored), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: a compressed piece is not a zstd frame ({error})") from None
    _join(np.frombuffer(planes, dtype=np.uint8).reshape(itemsize, -1), out)


# Shifts of whole elements are vectorised; a transposing copy of single bytes takes several times as long.
_WORDS: Final = {itemsize: np.dtype(f"<u{itemsize}") for itemsize in (2, 4, 8)}


def _split(raw: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.uint8]:
    """The byte planes of elements, ``[itemsize, num_elements]``."""
    if itemsize not in _WORDS:
        return np.ascontiguousarray(raw.reshape(-1, itemsize).T)
    words = raw.view(_WORDS[itemsize])
    planes = np.empty((itemsize, len(words)), dtype=np.uint8)
    for index, plane in enumerate(planes):
        np.copyto(plane, words >> (8 * index) if index else words, casting="unsafe")  # the lowest byte
    return planes


def _join(planes: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """The reverse of :func:`_split`, into ``out``."""
    itemsize = len(planes)
    if itemsize not in _WORDS:
        np.copyto(out.reshape(-1, itemsize), planes.T)
        return
    words = out.view(_WORDS[itemsize])
    np.copyto(words, planes[-1])
    for plane in planes[-2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)


class _Contexts(threading.local):
    """The zstd contexts of one thread: a megabyte or more each, and not to be shared."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts: Final = _Contexts()
