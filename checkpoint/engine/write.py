"""Writing one rank's payload files: bytes are digested, and if asked for compressed, on their way to storage."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.engine.files import FileLayout
from checkpoint.engine.memory import Bytes, copy_into, flat_bytes, is_flat
from checkpoint.engine.yielding import Yielding
from checkpoint.format.codec import CODEC_NONE, CODECS, RAW_PIECE_BYTES, encode_piece
from checkpoint.format.digest import PIECE_BYTES, digest64
from checkpoint.format.payload import encode_header
from storage import Store, Writer
from storage.paths import is_local
from storage.spans import span

# Bytes that are digested, compressed and written at once: of one large box, or of several together.
_WRITE_BYTES: Final = 4 << 20
assert _WRITE_BYTES == PIECE_BYTES, "a write of a large box is a piece, unless it is compressed"
assert _WRITE_BYTES % RAW_PIECE_BYTES == 0, "writes are of whole pieces"

_MAX_WRITERS: Final = 4

_RAW: Final = CODECS.index(CODEC_NONE)

_Run: TypeAlias = Callable[[Callable[[], None]], None]
"""Makes a call, on whatever thread, and waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WrittenFile:
    """One payload file after it was written; n entries.

    Attributes:
        layout: What was written.
        num_bytes: Size of the file, header included.
        header_xxh3: xxh3-64 of the header.
        byte_offset: Where the stored bytes of each entry begin in the file; int64 ``[n]``.
        stored_bytes: Stored bytes of each entry; int64 ``[n]``.
        piece_counts: Pieces of each entry; int64 ``[n]``.
        piece_bytes: Stored size of each piece, entry after entry; int64.
        digests: xxh3-64 of each piece, likewise; uint64.
    """

    layout: FileLayout
    num_bytes: int
    header_xxh3: int
    byte_offset: npt.NDArray[np.int64]
    stored_bytes: npt.NDArray[np.int64]
    piece_counts: npt.NDArray[np.int64]
    piece_bytes: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]


class Source(Protocol):
    """Where the raw bytes of a file's boxes come from: staging memory, or the tensors themselves."""

    def read(self, first: int, stop: int) -> list[memoryview]:
        """The bytes of each of the boxes ``first`` to ``stop``; valid until the next call."""
        ...


class Staged:
    """Boxes from the byte image of a file.

    Args:
        layout: The file.
        image: Its image, from ``stage``.
    """

    def __init__(self, layout: FileLayout, image: Bytes) -> None:
        begins, ends = layout.image_offsets.tolist(), (layout.image_offsets + layout.raw_bytes).tolist()
        memory = image.data
        self._boxes = [memory[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def read(self, first: int, stop: int) -> list[memoryview]:
        """See :class:`Source`."""
        return self._boxes[first:stop]


class Live:
    """Boxes straight from the tensors, which must not change meanwhile.

    Args:
        layout: The file.
        views: The tensor memory of each entry.
    """

    def __init__(self, layout: FileLayout, views: Sequence[torch.Tensor]) -> None:
        self._raw_bytes = layout.raw_bytes.tolist()
        self._views = views
        # All at once: code that runs between two writes of megabytes finds none of itself in the cache.
        self._flat = [flat_bytes(view).data if is_flat(view) else None for view in views]
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, first: int, stop: int) -> list[memoryview]:
        """See :class:`Source`."""
        flat = self._flat[first:stop]
        total = sum(size for size, box in zip(self._raw_bytes[first:stop], flat, strict=True) if box is None)
        if total > self._scratch.numel():
            self._scratch = torch.empty(max(total, _WRITE_BYTES), dtype=torch.uint8, device="cpu")
        boxes, begin = [], 0
        for index, box in enumerate(flat, first):
            if box is None:
                # A box of wider elements never follows one of narrower ones, so this is aligned.
                copied = self._scratch[begin : begin + self._raw_bytes[index]]
                copy_into(copied, self._views[index])
                box = flat_bytes(copied).data
                begin += len(box)
            boxes.append(box)
        return boxes


def write_files(
    store: Store,
    layouts: Sequence[FileLayout],
    sources: Sequence[Source],
    *,
    patience_s: float | None = None,
    awaited: threading.Event | None = None,
) -> list[WrittenFile]:
    """Write payload files, each of which appears whole, and durable, or not at all.

    Args:
        store: Directory of the attempt.
        layouts: The files.
        sources: Their bytes.
        patience_s: In the background: write one file after the other, and leave the cores to training for so long
            (local files only: clients of remote storage have threads of their own). None writes several files at once,
            if this process has the cores for it.
        awaited: In the background, ends that when it is set. None if nobody may come to wait.

    Raises:
        StorageError: One could not be written.
    """
    files = list(zip(layouts, sources, strict=True))
    if patience_s is None:
        with ThreadPoolExecutor(_num_writers(store), thread_name_prefix="checkpoint-write") as pool:
            # After an error, what has not begun is cancelled.
            return list(pool.map(partial(_write_file, store, run=_at_once), layouts, sources))
    if not is_local(store.url):
        return [_write_file(store, *file, _at_once) for file in files]
    with Yielding(patience_s, awaited or threading.Event()) as yielding:
        return [_write_file(store, *file, yielding.run) for file in files]


def _at_once(call: Callable[[], None]) -> None:
    call()


def _num_writers(store: Store) -> int:
    """At most as many as this process has cores, which it shares with the other ranks of the machine."""
    if not is_local(store.url):  # waits for the network more than for a core
        return _MAX_WRITERS
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # set by torchrun
    return max(1, min(_MAX_WRITERS, cores // max(1, num_ranks)))


def _write_file(store: Store, layout: FileLayout, source: Source, run: _Run) -> WrittenFile:
    record = _Record()
    with (
        span("checkpoint.write", path=layout.name, num_bytes=layout.image_bytes),
        store.writer(layout.name, header_bytes=layout.header_bytes) as writer,
    ):
        for first, stop in list(_runs(layout)):
            boxes = source.read(first, stop)
            blocks = [boxes] if stop - first > 1 else [[part] for part in _cut(boxes[0], _WRITE_BYTES)]
            for block in blocks:
                run(partial(_write_block, writer, layout, first, block, record))
        piece_counts = -(-layout.raw_bytes // np.where(layout.codecs == _RAW, PIECE_BYTES, RAW_PIECE_BYTES))
        piece_bytes = np.asarray(record.piece_bytes, dtype=np.int64)
        stored_bytes = np.add.reduceat(piece_bytes, np.cumsum(piece_counts) - piece_counts)
        ends = np.cumsum(stored_bytes)
        header = encode_header(layout.entries, ends.tolist(), layout.header_bytes)
        writer.set_header(header)
        assert writer.num_bytes == layout.header_bytes + ends[-1]
    return WrittenFile(
        layout=layout,
        num_bytes=writer.num_bytes,
        header_xxh3=digest64(header),
        byte_offset=layout.header_bytes + ends - stored_bytes,
        stored_bytes=stored_bytes,
        piece_counts=piece_counts,
        piece_bytes=piece_bytes,
        digests=np.asarray(record.digests, dtype=np.uint64),
    )


# Between two writes of megabytes nothing of this is left in the cache, so that every line of it costs.
def _write_block(
    writer: Writer, layout: FileLayout, first: int, block: Sequence[memoryview], record: _Record
) -> None:
    """Write several boxes, the first of which is ``first``, or a part of that box."""
    num_bytes = sum(map(len, block))
    if layout.entries[first].codec == CODEC_NONE:
        # Digested right before it is written, while it is in the cache: another thread would read it from memory again.
        with span("checkpoint.digest", path=layout.name, num_bytes=num_bytes):
            record.add(block)
        writer.write(block)
        return
    with span("checkpoint.compress", path=layout.name, num_bytes=num_bytes):
        frames = [
            encode_piece(piece, entry.dtype.itemsize)
            for entry, box in zip(layout.entries[first : first + len(block)], block, strict=True)
            for piece in _cut(box, RAW_PIECE_BYTES)
        ]
        record.add(frames)
    writer.write(frames)


class _Record:
    """Stored sizes and digests of the pieces of a file, in order."""

    def __init__(self) -> None:
        self.piece_bytes: list[int] = []
        self.digests: list[int] = []

    def add(self, pieces: Sequence[memoryview | bytes]) -> None:
        self.piece_bytes.extend(map(len, pieces))
        self.digests.extend(map(digest64, pieces))


def _cut(data: memoryview, num_bytes: int) -> list[memoryview]:
    return [data[begin : begin + num_bytes] for begin in range(0, len(data), num_bytes)]


def _runs(layout: FileLayout) -> Iterator[tuple[int, int]]:
    """Cut a file into runs of boxes ``first`` to ``stop``, each of one codec: as many as a write takes, or one."""
    first, held = 0, 0
    for index, num_bytes in enumerate(layout.raw_bytes.tolist()):
        same = layout.entries[index].codec == layout.entries[first].codec
        if held and (held + num_bytes > _WRITE_BYTES or not same):
            yield first, index
            first, held = index, 0
        held += num_bytes
    if held:
        yield first, len(layout.entries)
