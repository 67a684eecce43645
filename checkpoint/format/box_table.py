"""Stored boxes and their pieces as columns, and what must hold of the two tables that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.boxes import Box
from checkpoint.errors import FormatError, UnsupportedVersion
from checkpoint.format.codec import CODEC_NONE, CODECS, RAW_PIECE_BYTES, max_stored_bytes
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.rows import TensorRow

_Ints = npt.NDArray[np.int64]

# No box has more elements than fit an int64 with room for the size of an element.
_MAX_LOG2_ELEMENTS: Final = 58


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoxTable:
    """Stored boxes, sorted by tensor, then by offset, one row each (n rows), and the pieces they are stored in.

    Attributes:
        first: Rows of tensor ``i`` are ``first[i]`` to ``first[i + 1]``; int64 ``[num_tensors + 1]``.
        corner_first: Where the offsets (and lengths) of a row begin in the flat columns; int64 ``[n + 1]``.
        offsets: First index in each dimension, all rows one after the other; int64.
        lengths: Extent in each dimension, likewise; int64.
        file_id: Row of the file table; int64 ``[n]``.
        byte_offset: First stored byte in the file; int64 ``[n]``.
        stored_bytes: Stored bytes; int64 ``[n]``.
        raw_bytes: Bytes of the elements; int64 ``[n]``. As many are stored unless the box is compressed.
        compressed: Whether the pieces are compressed; bool ``[n]``.
        piece_first: Pieces of a row are ``piece_first[row]`` to ``piece_first[row + 1]``; int64 ``[n + 1]``.
        piece_offset: First stored byte of each piece in its file; int64 ``[num_pieces]``.
        piece_bytes: Stored bytes of each piece; int64 ``[num_pieces]``.
        digests: xxh3-64 of every piece as stored; uint64 ``[num_pieces]``.
    """

    first: _Ints
    corner_first: _Ints
    offsets: _Ints
    lengths: _Ints
    file_id: _Ints
    byte_offset: _Ints
    stored_bytes: _Ints
    raw_bytes: _Ints
    compressed: npt.NDArray[np.bool_]
    piece_first: _Ints
    piece_offset: _Ints
    piece_bytes: _Ints
    digests: npt.NDArray[np.uint64]

    def rows_of(self, tensor_id: int) -> range:
        """Rows that tile one tensor."""
        return range(int(self.first[tensor_id]), int(self.first[tensor_id + 1]))

    def corners_of(self, tensor_id: int, num_dims: int) -> tuple[_Ints, _Ints]:
        """Offsets and lengths of the boxes of one tensor, int64 ``[num_boxes, num_dims]`` each."""
        rows = self.rows_of(tensor_id)
        part = slice(int(self.corner_first[rows.start]), int(self.corner_first[rows.stop]))
        shape = (len(rows), num_dims)
        return self.offsets[part].reshape(shape), self.lengths[part].reshape(shape)

    def padded_corners(self, rows: _Ints, max_dims: int) -> tuple[_Ints, _Ints]:
        """Offsets and lengths of any rows, int64 ``[len(rows), max_dims]`` each.

        Dimensions that a tensor lacks follow at the end, with one element at 0: neither the order of elements nor
        any intersection changes.
        """
        offsets = np.zeros((len(rows), max_dims), dtype=np.int64)
        lengths = np.ones((len(rows), max_dims), dtype=np.int64)
        begin = self.corner_first[rows]
        num_dims = self.corner_first[rows + 1] - begin
        for dim in range(max_dims):
            has = np.flatnonzero(num_dims > dim)
            offsets[has, dim] = self.offsets[begin[has] + dim]
            lengths[has, dim] = self.lengths[begin[has] + dim]
        return offsets, lengths

    def box(self, row: int) -> Box:
        """The box of one row."""
        part = slice(int(self.corner_first[row]), int(self.corner_first[row + 1]))
        return Box(tuple(self.offsets[part].tolist()), tuple(self.lengths[part].tolist()))

    def tensor_id(self, row: int) -> int:
        """Tensor that one row belongs to."""
        return int(np.searchsorted(self.first, row, side="right")) - 1

    def digests_of(self, row: int) -> npt.NDArray[np.uint64]:
        """Digests of the pieces of one row, in order."""
        return self.digests[int(self.piece_first[row]) : int(self.piece_first[row + 1])]

    def raw_piece_bytes(self, row: int) -> int:
        """Bytes of elements in each piece of one row; its last one may have fewer."""
        return RAW_PIECE_BYTES if self.compressed[row] else PIECE_BYTES

    def raw_begin(self, row: int, piece: int) -> int:
        """First byte of a piece in the row-major image of its box."""
        return (piece - int(self.piece_first[row])) * self.raw_piece_bytes(row)

    def raw_bytes_of(self, row: int, first: int, end: int) -> int:
        """Bytes of elements in the pieces ``first`` to ``end`` of one row."""
        stop = min(self.raw_begin(row, end), int(self.raw_bytes[row]))
        return stop - self.raw_begin(row, first)

    def raw_ranges(self, row: _Ints, piece: _Ints) -> tuple[_Ints, _Ints]:
        """First byte, and one past the last, of pieces in the row-major images of their boxes."""
        size = np.where(self.compressed[row], RAW_PIECE_BYTES, PIECE_BYTES)
        begin = (piece - self.piece_first[row]) * size
        return begin, np.minimum(begin + size, self.raw_bytes[row])

    def row_of_piece(self, piece: int) -> int:
        """Row that one piece belongs to."""
        return int(np.searchsorted(self.piece_first, piece, side="right")) - 1


def box_table(
    shards: pa.Table, stored: pa.Table, tensors: Sequence[TensorRow], num_rows: _Ints, where: str
) -> BoxTable:
    """Join the two tables of boxes and check that what they say adds up.

    Args:
        shards: Rows of ``shards.parquet``.
        stored: The same rows of ``stored.parquet``.
        tensors: All tensors.
        num_rows: How many of the rows each tensor has, in order; int64 ``[num_tensors]``.
        where: Directory of the tables, for messages.

    Raises:
        FormatError: They contradict each other or themselves.
        UnsupportedVersion: A codec this release does not know.
    """
    if stored.num_rows != shards.num_rows:
        raise FormatError(
            f"{where}: {shards.num_rows} rows in shards.parquet, {stored.num_rows} in stored.parquet"
        )
    tensor_id = ints(shards, "tensor_id")
    if int(num_rows.sum()) != len(tensor_id) or not np.array_equal(
        tensor_id, np.repeat(np.arange(len(num_rows)), num_rows)
    ):
        raise FormatError(
            f"{where}/shards.parquet: rows do not follow the tensors and box counts of tensors.parquet"
        )
    file_id = ints(stored, "file_id")
    if not np.array_equal(file_id, ints(shards, "file_id")):
        raise FormatError(f"{where}: shards.parquet and stored.parquet disagree about files")

    offsets, corner_first = _lists(shards, "offsets")
    lengths, length_first = _lists(shards, "lengths")
    num_dims = np.asarray([len(tensor.shape) for tensor in tensors], dtype=np.int64)[tensor_id]
    expected = _starts(num_dims)
    if not (np.array_equal(corner_first, expected) and np.array_equal(length_first, expected)):
        raise FormatError(f"{where}/shards.parquet: a box has not as many dimensions as its tensor")
    itemsize = np.asarray([DTYPES[one.dtype].itemsize for one in tensors], dtype=np.int64)[tensor_id]
    digests, piece_first = _lists(stored, "xxh3")
    byte_offset, stored_bytes = ints(stored, "byte_offset"), ints(stored, "stored_bytes")
    compressed = _compressed(stored, where)
    raw_bytes = _raw_bytes(lengths, corner_first, itemsize)

    def check(adds_up: npt.NDArray[np.bool_]) -> None:
        if not adds_up.all():
            row = int(np.argmin(adds_up))
            tensor = tensors[int(tensor_id[row])]
            of_row = slice(int(corner_first[row]), int(corner_first[row + 1]))
            raise FormatError(
                f"{where}/stored.parquet: {tensor.group}/{tensor.key}: {int(stored_bytes[row])} bytes at "
                f"{int(byte_offset[row])} with {int(piece_first[row + 1] - piece_first[row])} digests do not add "
                f"up with a box of lengths {lengths[of_row].tolist()} of {tensor.dtype}"
            )

    check(compressed | ((stored_bytes == raw_bytes) & (byte_offset % itemsize == 0)))
    piece_size = np.where(compressed, RAW_PIECE_BYTES, PIECE_BYTES)
    num_pieces = np.diff(piece_first)
    num_sizes = np.asarray(
        pc.fill_null(pc.list_value_length(stored.column("piece_bytes")), 0), dtype=np.int64
    )
    check((raw_bytes > 0) & (byte_offset >= 0) & (num_pieces == -(-raw_bytes // piece_size)))
    check(num_sizes == np.where(compressed, num_pieces, 0))
    # Full, but for the last of each row; every row has one by now.
    raw_piece_bytes = np.repeat(piece_size, num_pieces)
    raw_piece_bytes[piece_first[1:] - 1] = raw_bytes - (num_pieces - 1) * piece_size
    piece_bytes = raw_piece_bytes
    if compressed.any():
        given = np.repeat(compressed, num_pieces)
        sizes = pc.fill_null(pc.list_flatten(stored.column("piece_bytes")), 0)
        piece_bytes = raw_piece_bytes.copy()
        piece_bytes[given] = np.asarray(sizes, dtype=np.int64)
        fits = (piece_bytes > 0) & (~given | (piece_bytes <= max_stored_bytes(RAW_PIECE_BYTES)))
        check(_sums(fits, piece_first) == num_pieces)
        check(_sums(piece_bytes, piece_first) == stored_bytes)
    within = np.cumsum(piece_bytes) - piece_bytes
    return BoxTable(
        first=_starts(num_rows),
        corner_first=corner_first,
        offsets=offsets,
        lengths=lengths,
        file_id=file_id,
        byte_offset=byte_offset,
        stored_bytes=stored_bytes,
        raw_bytes=raw_bytes,
        compressed=compressed,
        piece_first=piece_first,
        piece_offset=within + np.repeat(byte_offset - within[piece_first[:-1]], num_pieces),
        piece_bytes=piece_bytes,
        digests=digests,
    )


def _compressed(stored: pa.Table, where: str) -> npt.NDArray[np.bool_]:
    codec = stored.column("codec")
    unknown = sorted(set(codec.unique().to_pylist()) - set(CODECS))
    if unknown:
        raise UnsupportedVersion(
            f"{where}/stored.parquet: codec {unknown[0]!r} is not known to this release; "
            "use a newer one to read it"
        )
    return np.asarray(pc.not_equal(codec, CODEC_NONE), dtype=np.bool_)


def _raw_bytes(lengths: _Ints, corner_first: _Ints, itemsize: _Ints) -> _Ints:
    """Bytes of the elements of each row; -1 where a length is not positive, or their product absurd."""
    num_dims = np.diff(corner_first)
    positive = _sums(lengths > 0, corner_first) == num_dims
    # In floating point first: a product beyond 2⁶³ is found, not wrapped.
    small = _sums(np.log2(np.maximum(lengths, 1)), corner_first) < _MAX_LOG2_ELEMENTS
    # reduceat wants every start inside the array, and where there is nothing to multiply gives what is there.
    elements = np.multiply.reduceat(np.append(lengths, 1), corner_first[:-1]) if len(num_dims) else num_dims
    return np.where(positive & small, np.where(num_dims == 0, 1, elements) * itemsize, -1)


def _starts(counts: _Ints) -> _Ints:
    """Where each of consecutive runs begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _sums(values: npt.NDArray[Any], first: _Ints) -> npt.NDArray[Any]:
    """Sum of the values of each row."""
    ends = np.concatenate([[0], np.cumsum(values)])
    sums: npt.NDArray[Any] = ends[first[1:]] - ends[first[:-1]]
    return sums


def ints(table: pa.Table, name: str) -> _Ints:
    """An integer column."""
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)


def _lists(table: pa.Table, name: str) -> tuple[npt.NDArray[Any], _Ints]:
    """A list column as its flat values and where each row begins in them."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)
    first = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy()[first[0] : first[-1]], first - first[0]
