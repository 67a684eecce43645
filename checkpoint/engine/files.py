"""Which boxes of a rank go to which payload file, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.compression import Compression, codec_of
from checkpoint.format.codec import CODEC_NONE, CODECS
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.payload import MAX_ENTRIES, Entry, entry_name, file_name, header_room
from checkpoint.frameworks.values import LocalTensor
from checkpoint.planner import dtype_name, local_boxes

# What is smaller has nothing to gain that the frame around it would not cost.
_MIN_COMPRESSED_BYTES: Final = 1024

_MAX_ITEMSIZE: Final = max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileLayout:
    """One payload file of one rank. Holds no tensor, so that saves of the same state may share it.

    Attributes:
        group: Top-level name in the state.
        index: Number among the rank's files of that group.
        name: File name.
        header_bytes: Reserved for the header.
        entries: The boxes, in order.
        codecs: Index in :data:`checkpoint.format.codec.CODECS` of each; uint8 ``[num_entries]``.
        raw_bytes: Size of each box before compression; int64 ``[num_entries]``.
        image_offsets: Where each box begins in the byte image of the file before compression, aligned to its element
            size; int64 ``[num_entries]``. Boxes of one codec follow each other without holes.
        positions: Which of the rank's boxes each entry is, in the order the rank described them; int64
            ``[num_entries]``.
    """

    group: str
    index: int
    name: str
    header_bytes: int
    entries: tuple[Entry, ...]
    codecs: npt.NDArray[np.uint8]
    raw_bytes: npt.NDArray[np.int64]
    image_offsets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @property
    def image_bytes(self) -> int:
        """Size of the byte image."""
        return int(self.image_offsets[-1] + self.raw_bytes[-1])


def lay_out(
    rank: int, tensors: Sequence[LocalTensor], positions: npt.NDArray[np.int64], compression: Compression
) -> list[FileLayout]:
    """Place the boxes that a rank is to write in payload files.

    Args:
        rank: Who writes.
        tensors: What it described to the planner.
        positions: Which of its boxes to write, from the plan.
        compression: Which of them to compress.
    """
    boxes = list(local_boxes(tensors))
    entries: dict[int, Entry] = {}
    codecs: dict[int, str] = {}
    for position in positions.tolist():
        tensor, box, _ = boxes[position]
        codec = codecs.get(id(tensor))
        if codec is None:
            codec = codecs[id(tensor)] = codec_of(compression, tensor.group, tensor.key)
        dtype = DTYPES[dtype_name(tensor.dtype, tensor.key)]
        small = box.num_elements * dtype.itemsize < _MIN_COMPRESSED_BYTES
        entries[position] = Entry(
            name=entry_name(tensor.key, tensor.shape, box),
            dtype=dtype,
            lengths=box.lengths,
            codec=CODEC_NONE if small else codec,
        )

    def order(position: int) -> tuple[str, bool, int, str, tuple[int, ...]]:
        (tensor, box, _), entry = boxes[position], entries[position]
        return tensor.group, entry.codec != CODEC_NONE, -entry.dtype.itemsize, tensor.key, box.offsets

    layouts = []
    for group, members in groupby(sorted(entries, key=order), lambda one: boxes[one][0].group):
        chosen = list(members)
        for index, start in enumerate(range(0, len(chosen), MAX_ENTRIES)):
            part = chosen[start : start + MAX_ENTRIES]
            layouts.append(_lay_out_file(group, rank, index, [entries[one] for one in part], part))
    return layouts


def _lay_out_file(
    group: str, rank: int, index: int, entries: Sequence[Entry], positions: Sequence[int]
) -> FileLayout:
    raw_bytes = np.asarray([entry.num_bytes for entry in entries], dtype=np.int64)
    image_offsets = np.cumsum(raw_bytes) - raw_bytes
    num_plain = sum(entry.codec == CODEC_NONE for entry in entries)
    if num_plain < len(entries):
        image_offsets[num_plain:] += -image_offsets[num_plain] % _MAX_ITEMSIZE
    return FileLayout(
        group=group,
        index=index,
        name=file_name(group, rank, index),
        header_bytes=header_room((entry.name, len(entry.lengths)) for entry in entries),
        entries=tuple(entries),
        codecs=np.asarray([CODECS.index(entry.codec) for entry in entries], dtype=np.uint8),
        raw_bytes=raw_bytes,
        image_offsets=image_offsets,
        positions=np.asarray(positions, dtype=np.int64),
    )


def views_of(layouts: Sequence[FileLayout], tensors: Sequence[LocalTensor]) -> list[list[torch.Tensor]]:
    """The tensor memory of every entry of every file, given what the rank described."""
    views = [view for tensor in tensors for view in tensor.views]
    return [[views[position] for position in layout.positions.tolist()] for layout in layouts]
