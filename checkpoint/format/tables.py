"""The Parquet tables: their columns, how they are encoded, and what is checked before one is decoded."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import FormatError
from checkpoint.format.digest import digest_hex
from checkpoint.format.pages import decoded_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

ROW_GROUPS: Final = "omniload.row_groups"
"""Key in the footer's metadata: JSON list of ``begin``, ``end`` and ``xxh3`` of the bytes of each row group."""

PARTLY_READ: Final = frozenset({"shards.parquet", "stored.parquet"})
"""Tables of which a reader may want some row groups only. Both have the same ones."""

_ROW_GROUP_ROWS: Final = 16_384
_RANK_OBJECT_ROWS: Final = 64  # some ten kilobytes each, of which a rank needs its own
_MAX_ROWS: Final = 1 << 27
_MAX_DECODED_BYTES: Final = 16 << 30

# A column of one value takes next to nothing; the tables of 300 tensors cut alike over 256 ranks, 12 times less than
# when decoded. What decodes to less than the second is never refused.
_MAX_EXPANSION: Final = 500
_SMALL_BYTES: Final = 256 << 20

_NOT_DECODED: Final = frozenset({"splits"})  # nothing reads it so far


_int64s = pa.list_(pa.int64())

# Files and tensors are numbered in order, so differences are small; digests are noise; all else repeats.
_ENCODINGS: Final[dict[str, dict[str, Any]]] = {
    "tensors.parquet": {
        "use_dictionary": ["group", "dtype", "shape.list.element", "nbytes", "box_count"],
        "column_encoding": {"tensor_id": "DELTA_BINARY_PACKED"},
    },
    "files.parquet": {
        "use_dictionary": ["num_bytes", "header_bytes"],
        "column_encoding": {"file_id": "DELTA_BINARY_PACKED"},
    },
    "shards.parquet": {
        "use_dictionary": ["offsets.list.element", "lengths.list.element"],
        "column_encoding": {"tensor_id": "DELTA_BINARY_PACKED", "file_id": "DELTA_BINARY_PACKED"},
        "write_statistics": ["tensor_id"],
    },
    "stored.parquet": {
        "use_dictionary": ["byte_offset", "stored_bytes", "codec", "piece_bytes.list.element"],
        "column_encoding": {"file_id": "DELTA_BINARY_PACKED", "xxh3.list.element": "PLAIN"},
        "write_statistics": False,
    },
    "rank_objects.parquet": {"use_dictionary": ["key", "value"], "write_statistics": ["rank"]},
}

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


def encode_table(name: str, columns: dict[str, Any], *, first_rows: Sequence[int] | None = None) -> bytes:
    """The bytes of one table.

    Args:
        name: File name, a key of :data:`SCHEMAS`.
        columns: All of its columns, as lists or Arrow arrays.
        first_rows: First row of each row group; by default they are of equal size.
    """
    schema = SCHEMAS[name]
    arrays = [
        column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, type=field.type)
        for field in schema
        for column in (columns[field.name],)
    ]
    table = pa.Table.from_arrays(arrays, schema=schema)
    if first_rows is None:
        step = _RANK_OBJECT_ROWS if name == "rank_objects.parquet" else _ROW_GROUP_ROWS
        first_rows = range(0, table.num_rows, step)
    sink = io.BytesIO()
    groups = []
    with pq.ParquetWriter(sink, schema, compression="zstd", **_ENCODINGS.get(name, {})) as writer:
        for start, end in pairwise([*first_rows, table.num_rows]):
            begin = sink.tell()
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
            with sink.getbuffer() as written:
                digest = digest_hex(written[begin:])
                groups.append({"begin": begin, "end": len(written), "xxh3": digest})
        writer.add_key_value_metadata({ROW_GROUPS: json.dumps(groups)})
    return sink.getvalue()


def footer_of(data: bytes) -> bytes:
    """The footer of a table: all that comes after its last row group."""
    num_bytes = int.from_bytes(data[-8:-4], "little") + 8
    return data[-num_bytes:]


def decode_table(
    name: str,
    data: Buffer,
    where: str,
    *,
    rank: int | None = None,
    row_groups: Sequence[int] | None = None,
) -> pa.Table:
    """Check and decode one table; one chunk per column, ``splits`` left out.

    What that allocates is bounded before it is: by 256 MiB, or for a larger file 500 times its size.

    Args:
        name: File name, a key of :data:`SCHEMAS`.
        data: The whole file.
        where: Its path or URL, for messages.
        rank: Gives only the rows whose column ``rank`` is this.
        row_groups: Decodes only these; ``data`` then needs to hold them and the footer, each in its place.

    Raises:
        FormatError: Not Parquet, columns missing or of another type, nulls, wrong UTF-8, or absurdly large.
    """
    schema = SCHEMAS[name]
    try:
        footer = _checked_footer(schema, data, where, row_groups)
        columns = [field.name for field in schema if field.name not in _NOT_DECODED]
        strings = [one for one in columns if pa.types.is_string(schema.field(one).type)]
        # A string of a dictionary costs a few bits each time, and as many bytes as it has once it is spelled out.
        file = pq.ParquetFile(pa.BufferReader(data), metadata=footer, read_dictionary=strings)
        groups = range(footer.num_row_groups) if row_groups is None else row_groups
        table = file.read_row_groups(list(groups), columns=columns).select(columns).combine_chunks()
        table.validate(full=True)
        if rank is not None:
            table = table.filter(pc.equal(table.column("rank"), rank))
        num_bytes = sum(_spelled_out_bytes(chunk) for one in strings for chunk in table.column(one).chunks)
        _check_decoded(num_bytes, memoryview(data).nbytes, where)
        table = table.cast(pa.schema([schema.field(one) for one in columns])).combine_chunks()
    # OSError: Thrift and page faults of pyarrow. UnicodeDecodeError: names of columns.
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: not a readable Parquet table ({' '.join(str(error).split())})") from None
    for one in columns:
        column = table.column(one)
        inner = pc.list_flatten(column) if pa.types.is_list(schema.field(one).type) else column
        if one != "piece_bytes" and (column.null_count or inner.null_count):
            raise FormatError(f"{where}: null in column {one!r}")
    return table


def _checked_footer(
    schema: pa.Schema, data: Buffer, where: str, row_groups: Sequence[int] | None
) -> pq.FileMetaData:
    """The footer of a file whose columns are those of a schema, and whose pages decode to a bounded size."""
    file = pq.ParquetFile(pa.BufferReader(data))
    found = file.schema_arrow
    for field in schema:
        index = found.get_field_index(field.name)
        if index < 0 or found.field(index).type != field.type:
            raise FormatError(f"{where}: no column {field.name!r} of type {field.type}")
    footer = file.metadata
    if not 0 <= footer.num_rows <= _MAX_ROWS:
        raise FormatError(f"{where}: {footer.num_rows} rows, allowed are {_MAX_ROWS}")
    view = memoryview(data)
    try:
        num_bytes = decoded_bytes(view, footer, set(schema.names), row_groups=row_groups)
        _check_decoded(num_bytes, view.nbytes, where)
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: not a readable Parquet table ({error})") from None
    return footer


def _check_decoded(num_bytes: int, file_bytes: int, where: str) -> None:
    if num_bytes > min(max(_SMALL_BYTES, _MAX_EXPANSION * file_bytes), _MAX_DECODED_BYTES):
        raise FormatError(
            f"{where}: {file_bytes} bytes that decode to {num_bytes}, more than any honest table does"
        )


def _spelled_out_bytes(strings: pa.DictionaryArray) -> int:
    """Size of the strings of a column if each is spelled out."""
    lengths = pc.cast(pc.binary_length(strings.dictionary), pa.int64())
    return pc.sum(pc.take(lengths, strings.indices)).as_py() or 0
