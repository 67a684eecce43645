"""Reading the overlap of wanted boxes and stored boxes, in whole verified pieces.

A piece whose bytes are wanted in one place and in the same order is read straight into it. Others are read into
scratch memory, from where the parts that are wanted are copied. Pieces that follow each other are read together.

Local files are read a little at a time, and each bit is digested while the processor has it in its cache. From
anywhere else much is asked for at once, and digested when all of it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Final

import numpy as np
import torch

from checkpoint.engine.memory import Bytes
from checkpoint.engine.overlap import Ints
from checkpoint.engine.ranges import Range, batches, direct_ranges, scattered_ranges
from checkpoint.engine.scan import scan
from checkpoint.engine.views import Cut, Views, Wanted
from checkpoint.format.codec import decode_piece
from checkpoint.stored import StoredCheckpoint
from storage.buffers import ALIGNED_BYTES
from storage.spans import span

__all__ = ["PieceReader", "ReadStats", "Wanted", "read_boxes"]

# Batches at work at once, and how large they are: reading, digesting and copying overlap, in bounded memory.
_LOCAL_BATCHES: Final = 4
_LOCAL_BATCH_BYTES: Final = 8 << 20
_REMOTE_BATCHES: Final = 3
_REMOTE_BATCH_BYTES: Final = 64 << 20


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
        self._is_local = checkpoint.data.local_path("") is not None
        self._scratch = threading.local()
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
        boxes, views = self._checkpoint.tables.boxes, self._views
        direct, scattered = views.split(others)
        self.check_headers(np.concatenate([direct[0], scattered]))
        ranges = [
            *direct_ranges(boxes, views, direct),
            *scattered_ranges(boxes, views, scattered, verify=self._verify),
        ]
        num_batches = _LOCAL_BATCHES if self._is_local else _REMOTE_BATCHES
        batch_bytes = _LOCAL_BATCH_BYTES if self._is_local else _REMOTE_BATCH_BYTES
        with ThreadPoolExecutor(num_batches, thread_name_prefix="checkpoint-read") as pool:
            running: set[Future[None]] = set()
            for batch in batches(ranges, batch_bytes):
                if len(running) >= num_batches:
                    _finish_some(running)
                running.add(pool.submit(self._do_batch, batch))
            while running:
                _finish_some(running)

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
        found, ranges = [], []
        for (row, first, end), memory in zip(runs, into, strict=True):
            raw = _memory(boxes.raw_bytes_of(row, first, end)) if memory is None else memory
            num_bytes = int(boxes.piece_bytes[first:end].sum())
            begin = int(boxes.piece_offset[first])
            stored = _memory(num_bytes) if boxes.compressed[row] else raw
            found.append(raw)
            ranges.append(
                Range(
                    file_id=int(boxes.file_id[row]),
                    begin=begin,
                    end=begin + num_bytes,
                    pieces=np.arange(first, end),
                    into=[stored],
                )
            )
        self._do_batch(ranges)
        for (row, first, end), raw, one in zip(runs, found, ranges, strict=True):
            if one.into[0] is not raw:
                self._decode(row, first, end, one.into[0], raw)
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

    def _do_batch(self, batch: Sequence[Range]) -> None:
        # What cannot be read locally is asked for again, of who repeats what may pass and says what does not.
        rest = [one for one in batch if not self._scan(one)] if self._is_local else batch
        if rest:
            self._fetch(rest)

    def _scan(self, one: Range) -> bool:
        """Read and use a range of a local file; False if that cannot be done."""
        into = one.into or [self._scratch_memory(one.num_bytes)]
        path = self._checkpoint.data.local_path(self._checkpoint.tables.files[one.file_id].path)
        assert path is not None, "local when this was made"
        digester = self._checkpoint.digester(one.pieces)
        with span("checkpoint.read", path=self._checkpoint.data.url, num_bytes=one.num_bytes):
            look = digester.update if self._verify else _do_nothing
            if not scan(path, one.begin, [part.data for part in into], look):
                return False
        self._use(one, into, digester.digests)
        return True

    def _fetch(self, batch: Sequence[Range]) -> None:
        """Read and use ranges, all at once."""
        all_into = [one.into or [_memory(one.num_bytes)] for one in batch]
        ranges = []
        for one, into in zip(batch, all_into, strict=True):
            path, begin = self._checkpoint.tables.files[one.file_id].path, one.begin
            for part in into:
                ranges.append((path, begin, begin + len(part)))
                begin += len(part)
        num_bytes = sum(one.num_bytes for one in batch)
        with span("checkpoint.read", path=self._checkpoint.data.url, num_bytes=num_bytes):
            self._checkpoint.data.read_ranges(ranges, into=[part.data for into in all_into for part in into])
        for one, into in zip(batch, all_into, strict=True):
            digester = self._checkpoint.digester(one.pieces)
            if self._verify:
                with span("checkpoint.verify", path=self._checkpoint.data.url, num_bytes=one.num_bytes):
                    for part in into:
                        digester.update(part.data)
            self._use(one, into, digester.digests)

    def _use(self, one: Range, into: Sequence[Bytes], digests: Sequence[int]) -> None:
        """Check what was read, and copy what has not been read straight to where it is wanted."""
        with self._lock:
            self.num_bytes_read += one.num_bytes
        if self._verify:
            self._checkpoint.check_digests(one.pieces, digests)
        if one.cuts:
            with (
                span("checkpoint.copy", path=self._checkpoint.data.url, num_bytes=one.num_bytes),
                torch.no_grad(),
            ):
                for begin, end, cut in one.cuts:
                    self._views.fill(cut, self._elements(cut, into[0][begin:end]))

    def _scratch_memory(self, num_bytes: int) -> Bytes:
        """Memory that this thread uses again and again, so that it is faulted in once."""
        memory: Bytes | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._scratch.memory = _memory(num_bytes)
        return memory[:num_bytes]

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


def _finish_some(running: set[Future[None]]) -> None:
    """Wait until some of what runs has ended, and take it out."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= done
    while done:
        done.pop().result()  # without a name: with its error, a future would hold this frame, and this frame it


def _memory(num_bytes: int) -> Bytes:
    """As `storage.buffers.new_memory`, and not cleared."""
    if num_bytes < ALIGNED_BYTES:
        return np.empty(num_bytes, dtype=np.uint8)
    memory = np.empty(num_bytes + PAGESIZE, dtype=np.uint8)
    begin = -int(memory.__array_interface__["data"][0]) % PAGESIZE
    return memory[begin : begin + num_bytes]


def _do_nothing(_: memoryview) -> None:
    """Unverified bytes are not looked at."""
