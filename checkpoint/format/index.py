"""What a checkpoint holds: tensors, the boxes that tile them, and where their bytes lie.

Boxes are columns (numpy); only tensors and files, of which there are few, are objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.errors import FormatError, TilingError
from checkpoint.format.box_table import BoxTable, box_table
from checkpoint.format.codec import CODEC_NONE
from checkpoint.format.dtypes import dtype_of
from checkpoint.format.payload import HEADER_ALIGN, MAX_HEADER_BYTES, is_file_name
from checkpoint.format.rows import FileRow, TensorRow
from checkpoint.tiling import find_untiled

__all__ = [
    "CODEC_NONE",
    "BoxTable",
    "Catalog",
    "FileRow",
    "Tables",
    "TensorRow",
    "decode_boxes",
    "decode_catalog",
]

_MAX_DIMS: Final = 64
_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Catalog:
    """Tensors and files, without the boxes.

    Attributes:
        tensors: Global tensors, sorted by (group, key); the index is the tensor id.
        box_counts: In how many boxes each tensor is stored; int64 ``[num_tensors]``.
        files: Payload files; the index is the file id.
    """

    tensors: Sequence[TensorRow]
    box_counts: npt.NDArray[np.int64]
    files: Sequence[FileRow]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """What is stored, and where.

    Attributes:
        tensors: Global tensors, sorted by (group, key); the index is the tensor id.
        boxes: How they, or those of them that were asked for, are cut, and where the parts lie.
        files: Payload files; the index is the file id.
    """

    tensors: Sequence[TensorRow]
    boxes: BoxTable
    files: Sequence[FileRow]

    def check_tiling(self, tensor_id: int) -> None:
        """Check that the boxes of one tensor tile it.

        Raises:
            TilingError: They do not; names the tensor.
        """
        self.check_tilings([tensor_id])

    def check_tilings(self, tensor_ids: Iterable[int]) -> None:
        """Check that the boxes of some tensors tile each of them.

        Raises:
            TilingError: Those of one do not; names it.
        """
        ids = np.asarray(sorted(tensor_ids), dtype=np.int64)
        shapes = [self.tensors[tensor_id].shape for tensor_id in ids.tolist()]
        counts = self.boxes.first[ids + 1] - self.boxes.first[ids]
        first = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(int(first[-1])) + np.repeat(self.boxes.first[ids] - first[:-1], counts)
        offsets, lengths = self.boxes.padded_corners(rows, max(map(len, shapes), default=0))
        found = find_untiled(shapes, first, offsets.T, lengths.T)
        if found is not None:
            index, error = found
            tensor = self.tensors[int(ids[index])]
            raise TilingError(f"{tensor.group}/{tensor.key}: {error}") from None


def decode_catalog(tensors: pa.Table, files: pa.Table, where: str) -> Catalog:
    """Check ``tensors.parquet`` and ``files.parquet``.

    Args:
        tensors: The one table.
        files: The other.
        where: Their directory, for messages.

    Raises:
        FormatError: A row is malformed or contradicts itself.
    """
    rows, box_counts = _tensor_rows(tensors, f"{where}/tensors.parquet")
    return Catalog(tensors=rows, box_counts=box_counts, files=_file_rows(files, f"{where}/files.parquet"))


def decode_boxes(
    catalog: Catalog,
    shards: pa.Table,
    stored: pa.Table,
    where: str,
    *,
    only: npt.NDArray[np.int64] | None = None,
) -> Tables:
    """Check the tables of boxes and join them to tensors and files.

    Args:
        catalog: Tensors and files.
        shards: ``shards.parquet``, or the rows of some tensors.
        stored: The same rows of ``stored.parquet``.
        where: Their directory, for messages.
        only: Ids of the tensors that the rows are of, ascending; None: of all.

    Raises:
        FormatError: The tables contradict each other or themselves.
        UnsupportedVersion: A codec this release does not know.
    """
    num_rows = catalog.box_counts
    if only is not None:
        num_rows = np.zeros_like(num_rows)
        num_rows[only] = catalog.box_counts[only]
    boxes = box_table(shards, stored, catalog.tensors, num_rows, where)
    _check_places(boxes, catalog.files, where, all_boxes=only is None)
    return Tables(tensors=catalog.tensors, boxes=boxes, files=catalog.files)


def _tensor_rows(table: pa.Table, where: str) -> tuple[list[TensorRow], npt.NDArray[np.int64]]:
    if table.column("tensor_id").to_pylist() != list(range(table.num_rows)):
        raise FormatError(f"{where}: tensor_id does not count from 0")
    rows = []
    columns = (
        table.column(name).to_pylist() for name in ("group", "key", "dtype", "shape", "nbytes", "box_count")
    )
    box_counts = []
    previous = None
    for group, key, dtype, shape, num_bytes, box_count in zip(*columns, strict=True):
        name = f"{where}: {group}/{key}"
        if len(shape) > _MAX_DIMS or any(length < 0 for length in shape):
            raise FormatError(f"{name}: impossible shape {str(shape)[:100]}")
        # Exact integers: a product that would overflow is an absurd shape, not a small one.
        if num_bytes != math.prod(shape) * dtype_of(dtype, name).itemsize or num_bytes > _INT64_MAX:
            raise FormatError(f"{name}: {num_bytes} bytes do not add up with shape {shape} of {dtype}")
        if box_count < 0 or (box_count == 0) != (num_bytes == 0):
            raise FormatError(f"{name}: {box_count} boxes for {num_bytes} bytes")
        if previous is not None and previous >= (group, key):
            raise FormatError(f"{name}: tensors are not sorted by group and key, each once")
        previous = (group, key)
        rows.append(TensorRow(group=group, key=key, dtype=dtype, shape=tuple(shape), num_bytes=num_bytes))
        box_counts.append(box_count)
    return rows, np.asarray(box_counts, dtype=np.int64)


def _file_rows(table: pa.Table, where: str) -> list[FileRow]:
    if table.column("file_id").to_pylist() != list(range(table.num_rows)):
        raise FormatError(f"{where}: file_id does not count from 0")
    rows = []
    names = ("path", "num_bytes", "header_bytes", "header_xxh3")
    for path, num_bytes, header_bytes, digest in zip(
        *(table.column(name).to_pylist() for name in names), strict=True
    ):
        if not is_file_name(path):
            raise FormatError(
                f"{where}: {path!r} is not the name of a payload file; paths may not leave the directory"
            )
        if not (0 < header_bytes <= num_bytes and header_bytes % HEADER_ALIGN == 0):
            raise FormatError(f"{where}: {path}: header of {header_bytes} bytes in a file of {num_bytes}")
        if header_bytes > MAX_HEADER_BYTES:
            raise FormatError(
                f"{where}: {path}: header of {header_bytes} bytes, allowed are {MAX_HEADER_BYTES}"
            )
        rows.append(FileRow(path=path, num_bytes=num_bytes, header_bytes=header_bytes, header_xxh3=digest))
    if len({row.path for row in rows}) != len(rows):
        raise FormatError(f"{where}: a path occurs twice")
    return rows


def _check_places(boxes: BoxTable, files: Sequence[FileRow], where: str, *, all_boxes: bool) -> None:
    """The boxes of each file lie in its data, apart; all of them together without holes."""
    if len(boxes.file_id) and not (boxes.file_id.min() >= 0 and boxes.file_id.max() < len(files)):
        raise FormatError(f"{where}/shards.parquet: a file_id that files.parquet lacks")
    data_begin = np.asarray([file.header_bytes for file in files], dtype=np.int64)
    data_end = np.asarray([file.num_bytes for file in files], dtype=np.int64)
    order = np.lexsort((boxes.byte_offset, boxes.file_id))
    file_id = boxes.file_id[order]
    begin, num_bytes = boxes.byte_offset[order], boxes.stored_bytes[order]
    # By subtraction: offset + size of a hostile box may overflow.
    room = data_end[file_id] - begin
    inside = (begin >= data_begin[file_id]) & (num_bytes <= room)
    end = np.where(inside, begin + num_bytes, 0)
    starts_file = np.diff(file_id, prepend=-1) != 0
    free_from = np.where(starts_file, data_begin[file_id], np.concatenate([[0], end[:-1]]))
    fits = inside & (begin == free_from if all_boxes else begin >= free_from)
    wrong = file_id[~fits]
    if all_boxes:
        reached = data_begin.copy()
        reached[file_id] = end  # of several boxes of one file the last one stays
        wrong = np.concatenate([wrong, np.flatnonzero(reached != data_end)])
    if len(wrong):
        raise FormatError(
            f"{where}/stored.parquet: boxes in {files[int(wrong.min())].path} leave holes, overlap or leave the file"
        )
