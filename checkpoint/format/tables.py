"""The Parquet tables: their columns, how they are encoded, and what is checked before one is decoded."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import FormatError

_ROW_GROUP_ROWS: Final = 8192
_MAX_ROWS: Final = 1 << 27
_MAX_DECODED_BYTES: Final = 16 << 30

# zstd makes a constant column 900 times smaller; the boxes of 300 tensors cut alike over 256 ranks, 12 times.
_MAX_EXPANSION: Final = 500
_SMALL_BYTES: Final = 16 << 20


_int64s = pa.list_(pa.int64())

SCHEMAS: Final[dict[str, pa.Schema]] = {
    "tensors.parquet": pa.schema(
        {
            "tensor_id": pa.int64(),
            "group": pa.string(),
            "key": pa.string(),
            "dtype": pa.string(),
            "shape": _int64s,
            "nbytes": pa.int64(),
            "box_count": pa.int64(),
            "splits": pa.list_(
                pa.struct(
                    {"name": pa.string(), "dim": pa.int32(), "offset": pa.int64(), "length": pa.int64()}
                )
            ),
        }
    ),
    "shards.parquet": pa.schema(
        {
            "tensor_id": pa.int64(),
            "offsets": _int64s,
            "lengths": _int64s,
            "file_id": pa.int64(),
            "entry": pa.string(),
        }
    ),
    "stored.parquet": pa.schema(
        {
            "file_id": pa.int64(),
            "byte_offset": pa.int64(),
            "stored_bytes": pa.int64(),
            "codec": pa.string(),
            "piece_bytes": _int64s,
            "xxh3": pa.list_(pa.uint64()),
        }
    ),
    "files.parquet": pa.schema(
        {
            "file_id": pa.int64(),
            "path": pa.string(),
            "num_bytes": pa.int64(),
            "header_bytes": pa.int64(),
            "header_xxh3": pa.uint64(),
        }
    ),
    "rank_objects.parquet": pa.schema({"rank": pa.int64(), "key": pa.string(), "value": pa.string()}),
}
"""Columns by file. A writer may add columns; a reader ignores those it does not know."""


def encode_table(name: str, columns: dict[str, Any]) -> bytes:
    """The bytes of one table.

    Args:
        name: File name, a key of :data:`SCHEMAS`.
        columns: All of its columns, as lists or Arrow arrays.
    """
    schema = SCHEMAS[name]
    arrays = [
        column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, type=field.type)
        for field in schema
        for column in (columns[field.name],)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=schema), sink, row_group_size=_ROW_GROUP_ROWS, compression="zstd"
    )
    return bytes(sink.getvalue())


def decode_table(name: str, data: bytes, where: str) -> pa.Table:
    """Check and decode one table; one chunk per column.

    Raises:
        FormatError: Not Parquet, columns missing or of another type, nulls, wrong UTF-8, or absurdly large.
    """
    schema = SCHEMAS[name]
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        footer = file.metadata
        decoded_bytes = sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups))
        # Looked at before anything is decoded: what the footer claims bounds what decoding allocates.
        if footer.num_rows > _MAX_ROWS or not 0 <= decoded_bytes <= _MAX_DECODED_BYTES:
            raise FormatError(
                f"{where}: {footer.num_rows} rows of {decoded_bytes} bytes are more than allowed"
            )
        if decoded_bytes > max(_SMALL_BYTES, _MAX_EXPANSION * len(data)):
            raise FormatError(f"{where}: {len(data)} bytes that claim to decode to {decoded_bytes}")
        for field in schema:
            index = file.schema_arrow.get_field_index(field.name)
            if index < 0 or file.schema_arrow.field(index).type != field.type:
                raise FormatError(f"{where}: no column {field.name!r} of type {field.type}")
        table = file.read(columns=schema.names).select(schema.names).combine_chunks()
        table.validate(full=True)
    except pa.ArrowException as error:
        raise FormatError(f"{where}: not a readable Parquet table ({' '.join(str(error).split())})") from None
    except OSError as error:  # Thrift and page faults of pyarrow
        raise FormatError(f"{where}: not a readable Parquet table ({' '.join(str(error).split())})") from None
    for field in schema:
        column = table.column(field.name)
        nullable = field.name in ("splits", "piece_bytes")
        inner = pc.list_flatten(column) if pa.types.is_list(field.type) else column
        if not nullable and (column.null_count or inner.null_count):
            raise FormatError(f"{where}: null in column {field.name!r}")
    return table
