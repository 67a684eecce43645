"""Compressed files: read from the start in order, or by frames where `omniload.sources.rewrite` made that possible."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import zstandard

from omniload.errors import CorruptSource
from omniload.sources.frames import Frames, Packing, find_frames
from omniload.sources.protocol import FileEntry
from storage import Store

_READ_BYTES = 1 << 20
_KEPT_FRAMES = 2
"""Tables of frames kept: of the file being read, and of the one whose payload is derived again."""
_MAX_WINDOW_BYTES = 1 << 31  # what `zstd --long=31` needs


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_DECOMPRESSORS: dict[Packing, Callable[[], _Decompressor]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(),
}


def packing_of(path: str) -> Packing | None:
    """How a file is compressed, by its name; None if it is not."""
    lower = path.lower()
    if lower.endswith((".gz", ".tgz")):
        return "gzip"
    return "zstd" if lower.endswith(".zst") else None


class CompressedFiles:
    """The compressed ones among the files of a source, as blocks of decompressed bytes.

    A block is a frame of a file that was rewritten to hold whole rows in each frame, else the whole file.
    Memory: a block, and the tables of frames of at most two files.

    Args:
        store: holds the files.
        files: the files of the source.
    """

    def __init__(self, store: Store, files: Sequence[FileEntry]) -> None:
        self._store = store
        self._files = files
        self._frames: dict[int, Frames | None] = {}  # least recently used first

    def __contains__(self, file: int) -> bool:
        """Whether a file is compressed."""
        return packing_of(self._files[file].path) is not None

    def num_blocks(self, file: int) -> int:
        """Frames of a rewritten file, else 1; reads the end of the file.

        Raises:
            CorruptSource: the table of the frames is damaged.
        """
        frames = self._frames_of(file)
        return 1 if frames is None else frames.num_frames

    def read_block(self, file: int, block: int) -> tuple[bytes | bytearray, int]:
        """A block, and the offset of its first byte in the decompressed file.

        Raises:
            CorruptSource: the compressed stream ends early or is damaged.
        """
        frames = self._frames_of(file)
        if frames is not None:
            return self._read_frame(file, frames, block), int(frames.content[block])
        data = bytearray()
        for chunk in self.chunks(file):
            data += chunk
        return data, 0

    def head(self, file: int) -> bytes:
        """The first bytes of the decompressed file, about a block of them, empty only if the file is."""
        return next((chunk for chunk in self.chunks(file) if chunk), b"")

    def chunks(self, file: int) -> Iterator[bytes]:
        """The decompressed file, in order.

        Raises:
            CorruptSource: the compressed stream ends early or is damaged.
        """
        yield from decompressed(self._store, self._files[file])

    def _frames_of(self, file: int) -> Frames | None:
        entry = self._files[file]
        packing = packing_of(entry.path)
        assert packing is not None
        frames = self._frames.pop(file) if file in self._frames else find_frames(self._store, entry, packing)
        self._frames[file] = frames
        if len(self._frames) > _KEPT_FRAMES:
            del self._frames[next(iter(self._frames))]
        return frames

    def _read_frame(self, file: int, frames: Frames, frame: int) -> bytes:
        entry = self._files[file]
        start, end = frames.stored[frame : frame + 2].tolist()
        size = int(frames.content[frame + 1] - frames.content[frame])
        stored = self._store.read_ranges([(entry.path, start, end)])[0]
        try:
            return _decompress_frame(stored, size, frames.packing)
        except (zlib.error, zstandard.ZstdError) as error:
            raise CorruptSource(
                f"{entry.url}: damaged at byte {start} ({error}); copy or compress it again"
            ) from error


def decompressed(store: Store, entry: FileEntry) -> Iterator[bytes]:
    """A compressed file decompressed, in order; several streams one after the other are one.

    Raises:
        CorruptSource: the compressed stream ends early or is damaged.
    """
    packing = packing_of(entry.path)
    assert packing is not None
    state: _Decompressor | None = None
    num_ended = num_read = 0
    with store.open(entry.path) as stream:
        try:
            while data := stream.read(_READ_BYTES):
                num_read += len(data)
                while data:
                    if state is None:
                        data = data.lstrip(b"\0") if num_ended else data  # gzip allows zeros to pad the end
                        if not data:
                            break
                        state = _DECOMPRESSORS[packing]()
                    yield state.decompress(data)
                    data = state.unused_data
                    if state.eof:
                        state, num_ended = None, num_ended + 1
        except (zlib.error, zstandard.ZstdError) as error:
            where = f"in the {_READ_BYTES >> 20} MiB before byte {num_read}"
            raise CorruptSource(
                f"{entry.url}: damaged {where} ({error}); copy or compress it again"
            ) from error
    if state is not None or not num_ended:
        raise CorruptSource(
            f"{entry.url}: the compressed stream ends early, at byte {num_read}; copy or compress it again"
        )


def compress_frame(data: bytes, packing: Packing) -> bytes:
    """Compress some bytes as a frame or member of its own, at the default level of the tools."""
    if packing == "zstd":
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    state = zlib.compressobj(wbits=31)
    return state.compress(data) + state.flush()


def _decompress_frame(stored: memoryview, size: int, packing: Packing) -> bytes:
    """Decompress one frame, which must hold exactly ``size`` bytes: what is allocated does not depend on its header."""
    if packing == "zstd":
        if (claimed := zstandard.frame_content_size(stored)) != size:
            raise zstandard.ZstdError(f"a frame of {claimed} bytes where the table says {size}")
        return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(
            stored, allow_extra_data=False
        )
    state = zlib.decompressobj(wbits=31)
    data = state.decompress(stored, size + 1)
    if len(data) != size or not state.eof or state.unused_data:
        raise zlib.error(f"a member of {len(data)} bytes where the table says {size}")
    return data
