"""Reading the overlap of wanted boxes and stored boxes, in whole verified pieces.

A piece whose bytes are wanted in one place and in the same order is read straight into it. Others are read into
scratch memory, from where the parts that are wanted are copied. Pieces that follow each other are read together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.engine.memory import Bytes
from checkpoint.engine.overlap import Ints
from checkpoint.engine.views import Cut, Views, Wanted
from checkpoint.format.codec import decode_piece
from checkpoint.stored import StoredCheckpoint
from storage.spans import span

__all__ = ["PieceReader", "ReadStats", "Wanted", "read_boxes"]

_CHUNK_BYTES: Final = 16 << 20
_BATCH_BYTES: Final = 64 << 20
_NUM_BATCHES: Final = 3  # at work at once: reading, verifying and copying overlap; bounds scratch memory

# Shorter stretches that follow each other in a file are read together, and then copied.
_JOIN_BELOW: Final = 1 << 20
_JOIN_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStats:
    """What reading took, in bytes.

    Attributes:
        num_bytes_read: Bytes read from payload files, headers not counted.
        num_bytes_received: Bytes that other ranks read and handed on.
        num_bytes_wanted: Stored bytes that were asked for, each counted once.
    """

    num_bytes_read: int
    num_bytes_received: int
    num_bytes_wanted: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Range:
    """A range of a file to be read.

    Attributes:
        file_id: Which file.
        begin: First byte.
        end: One past the last byte.
        pieces: The whole pieces that it consists of, in order; empty if it is not verified.
        memory: Where the bytes are wanted as they are; None: in scratch memory.
        moves: From scratch memory: bytes from, to, and where they are wanted.
        cuts: From scratch memory: bytes from, to, and the elements that they are, of which parts are wanted.
    """

    file_id: int
    begin: int
    end: int
    pieces: Sequence[int]
    memory: Bytes | None = None
    moves: Sequence[tuple[int, int, Bytes]] = ()
    cuts: Sequence[tuple[int, int, Cut]] = ()


@dataclass(kw_only=True, slots=True, eq=False)
class _Batch:
    ranges: list[_Range] = field(default_factory=list)
    num_bytes: int = 0


def read_boxes(checkpoint: StoredCheckpoint, wanted: Sequence[Wanted], *, verify: bool) -> ReadStats:
    """Fill boxes from a checkpoint.

    Args:
        checkpoint: Where from; its tilings have been checked.
        wanted: What; views must not overlap each other.
        verify: Read whole pieces and check their digests. Otherwise read only the bytes that are wanted (gaps up to
            64 KiB, and compressed pieces, excepted).

    Raises:
        CorruptCheckpoint: A piece or header does not match its digest, or a file is too short; names file and
            tensor. The content of the views is then undefined.
        StorageError: Reading failed.
    """
    views = Views(checkpoint.tables, wanted)
    reader = PieceReader(checkpoint, views, verify=verify)
    reader.read_alone(np.zeros(0, dtype=np.int64))
    return ReadStats(
        num_bytes_read=reader.num_bytes_read,
        num_bytes_received=0,
        num_bytes_wanted=views.num_bytes_wanted(),
    )


class PieceReader:
    """Reads pieces of one checkpoint into views; several threads may use it at once.

    Attributes:
        num_bytes_read: Bytes read from payload files so far, headers not counted.

    Args:
        checkpoint: Where from; its tilings have been checked.
        views: Where to.
        verify: Check digests.
    """

    def __init__(self, checkpoint: StoredCheckpoint, views: Views, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._views = views
        self._verify = verify
        self._lock = threading.Lock()
        self.num_bytes_read = 0

    def read_alone(self, others: Ints) -> None:
        """Fill what the views want of all pieces but some.

        Args:
            others: Pieces that somebody takes care of, ascending.

        Raises:
            CorruptCheckpoint: A piece or header does not match its digest, or a file is too short.
            StorageError: Reading failed.
        """
        direct, scattered = self._views.split(others)
        ranges = [*self._direct_ranges(*direct), *self._scattered_ranges(scattered)]
        self.check_headers(np.concatenate([direct[0], scattered]))
        with ThreadPoolExecutor(_NUM_BATCHES, thread_name_prefix="checkpoint-read") as pool:
            running: set[Future[None]] = set()
            for batch in _batches(ranges):
                if len(running) >= _NUM_BATCHES:
                    done, running = wait(running, return_when="FIRST_COMPLETED")
                    for one in done:
                        one.result()
                running.add(pool.submit(self._do_batch, batch))
            for one in wait(running, return_when=FIRST_EXCEPTION).done:
                one.result()

    def read_raw(self, runs: Sequence[tuple[int, int, int]], into: Sequence[Bytes | None]) -> list[Bytes]:
        """Read runs of whole pieces, each as the elements they hold.

        Args:
            runs: Stored box, first piece, and one past the last piece.
            into: Memory of each run's elements; None: fresh memory.

        Raises:
            CorruptCheckpoint, FormatError: A piece does not match its digest or cannot be decompressed.
            StorageError: Reading failed.
        """
        boxes = self._checkpoint.tables.boxes
        found, stored, ranges = [], [], []
        for (row, first, end), memory in zip(runs, into, strict=True):
            raw = _memory(boxes.raw_bytes_of(row, first, end)) if memory is None else memory
            num_bytes = int(boxes.piece_bytes[first:end].sum())
            found.append(raw)
            stored.append(_memory(num_bytes) if boxes.compressed[row] else raw)
            begin = int(boxes.piece_offset[first])
            path = self._checkpoint.tables.files[int(boxes.file_id[row])].path
            ranges.append((path, begin, begin + num_bytes))
        self._read(ranges, stored)
        for (row, first, end), raw, one in zip(runs, found, stored, strict=True):
            if self._verify:
                self._checkpoint.check_pieces(range(first, end), one.data)
            if one is not raw:
                self._decode(row, first, end, one, raw)
        return found

    def check_headers(self, pieces: Ints) -> None:
        """If digests are checked, check the header of every file whose first piece is among some.

        Of all ranks that read from a file only one then reads its header.
        """
        if not self._verify:
            return
        tables = self._checkpoint.tables
        row = np.searchsorted(tables.boxes.piece_first, pieces, side="right") - 1
        data_begin = np.asarray([file.header_bytes for file in tables.files], dtype=np.int64)
        file_id = tables.boxes.file_id[row]
        ids = file_id[tables.boxes.piece_offset[pieces] == data_begin[file_id]].tolist()
        files = [tables.files[file_id] for file_id in ids]
        headers = self._checkpoint.data.read_ranges([(file.path, 0, file.header_bytes) for file in files])
        for one, header in zip(ids, headers, strict=True):
            self._checkpoint.check_header(one, header)

    def _direct_ranges(self, piece: Ints, wanted: Ints, begin: Ints) -> Iterator[_Range]:
        """Ranges of pieces that are wanted as they are, at ``begin`` in the memory of ``wanted``."""
        boxes = self._checkpoint.tables.boxes
        file_id = boxes.file_id[np.searchsorted(boxes.piece_first, piece, side="right") - 1]
        order = np.lexsort((boxes.piece_offset[piece], file_id))
        piece, wanted, begin, file_id = piece[order], wanted[order], begin[order], file_id[order]
        at, num_bytes = boxes.piece_offset[piece], boxes.piece_bytes[piece]
        apart = _breaks(file_id) | _breaks(at, num_bytes)
        # Stretches that lie without a gap in the file and in memory.
        heads, stretch_ends = _stretches(apart | _breaks(wanted) | _breaks(begin, num_bytes))
        stretch_bytes = np.add.reduceat(num_bytes, heads) if len(heads) else heads
        is_long = stretch_bytes >= _JOIN_BELOW
        for first, end in zip(heads[is_long].tolist(), stretch_ends[is_long].tolist(), strict=True):
            for one, other in _cut(num_bytes[first:end], _CHUNK_BYTES):
                part = slice(first + one, first + other)
                length = int(num_bytes[part].sum())
                start = int(begin[part.start])
                yield _Range(
                    file_id=int(file_id[part.start]),
                    begin=int(at[part.start]),
                    end=int(at[part.start]) + length,
                    pieces=piece[part].tolist(),
                    memory=self._views.memory(int(wanted[part.start]))[start : start + length],
                )
        yield from self._joined_ranges(
            piece,
            at,
            file_id,
            wanted,
            begin,
            heads[~is_long],
            stretch_ends[~is_long],
            stretch_bytes[~is_long],
        )

    def _joined_ranges(
        self,
        piece: Ints,
        at: Ints,
        file_id: Ints,
        wanted: Ints,
        begin: Ints,
        heads: Ints,
        ends: Ints,
        num_bytes: Ints,
    ) -> Iterator[_Range]:
        """Ranges of short stretches, from ``heads`` to ``ends`` among the pieces."""
        firsts, lasts = _stretches(_breaks(file_id[heads]) | _breaks(at[heads], num_bytes))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for one, other in _cut(num_bytes[first:last], _JOIN_BYTES):
                part = slice(first + one, first + other)
                head = heads[part]
                start = int(at[head[0]])
                lows = (at[head] - start).tolist()
                moves = []
                for low, size, want, to in zip(
                    lows, num_bytes[part].tolist(), wanted[head].tolist(), begin[head].tolist(), strict=True
                ):
                    moves.append((low, low + size, self._views.memory(want)[to : to + size]))
                yield _Range(
                    file_id=int(file_id[head[0]]),
                    begin=start,
                    end=start + int(num_bytes[part].sum()),
                    pieces=piece[head[0] : ends[part][-1]].tolist(),
                    moves=moves,
                )

    def _scattered_ranges(self, piece: Ints) -> Iterator[_Range]:
        """Ranges of pieces of which several parts are wanted, or parts that lie otherwise in memory."""
        boxes = self._checkpoint.tables.boxes
        row = np.searchsorted(boxes.piece_first, piece, side="right") - 1
        order = np.lexsort((boxes.piece_offset[piece], boxes.file_id[row]))
        piece, row = piece[order], row[order]
        file_id, at, num_bytes = boxes.file_id[row], boxes.piece_offset[piece], boxes.piece_bytes[piece]
        firsts, lasts = _stretches(_breaks(row) | (np.diff(piece, prepend=-2) != 1))
        cuts: list[tuple[int, int, Cut]] = []
        joined: list[int] = []
        begin = end = 0
        where = -1

        def close() -> Iterator[_Range]:
            nonlocal cuts, joined
            if cuts:
                yield _Range(
                    file_id=where, begin=begin, end=end, pieces=joined if self._verify else (), cuts=cuts
                )
            cuts, joined = [], []

        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for one, other in _cut(num_bytes[first:last], _CHUNK_BYTES):
                pieces = range(int(piece[first + one]), int(piece[first + other - 1]) + 1)
                base = int(at[first + one])
                for cut, low, high in self._cuts(int(row[first]), pieces):
                    if (where, end) != (int(file_id[first]), base + low) or base + high - begin > _JOIN_BYTES:
                        yield from close()
                        where, begin = int(file_id[first]), base + low
                    cuts.append((base + low - begin, base + high - begin, cut))
                    joined += pieces
                    end = base + high
        yield from close()

    def _cuts(self, row: int, pieces: range) -> Iterator[tuple[Cut, int, int]]:
        """What to read of a run of pieces: elements, and the stored bytes from the first piece's on."""
        boxes = self._checkpoint.tables.boxes
        cut = self._views.cut(row, pieces.start, pieces.stop)
        if self._verify or boxes.compressed[row]:
            yield cut, 0, int(boxes.piece_bytes[pieces.start : pieces.stop].sum())
            return
        for begin, end in self._views.exact_ranges(cut):
            yield cut.narrowed(begin, end), begin - cut.begin, end - cut.begin

    def _do_batch(self, batch: _Batch) -> None:
        files = self._checkpoint.tables.files
        buffers = [_memory(one.end - one.begin) if one.memory is None else one.memory for one in batch.ranges]
        self._read([(files[one.file_id].path, one.begin, one.end) for one in batch.ranges], buffers)
        url = self._checkpoint.data.url
        if self._verify:
            with span("checkpoint.verify", path=url, num_bytes=batch.num_bytes):
                for one, buffer in zip(batch.ranges, buffers, strict=True):
                    self._checkpoint.check_pieces(one.pieces, buffer.data)
        with span("checkpoint.copy", path=url, num_bytes=batch.num_bytes), torch.no_grad():
            for one, buffer in zip(batch.ranges, buffers, strict=True):
                for begin, end, target in one.moves:
                    target[:] = buffer[begin:end]
                for begin, end, cut in one.cuts:
                    self._views.fill(cut, self._elements(cut, buffer[begin:end]))

    def _elements(self, cut: Cut, stored: Bytes) -> Bytes:
        boxes = self._checkpoint.tables.boxes
        if not boxes.compressed[cut.row]:
            return stored
        raw = _memory(cut.end - cut.begin)
        size = boxes.raw_piece_bytes(cut.row)
        first = int(boxes.piece_first[cut.row]) + cut.begin // size
        self._decode(cut.row, first, first + -(-(cut.end - cut.begin) // size), stored, raw)
        return raw

    def _decode(self, row: int, first: int, end: int, stored: Bytes, raw: Bytes) -> None:
        boxes = self._checkpoint.tables.boxes
        size = boxes.raw_piece_bytes(row)
        itemsize = self._views.itemsize(row)
        where = f"{self._checkpoint.data.url}: {self._checkpoint.tensor_of(row)}"
        at = 0
        for index, num_bytes in enumerate(boxes.piece_bytes[first:end].tolist()):
            piece = raw[index * size : (index + 1) * size]
            decode_piece(stored[at : at + num_bytes].data, itemsize, piece, where)
            at += num_bytes

    def _read(self, ranges: Sequence[tuple[str, int, int]], buffers: Sequence[Bytes]) -> None:
        num_bytes = sum(end - begin for _, begin, end in ranges)
        with self._lock:
            self.num_bytes_read += num_bytes
        with span("checkpoint.read", path=self._checkpoint.data.url, num_bytes=num_bytes):
            self._checkpoint.data.read_ranges(ranges, into=[buffer.data for buffer in buffers])


def _breaks(values: Ints, steps: Ints | None = None) -> npt.NDArray[np.bool_]:
    """Whether each value is not the one before it plus its step (no step: is another one); so is the first."""
    breaks = np.ones(len(values), dtype=np.bool_)
    breaks[1:] = values[1:] != (values[:-1] if steps is None else values[:-1] + steps[:-1])
    return breaks


def _stretches(breaks: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Where each stretch without a break begins, and one past where it ends."""
    heads = np.flatnonzero(breaks)
    return heads, np.append(heads, len(breaks))[1:]


def _cut(num_bytes: Ints, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut consecutive sizes into stretches of about ``max_bytes``: index of the first, and one past the last."""
    before = np.cumsum(num_bytes) - num_bytes
    heads, ends = _stretches(_breaks(before // max_bytes))
    yield from zip(heads.tolist(), ends.tolist(), strict=True)


def _batches(ranges: Sequence[_Range]) -> Iterator[_Batch]:
    batch = _Batch()
    for one in ranges:
        num_bytes = one.end - one.begin
        if batch.ranges and batch.num_bytes + num_bytes > _BATCH_BYTES:
            yield batch
            batch = _Batch()
        batch.ranges.append(one)
        batch.num_bytes += num_bytes
    if batch.ranges:
        yield batch


def _memory(num_bytes: int) -> Bytes:
    return np.empty(num_bytes, dtype=np.uint8)
