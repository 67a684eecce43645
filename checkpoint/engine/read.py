"""Reading the overlap of wanted boxes and stored boxes, in whole verified pieces.

Stored boxes are read in *chunks* of a few pieces. A chunk goes straight into its destination when its bytes lie
there in the same order; otherwise into scratch memory, from where the parts that are wanted are copied.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.boxes import Box, flat_boxes, intersect, runs_within, slices_within
from checkpoint.engine.memory import Bytes, flat_bytes, is_flat
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import DTYPES
from checkpoint.stored import StoredCheckpoint
from storage.spans import span

_CHUNK_BYTES: Final = 4 * PIECE_BYTES
_BATCH_BYTES: Final = 64 << 20
_NUM_BATCHES: Final = 3  # at work at once: reading, verifying and copying overlap; bounds scratch memory

# Without verification, gaps up to this size are read over rather than read around.
_GAP_BYTES: Final = 64 << 10

# Smaller chunks that follow each other in a file are read together.
_JOIN_BELOW: Final = 1 << 20
_JOIN_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wanted:
    """A box that this rank wants filled.

    Attributes:
        tensor_id: Stored tensor.
        box: Which part of it.
        view: Where it goes; of the stored dtype and of the box's lengths, on any device, any strides.
    """

    tensor_id: int
    box: Box
    view: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStats:
    """What reading took, in bytes.

    Attributes:
        num_bytes_read: Bytes read from payload files, headers not counted.
        num_bytes_wanted: Stored bytes that were asked for, each counted once.
    """

    num_bytes_read: int
    num_bytes_wanted: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Copy:
    """A part of a stored box with its destination.

    Attributes:
        part: Common part of the stored and the wanted box, in the global tensor.
        view: Destination of exactly that part.
        run_start: If the part is one run of the stored box and the destination is flat host memory: where the run
            begins in the stored box, bytes. Else None.
    """

    part: Box
    view: torch.Tensor
    run_start: int | None


@dataclass(kw_only=True, slots=True, eq=False)
class _Chunk:
    """A range of a stored box to be read.

    Attributes:
        row: The stored box.
        box: The same, as a box of the global tensor.
        begin: First byte in the stored box.
        end: One past the last byte.
        copies: Parts of the stored box that are wanted.
    """

    row: int
    box: Box
    begin: int
    end: int
    copies: Sequence[_Copy]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def destination(self) -> Bytes | None:
        """Memory that wants exactly these bytes, if there is one such place and no other."""
        if len(self.copies) != 1 or self.copies[0].run_start is None:
            return None
        start = self.begin - self.copies[0].run_start
        memory = flat_bytes(self.copies[0].view)
        return (
            memory[start : start + self.num_bytes]
            if start >= 0 and start + self.num_bytes <= len(memory)
            else None
        )


@dataclass(kw_only=True, slots=True, eq=False)
class _Range:
    """Chunks that follow each other in a file, and the memory they are read into (scratch if None)."""

    file_id: int
    begin: int
    end: int
    chunks: list[_Chunk]
    memory: Bytes | None


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
            64 KiB excepted).

    Raises:
        CorruptCheckpoint: A piece or header does not match its digest, or a file is too short; names file and
            tensor. The content of the views is then undefined.
        StorageError: Reading failed.
    """
    copies = _copies_by_row(checkpoint, wanted)
    if verify:
        _check_headers(checkpoint, sorted({int(checkpoint.tables.boxes.file_id[row]) for row in copies}))
    num_bytes_wanted = sum(_num_bytes_wanted(checkpoint, row, of_row) for row, of_row in copies.items())
    num_bytes_read = 0
    with ThreadPoolExecutor(_NUM_BATCHES, thread_name_prefix="checkpoint-read") as pool:
        running: set[Future[None]] = set()
        for batch in _batches(_ranges(checkpoint, copies, verify=verify)):
            num_bytes_read += batch.num_bytes
            if len(running) >= _NUM_BATCHES:
                done, running = wait(running, return_when="FIRST_COMPLETED")
                for one in done:
                    one.result()
            running.add(pool.submit(_do_batch, checkpoint, batch, verify=verify))
        for one in wait(running, return_when=FIRST_EXCEPTION).done:
            one.result()
    return ReadStats(num_bytes_read=num_bytes_read, num_bytes_wanted=num_bytes_wanted)


def _copies_by_row(checkpoint: StoredCheckpoint, wanted: Sequence[Wanted]) -> dict[int, list[_Copy]]:
    """What is wanted of each stored box."""
    tables = checkpoint.tables
    copies: dict[int, list[_Copy]] = defaultdict(list)
    for one in wanted:
        offsets, lengths = tables.boxes.corners_of(one.tensor_id, len(one.box.lengths))
        low = np.maximum(offsets, np.asarray(one.box.offsets, dtype=np.int64))
        high = np.minimum(offsets + lengths, np.asarray(one.box.ends, dtype=np.int64))
        first = tables.boxes.rows_of(one.tensor_id).start
        itemsize = DTYPES[tables.tensors[one.tensor_id].dtype].itemsize
        for index in np.flatnonzero((low < high).all(axis=1)).tolist():
            stored = tables.boxes.box(first + index)
            part = intersect(stored, one.box)
            assert part is not None
            view = one.view[slices_within(part, one.box)]
            run_start = None
            if is_flat(view):
                starts, length = runs_within(part, stored)
                if len(starts) == 1:
                    assert length == part.num_elements
                    run_start = int(starts[0]) * itemsize
            copies[first + index].append(_Copy(part=part, view=view, run_start=run_start))
    return copies


def _num_bytes_wanted(checkpoint: StoredCheckpoint, row: int, copies: Sequence[_Copy]) -> int:
    """Bytes of a stored box that are wanted at all; replicas inside one rank count once."""
    distinct = {copy.part for copy in copies}
    itemsize = copies[0].view.element_size()
    return min(
        sum(part.num_elements for part in distinct) * itemsize, int(checkpoint.tables.boxes.stored_bytes[row])
    )


def _ranges(
    checkpoint: StoredCheckpoint, copies: dict[int, list[_Copy]], *, verify: bool
) -> Iterator[_Range]:
    """What to read, in order of file and offset."""
    boxes = checkpoint.tables.boxes
    open_range: _Range | None = None
    for row in sorted(copies, key=lambda one: (int(boxes.file_id[one]), int(boxes.byte_offset[one]))):
        file_id, offset = int(boxes.file_id[row]), int(boxes.byte_offset[row])
        stored = boxes.box(row)
        needed = _needed(stored, copies[row], int(boxes.stored_bytes[row]), verify=verify)
        for begin, end in _cut(needed):
            chunk = _Chunk(row=row, box=stored, begin=begin, end=end, copies=copies[row])
            if chunk.num_bytes >= _JOIN_BELOW:
                if open_range is not None:
                    yield open_range
                    open_range = None
                yield _Range(
                    file_id=file_id,
                    begin=offset + begin,
                    end=offset + end,
                    chunks=[chunk],
                    memory=chunk.destination(),
                )
                continue
            if open_range is not None and (
                (open_range.file_id, open_range.end) != (file_id, offset + begin)
                or offset + end - open_range.begin > _JOIN_BYTES
            ):
                yield open_range
                open_range = None
            if open_range is None:
                open_range = _Range(file_id=file_id, begin=offset + begin, end=offset, chunks=[], memory=None)
            open_range.chunks.append(chunk)
            open_range.end = offset + end
    if open_range is not None:
        yield open_range


def _needed(stored: Box, copies: Sequence[_Copy], num_bytes: int, *, verify: bool) -> list[tuple[int, int]]:
    """Byte ranges of a stored box to read, ascending and apart."""
    itemsize = copies[0].view.element_size()
    # A gap shorter than a piece holds no whole piece, so a verified read covers it anyway.
    gap = (PIECE_BYTES - 1 if verify else _GAP_BYTES) // itemsize
    ranges = []
    for part in {copy.part for copy in copies}:
        for begin, end in _runs(part, stored, gap):
            begin, end = begin * itemsize, end * itemsize
            if verify:
                begin = begin // PIECE_BYTES * PIECE_BYTES
                end = min(-(-end // PIECE_BYTES) * PIECE_BYTES, num_bytes)
            ranges.append((begin, end))
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _runs(part: Box, stored: Box, gap: int) -> list[tuple[int, int]]:
    """Runs of elements of ``part`` in the row-major image of ``stored``, those at most ``gap`` apart as one."""
    start, length, stride = 0, 1, 1
    outer: list[npt.NDArray[np.int64]] = []
    for dim in reversed(range(len(stored.lengths))):
        start += (part.offsets[dim] - stored.offsets[dim]) * stride
        steps = part.lengths[dim]
        if steps > 1:
            if not outer and stride - length <= gap:
                length += (steps - 1) * stride
            else:
                outer.append(np.arange(steps, dtype=np.int64) * stride)
        stride *= stored.lengths[dim]
    starts = np.full(1, start, dtype=np.int64)
    for steps_of_dim in reversed(outer):
        starts = (starts[:, None] + steps_of_dim[None, :]).reshape(-1)
    return [(begin, begin + length) for begin in starts.tolist()]


def _cut(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Cut ranges at multiples of the chunk size, which are piece boundaries."""
    for begin, end in ranges:
        while begin < end:
            cut = min(end, (begin // _CHUNK_BYTES + 1) * _CHUNK_BYTES)
            yield begin, cut
            begin = cut


def _batches(ranges: Iterator[_Range]) -> Iterator[_Batch]:
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


def _do_batch(checkpoint: StoredCheckpoint, batch: _Batch, *, verify: bool) -> None:
    files = checkpoint.tables.files
    buffers = [
        np.empty(one.end - one.begin, dtype=np.uint8) if one.memory is None else one.memory
        for one in batch.ranges
    ]
    with span("checkpoint.read", path=checkpoint.data.url, num_bytes=batch.num_bytes):
        checkpoint.data.read_ranges(
            [(files[one.file_id].path, one.begin, one.end) for one in batch.ranges],
            into=[one.data for one in buffers],
        )
    if verify:
        with span("checkpoint.verify", path=checkpoint.data.url, num_bytes=batch.num_bytes):
            for one, buffer in zip(batch.ranges, buffers, strict=True):
                for chunk, memory in _chunks_of(one, buffer):
                    checkpoint.check_pieces(chunk.row, chunk.begin, memory.data)
    with span("checkpoint.copy", path=checkpoint.data.url, num_bytes=batch.num_bytes):
        for one, buffer in zip(batch.ranges, buffers, strict=True):
            if one.memory is None:
                for chunk, memory in _chunks_of(one, buffer):
                    _copy_out(chunk, memory)


def _chunks_of(one: _Range, buffer: Bytes) -> Iterator[tuple[_Chunk, Bytes]]:
    start = 0
    for chunk in one.chunks:
        yield chunk, buffer[start : start + chunk.num_bytes]
        start += chunk.num_bytes


def _copy_out(chunk: _Chunk, memory: Bytes) -> None:
    """Copy what is wanted of a chunk from scratch memory."""
    strides = [math.prod(chunk.box.lengths[dim + 1 :]) for dim in range(len(chunk.box.lengths))]
    dtype = chunk.copies[0].view.dtype
    elements = torch.from_numpy(memory).view(dtype)
    first = chunk.begin // dtype.itemsize
    pieces = flat_range_boxes(chunk.box, first, first + elements.numel())
    for copy in chunk.copies:
        for piece in pieces:
            part = intersect(piece, copy.part)
            if part is None:
                continue
            offset = sum(
                (at - base) * stride
                for at, base, stride in zip(part.offsets, chunk.box.offsets, strides, strict=True)
            )
            source = elements.as_strided(part.lengths, strides, offset - first)
            copy.view[slices_within(part, copy.part)].copy_(source)


def flat_range_boxes(box: Box, begin: int, end: int) -> list[Box]:
    """Cut a range of the row-major image of a box into boxes, at most ``2 * ndim - 1`` of them.

    Args:
        box: The box.
        begin: First element of the range.
        end: One past the last element, at most the box's number of elements.
    """
    return [
        Box(tuple(map(operator.add, box.offsets, piece.offsets)), piece.lengths)
        for piece in flat_boxes(box.lengths, begin, end)
    ]


def _check_headers(checkpoint: StoredCheckpoint, file_ids: Sequence[int]) -> None:
    files = [checkpoint.tables.files[file_id] for file_id in file_ids]
    headers = checkpoint.data.read_ranges([(file.path, 0, file.header_bytes) for file in files])
    for file_id, header in zip(file_ids, headers, strict=True):
        checkpoint.check_header(file_id, header)
