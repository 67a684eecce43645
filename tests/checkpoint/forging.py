"""Checkpoints that someone made wrong on purpose: every digest fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from checkpoint.format.digest import digest_hex
from checkpoint.format.manifest import MetadataFile, encode_manifest, read_manifest
from storage import Store

Row = dict[str, Any]


def forge_file(saved: Path, name: str, data: bytes) -> None:
    """Replace a metadata file and make the manifest vouch for it."""
    manifest, _ = read_manifest(Store(saved))
    (saved / manifest.data_dir / name).write_bytes(data)
    files = {**manifest.files, name: MetadataFile(num_bytes=len(data), xxh3=digest_hex(data))}
    (saved / "manifest.json").write_bytes(encode_manifest(replace(manifest, files=files)))


def forge_rows(saved: Path, name: str, change: Callable[[list[Row]], None], schema: Any = None) -> None:
    """Change rows of a table."""
    path = saved / read_manifest(Store(saved))[0].data_dir / name
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema or table.schema), sink)
    forge_file(saved, name, bytes(sink.getvalue()))


# Thrift's compact protocol: structs as {field: (type, value)}, lists as (type, values), anything else as it is.

Struct = dict[int, tuple[int, Any]]
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
_INTEGERS = (4, 5, 6)


def decode_struct(data: bytes, at: int = 0) -> tuple[Struct, int]:
    """A struct, and where it ends."""
    found: Struct = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(data, at)
        value, at = _decode(head & 15, data, at)
        found[field] = (head & 15, value)
    return found, at + 1


def encode_struct(struct: Struct) -> bytes:
    """The bytes of a struct; all fields with their numbers, which is allowed."""
    return (
        b"".join(
            bytes([kind]) + _varint_bytes(field << 1) + _encode(kind, value)
            for field, (kind, value) in sorted(struct.items())
        )
        + b"\0"
    )


def _decode(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return None, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind in _INTEGERS:
        return _zigzag(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == _STRUCT:
        return decode_struct(data, at)
    assert kind == _LIST, kind
    head, at = data[at], at + 1
    length = head >> 4
    if length == 15:
        length, at = _varint(data, at)
    values = []
    for _ in range(length):
        value, at = _decode(head & 15, data, at)
        values.append(value)
    return (head & 15, values), at


def _encode(kind: int, value: Any) -> bytes:
    if kind in (_TRUE, _FALSE):
        return b""
    if kind == _BYTE:
        return bytes([value])
    if kind in _INTEGERS:
        return _varint_bytes((value << 1) ^ (value >> 63))
    if kind == _BINARY:
        return _varint_bytes(len(value)) + value
    if kind == _STRUCT:
        return encode_struct(value)
    inner, values = value
    return (
        bytes([0xF0 | inner]) + _varint_bytes(len(values)) + b"".join(_encode(inner, one) for one in values)
    )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint_bytes(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def change_footer(data: bytes, change: Callable[[Struct], None]) -> bytes:
    """A Parquet file with a changed ``FileMetaData``."""
    length = int.from_bytes(data[-8:-4], "little")
    footer, _ = decode_struct(data[-8 - length : -8])
    change(footer)
    encoded = encode_struct(footer)
    return data[: -8 - length] + encoded + len(encoded).to_bytes(4, "little") + b"PAR1"


def change_page(
    data: bytes, path: str, change: Callable[[Struct], None], *, dictionary: bool = False
) -> bytes:
    """A Parquet file of one row group with a changed page header.

    Args:
        data: The file.
        path: Which column, as in ``xxh3.list.element``.
        change: Changes the ``PageHeader``.
        dictionary: That of the page of the dictionary rather than of the first one of data.
    """
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    index = next(one for one in range(group.num_columns) if group.column(one).path_in_schema == path)
    column = group.column(index)
    at = column.dictionary_page_offset if dictionary else column.data_page_offset
    header, end = decode_struct(data, at)
    change(header)
    encoded = encode_struct(header)
    grown = len(encoded) - (end - at)

    def move(footer: Struct) -> None:
        for number, chunk in enumerate(columns_of(footer)):
            if number == index:
                chunk[7] = (6, chunk[7][1] + grown)
            for offset in (9, 11):
                if offset in chunk and chunk[offset][1] > at:
                    chunk[offset] = (6, chunk[offset][1] + grown)

    return change_footer(data[:at] + encoded + data[end:], move)


def columns_of(footer: Struct) -> list[Struct]:
    """The ``ColumnMetaData`` of the first row group."""
    _, (_, groups) = footer[4]
    _, (_, chunks) = groups[0][1]
    return [chunk[3][1] for chunk in chunks]
