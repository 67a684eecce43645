"""Writing one rank's payload files, digesting the bytes on their way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from checkpoint.boxes import Box
from checkpoint.engine.memory import Bytes, copy_into, flat_bytes, is_flat
from checkpoint.format.digest import PIECE_BYTES, digest64
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.payload import (
    HEADER_ALIGN,
    MAX_ENTRIES,
    Entry,
    encode_header,
    entry_name,
    file_name,
    header_room,
)
from checkpoint.frameworks.values import LocalTensor
from checkpoint.planner import dtype_name, local_boxes
from storage import Store
from storage.spans import span

# Smaller boxes are gathered before they are written, larger ones are written from where they are.
_GATHER_BELOW: Final = 1 << 20
_GATHER_BYTES: Final = 4 << 20
_WRITE_BYTES: Final = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileLayout:
    """One payload file of one rank, before it is written.

    Attributes:
        group: Top-level name in the state.
        index: Number among the rank's files of that group.
        name: File name.
        header_bytes: Reserved for the header.
        entries: What it holds, in order.
        views: The tensor memory of each entry.
        positions: Which of the rank's boxes each entry is, in the order the rank described them; int64.
        num_bytes: Size of the file, header included.
    """

    group: str
    index: int
    name: str
    header_bytes: int
    entries: tuple[Entry, ...]
    views: tuple[torch.Tensor, ...]
    positions: npt.NDArray[np.int64]
    num_bytes: int

    @property
    def data_bytes(self) -> int:
        """Size of the file without its header."""
        return self.num_bytes - self.header_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WrittenFile:
    """One payload file after it was written.

    Attributes:
        layout: What was written.
        header_xxh3: xxh3-64 of the header.
        digests: xxh3-64 of the pieces of each entry.
    """

    layout: FileLayout
    header_xxh3: int
    digests: list[list[int]]


def lay_out(rank: int, tensors: Sequence[LocalTensor], positions: npt.NDArray[np.int64]) -> list[FileLayout]:
    """Place the boxes that a rank is to write in payload files.

    Args:
        rank: Who writes.
        tensors: What it described to the planner.
        positions: Which of its boxes to write, from the plan.
    """
    boxes = list(local_boxes(tensors))

    def order(position: int) -> tuple[str, int, str, tuple[int, ...]]:
        tensor, box, _ = boxes[position]
        return tensor.group, -tensor.dtype.itemsize, tensor.key, box.offsets

    layouts = []
    for group, members in groupby(sorted(positions.tolist(), key=order), lambda one: boxes[one][0].group):
        chosen = list(members)
        for index, start in enumerate(range(0, len(chosen), MAX_ENTRIES)):
            part = chosen[start : start + MAX_ENTRIES]
            layouts.append(_lay_out_file(group, rank, index, [boxes[one] for one in part], part))
    return layouts


def _lay_out_file(
    group: str,
    rank: int,
    index: int,
    boxes: Sequence[tuple[LocalTensor, Box, torch.Tensor]],
    positions: Sequence[int],
) -> FileLayout:
    names = [entry_name(tensor.key, tensor.shape, box) for tensor, box, _ in boxes]
    header_bytes = header_room(
        (name, len(box.lengths)) for name, (_, box, _) in zip(names, boxes, strict=True)
    )
    entries = []
    offset = header_bytes
    for name, (tensor, box, _) in zip(names, boxes, strict=True):
        dtype = DTYPES[dtype_name(tensor.dtype, tensor.key)]
        num_bytes = box.num_elements * dtype.itemsize
        entries.append(
            Entry(name=name, dtype=dtype, lengths=box.lengths, byte_offset=offset, num_bytes=num_bytes)
        )
        offset += num_bytes
    return FileLayout(
        group=group,
        index=index,
        name=file_name(group, rank, index),
        header_bytes=header_bytes,
        entries=tuple(entries),
        views=tuple(view for _, _, view in boxes),
        positions=np.asarray(positions, dtype=np.int64),
        num_bytes=offset,
    )


def staging_bytes(layouts: Sequence[FileLayout]) -> int:
    """Bytes of staging memory that :func:`stage` needs."""
    return sum(_aligned(layout.data_bytes) for layout in layouts)


def stage(layouts: Sequence[FileLayout], buffer: torch.Tensor) -> list[Bytes]:
    """Copy the data of payload files into staging memory.

    When this returns the tensors may change.

    Args:
        layouts: The files.
        buffer: uint8 host memory of at least :func:`staging_bytes`.

    Returns:
        The image of each file without its header, uint8, in ``buffer``.
    """
    images = []
    start = 0
    on_device = False
    for layout in layouts:
        for entry, view in zip(layout.entries, layout.views, strict=True):
            begin = start + entry.byte_offset - layout.header_bytes
            copy_into(buffer[begin : begin + entry.num_bytes], view, non_blocking=True)
            on_device |= view.device.type == "cuda"
        images.append(flat_bytes(buffer[start : start + layout.data_bytes]))
        start += _aligned(layout.data_bytes)
    if on_device:
        torch.cuda.synchronize()
    return images


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // HEADER_ALIGN) * HEADER_ALIGN


def live_blocks(layout: FileLayout) -> Iterator[Bytes]:
    """The data of a file straight from the tensors, which must not change meanwhile.

    Each block is to be used up before the next one is asked for.
    """
    gathered = torch.empty(min(layout.data_bytes, _GATHER_BYTES), dtype=torch.uint8)
    held = 0
    for entry, view in zip(layout.entries, layout.views, strict=True):
        if entry.num_bytes >= _GATHER_BELOW:
            if held:
                yield flat_bytes(gathered[:held])
                held = 0
            yield flat_bytes(view if is_flat(view) else _host_copy(view))
            continue
        if held + entry.num_bytes > gathered.numel():
            yield flat_bytes(gathered[:held])
            held = 0
        # A box of wider elements never follows one of narrower ones, so this is aligned.
        copy_into(gathered[held : held + entry.num_bytes], view)
        held += entry.num_bytes
    if held:
        yield flat_bytes(gathered[:held])


def _host_copy(view: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(view.shape, dtype=view.dtype)
    return copy.copy_(view)


def write_files(
    store: Store, layouts: Sequence[FileLayout], images: Sequence[Bytes] | None
) -> list[WrittenFile]:
    """Write payload files, each of which appears whole, and durable, or not at all.

    Args:
        store: Directory of the attempt.
        layouts: The files.
        images: Their data, from :func:`stage`; None takes it from the tensors, which must not change meanwhile.

    Raises:
        StorageError: One could not be written.
    """
    # Digesting beside writing hides it: both read the same bytes at about the same time, and let go of the GIL.
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest") as digester:
        return [
            _write_file(store, layout, live_blocks(layout) if images is None else [images[index]], digester)
            for index, layout in enumerate(layouts)
        ]


def _write_file(store: Store, layout: FileLayout, blocks: Iterable[Bytes], digester: Executor) -> WrittenFile:
    hasher = _PieceHasher([entry.num_bytes for entry in layout.entries])
    with (
        span("checkpoint.write", path=layout.name, num_bytes=layout.num_bytes),
        store.writer(layout.name, header_bytes=layout.header_bytes) as writer,
    ):
        for block in blocks:
            digested = digester.submit(_digest, hasher, block.data, layout.name)
            try:
                for begin in range(0, len(block), _WRITE_BYTES):
                    writer.write(block[begin : begin + _WRITE_BYTES].data)
            finally:
                digested.result()  # also after an error: the block may be reused only when nobody reads it
        header = encode_header(layout.entries, layout.header_bytes)
        writer.set_header(header)
        assert writer.num_bytes == layout.num_bytes
    return WrittenFile(layout=layout, header_xxh3=digest64(header), digests=hasher.digests())


def _digest(hasher: _PieceHasher, block: memoryview, path: str) -> None:
    with span("checkpoint.digest", path=path, num_bytes=len(block)):
        hasher.update(block)


class _PieceHasher:
    """Digests of the pieces of boxes that follow each other in a stream cut anywhere."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._digests: list[list[int]] = [[] for _ in sizes]
        self._box = 0
        self._left_in_box = sizes[0]
        self._left_in_piece = self._piece_bytes = min(PIECE_BYTES, self._left_in_box)
        self._partial = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        begin = 0
        while begin < len(data):
            part = data[begin : begin + self._left_in_piece]
            begin += len(part)
            if len(part) == self._piece_bytes:
                self._end_piece(digest64(part))  # three times as fast as a streaming digest
                continue
            self._partial.update(part)
            self._left_in_piece -= len(part)
            if not self._left_in_piece:
                self._end_piece(self._partial.intdigest())
                self._partial.reset()

    def _end_piece(self, digest: int) -> None:
        self._digests[self._box].append(digest)
        self._left_in_box -= self._piece_bytes
        if not self._left_in_box:
            self._box += 1
            self._left_in_box = self._sizes[self._box] if self._box < len(self._sizes) else 0
        self._left_in_piece = self._piece_bytes = min(PIECE_BYTES, self._left_in_box)

    def digests(self) -> list[list[int]]:
        assert self._box == len(self._sizes), "the stream ended early"
        return self._digests
