"""What a checkpoint holds: tensors, the boxes that tile them, and where their bytes lie.

Boxes are columns (numpy); only tensors and files, of which there are few, are objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.boxes import Box, check_tiling
from checkpoint.errors import FormatError, TilingError, UnsupportedVersion
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import dtype_of
from checkpoint.format.payload import HEADER_ALIGN, MAX_HEADER_BYTES, is_file_name
from checkpoint.format.tables import decode_table

CODEC_NONE: Final = "none"

_MAX_DIMS: Final = 64
_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """A stored global tensor.

    Attributes:
        group: Top-level name in the state.
        key: Name inside the group.
        dtype: Name of the element type.
        shape: Global shape.
        num_bytes: Size of all its elements, bytes.
    """

    group: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRow:
    """A payload file.

    Attributes:
        path: Name inside the attempt's directory.
        num_bytes: Size of the file, header included.
        header_bytes: Where the data starts.
        header_xxh3: xxh3-64 of the header.
    """

    path: str
    num_bytes: int
    header_bytes: int
    header_xxh3: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoxTable:
    """All stored boxes, sorted by tensor, then by offset; one row each, n rows.

    Attributes:
        first: Rows of tensor ``i`` are ``first[i]`` to ``first[i + 1]``; int64 ``[num_tensors + 1]``.
        corner_first: Where the offsets (and lengths) of a row begin in the flat columns; int64 ``[n + 1]``.
        offsets: First index in each dimension, all rows one after the other; int64.
        lengths: Extent in each dimension, likewise; int64.
        file_id: Row of the file table; int64 ``[n]``.
        byte_offset: First stored byte in the file; int64 ``[n]``.
        stored_bytes: Stored bytes; int64 ``[n]``.
        digest_first: Where the digests of a row begin in ``digests``; int64 ``[n + 1]``.
        digests: xxh3-64 of every piece; uint64.
        entries: Name in the payload file; Arrow strings ``[n]``.
    """

    first: npt.NDArray[np.int64]
    corner_first: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    file_id: npt.NDArray[np.int64]
    byte_offset: npt.NDArray[np.int64]
    stored_bytes: npt.NDArray[np.int64]
    digest_first: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    entries: pa.Array

    def rows_of(self, tensor_id: int) -> range:
        """Rows that tile one tensor."""
        return range(int(self.first[tensor_id]), int(self.first[tensor_id + 1]))

    def corners_of(
        self, tensor_id: int, num_dims: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets and lengths of the boxes of one tensor, int64 ``[num_boxes, num_dims]`` each."""
        rows = self.rows_of(tensor_id)
        part = slice(int(self.corner_first[rows.start]), int(self.corner_first[rows.stop]))
        shape = (len(rows), num_dims)
        return self.offsets[part].reshape(shape), self.lengths[part].reshape(shape)

    def box(self, row: int) -> Box:
        """The box of one row."""
        part = slice(int(self.corner_first[row]), int(self.corner_first[row + 1]))
        return Box(tuple(self.offsets[part].tolist()), tuple(self.lengths[part].tolist()))

    def tensor_id(self, row: int) -> int:
        """Tensor that one row belongs to."""
        return int(np.searchsorted(self.first, row, side="right")) - 1

    def digests_of(self, row: int) -> npt.NDArray[np.uint64]:
        """Digests of the pieces of one row, in order."""
        return self.digests[int(self.digest_first[row]) : int(self.digest_first[row + 1])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """What is stored, and where.

    Attributes:
        tensors: Global tensors, sorted by (group, key); the index is the tensor id.
        boxes: How they are cut and where the parts lie.
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
        tensor = self.tensors[tensor_id]
        offsets, lengths = self.boxes.corners_of(tensor_id, len(tensor.shape))
        if len(offsets) == 1 and not offsets.any() and tuple(lengths[0].tolist()) == tensor.shape:
            return
        try:
            check_tiling(tensor.shape, offsets, lengths)
        except TilingError as error:
            raise TilingError(f"{tensor.group}/{tensor.key}: {error}") from None


def decode_tables(read: Callable[[str], bytes], where: str) -> Tables:
    """Read and cross-check the four tables of a checkpoint.

    Args:
        read: Gives the verified bytes of a metadata file by name.
        where: Directory of the tables, for messages.

    Raises:
        FormatError: Any table is malformed, or they contradict each other or themselves.
        UnsupportedVersion: A codec this release does not know.
    """

    def table(name: str) -> pa.Table:
        return decode_table(name, read(name), f"{where}/{name}")

    tensors, box_counts = _tensor_rows(table("tensors.parquet"), f"{where}/tensors.parquet")
    files = _file_rows(table("files.parquet"), f"{where}/files.parquet")
    boxes = _box_table(table("shards.parquet"), table("stored.parquet"), tensors, box_counts, files, where)
    return Tables(tensors=tensors, boxes=boxes, files=files)


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
            raise FormatError(f"{name}: impossible shape {shape}")
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


def _box_table(
    shards: pa.Table,
    stored: pa.Table,
    tensors: Sequence[TensorRow],
    box_counts: npt.NDArray[np.int64],
    files: Sequence[FileRow],
    where: str,
) -> BoxTable:
    num_boxes = shards.num_rows
    if stored.num_rows != num_boxes:
        raise FormatError(f"{where}: {num_boxes} rows in shards.parquet, {stored.num_rows} in stored.parquet")
    tensor_id = _ints(shards, "tensor_id")
    if int(box_counts.sum()) != num_boxes or not np.array_equal(
        tensor_id, np.repeat(np.arange(len(tensors)), box_counts)
    ):
        raise FormatError(
            f"{where}/shards.parquet: rows do not follow the tensors and box counts of tensors.parquet"
        )
    file_id = _ints(stored, "file_id")
    if not np.array_equal(file_id, _ints(shards, "file_id")):
        raise FormatError(f"{where}: shards.parquet and stored.parquet disagree about files")
    if num_boxes and not (file_id.min() >= 0 and file_id.max() < len(files)):
        raise FormatError(f"{where}/shards.parquet: a file_id that files.parquet lacks")
    codecs = set(stored.column("codec").unique().to_pylist())
    if not codecs <= {CODEC_NONE}:
        raise UnsupportedVersion(
            f"{where}/stored.parquet: codec {sorted(codecs - {CODEC_NONE})[0]!r} is not known to this release; "
            "use a newer one to read it"
        )

    offsets, corner_first = _lists(shards, "offsets")
    lengths, length_first = _lists(shards, "lengths")
    num_dims = np.asarray([len(tensor.shape) for tensor in tensors], dtype=np.int64)[tensor_id]
    expected = np.concatenate([[0], np.cumsum(num_dims)])
    if not (np.array_equal(corner_first, expected) and np.array_equal(length_first, expected)):
        raise FormatError(f"{where}/shards.parquet: a box has not as many dimensions as its tensor")
    digests, digest_first = _lists(stored, "xxh3")
    boxes = BoxTable(
        first=np.concatenate([[0], np.cumsum(box_counts)]).astype(np.int64),
        corner_first=corner_first,
        offsets=offsets,
        lengths=lengths,
        file_id=file_id,
        byte_offset=_ints(stored, "byte_offset"),
        stored_bytes=_ints(stored, "stored_bytes"),
        digest_first=digest_first,
        digests=digests,
        entries=shards.column("entry").combine_chunks(),
    )
    _check_sizes(boxes, tensors, tensor_id, where)
    _check_places(boxes, files, where)
    return boxes


def _check_sizes(
    boxes: BoxTable, tensors: Sequence[TensorRow], tensor_id: npt.NDArray[np.int64], where: str
) -> None:
    """Each box is aligned, holds its elements' bytes, and has one digest for each piece."""
    if not len(tensor_id):
        return
    itemsize = np.asarray([dtype_of(t.dtype, where).itemsize for t in tensors], dtype=np.int64)[tensor_id]
    ends = np.concatenate([[0], np.cumsum(boxes.lengths > 0)])  # all lengths positive, counted per row
    positive = ends[boxes.corner_first[1:]] - ends[boxes.corner_first[:-1]] == np.diff(boxes.corner_first)
    # In floating point first: a product beyond 2⁶³ is found, not wrapped. 0-d boxes have one element.
    logs = np.concatenate([[0.0], np.cumsum(np.log2(np.maximum(boxes.lengths, 1)))])
    small = logs[boxes.corner_first[1:]] - logs[boxes.corner_first[:-1]] < 58
    lengths = np.append(boxes.lengths, 1)  # reduceat wants every start inside the array
    elements = np.multiply.reduceat(lengths, boxes.corner_first[:-1])
    elements = np.where(np.diff(boxes.corner_first) == 0, 1, elements)
    fits = positive & small & (elements * itemsize == boxes.stored_bytes)
    fits &= boxes.byte_offset % itemsize == 0
    fits &= np.diff(boxes.digest_first) == -(-boxes.stored_bytes // PIECE_BYTES)
    if not fits.all():
        row = int(np.argmin(fits))
        tensor = tensors[int(tensor_id[row])]
        raise FormatError(
            f"{where}/stored.parquet: {tensor.group}/{tensor.key}: {int(boxes.stored_bytes[row])} bytes at "
            f"{int(boxes.byte_offset[row])} with {len(boxes.digests_of(row))} digests do not add up with a box "
            f"of lengths {list(boxes.box(row).lengths)} of {tensor.dtype}"
        )


def _check_places(boxes: BoxTable, files: Sequence[FileRow], where: str) -> None:
    """The boxes of each file follow each other from the end of its header to its end."""
    order = np.lexsort((boxes.byte_offset, boxes.file_id))
    file_id = boxes.file_id[order]
    begin = boxes.byte_offset[order]
    end = begin + boxes.stored_bytes[order]
    starts = np.searchsorted(file_id, np.arange(len(files) + 1))
    for index, file in enumerate(files):
        part = slice(int(starts[index]), int(starts[index + 1]))
        edges = np.concatenate([[file.header_bytes], end[part]])
        if not (np.array_equal(edges[:-1], begin[part]) and int(edges[-1]) == file.num_bytes):
            raise FormatError(
                f"{where}/stored.parquet: boxes in {file.path} leave holes, overlap or leave the file"
            )


def _ints(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)


def _lists(table: pa.Table, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A list column as its flat values and where each row begins in them."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)
    first = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy()[first[0] : first[-1]], first - first[0]
