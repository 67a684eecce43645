"""What decoding a Parquet table allocates, told by its pages before any of them is decoded.

A few bytes can claim any number of values: runs of one dictionary entry, of one bit width of zero, of one level. The
footer says how many values a column has, but each page says it again, and decoders believe the page. So all page
headers are walked here, which costs microseconds each, and what they claim must agree with the footer.

Footer and page headers are structs in Thrift's compact protocol
(https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift). They are parsed here rather than
asked of pyarrow, which ends the process if a row group has not as many columns as the schema.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Final, TypeAlias

import pyarrow.parquet as pq

_Struct: TypeAlias = dict[int, tuple[int, Any]]
"""Type and value by field; of what is neither number, struct nor list of structs, no value."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
_MAX_DEPTH: Final = 8

_MAGIC_BYTES: Final = 4
_LENGTH_BYTES: Final = 4

# Types of pages, each with the field of PageHeader that describes it, and in that the field of its encoding.
_DICTIONARY_PAGE: Final = 2
_PAGES: Final = {0: (5, 2), _DICTIONARY_PAGE: (7, 2), 3: (8, 4)}

# All but DELTA_BYTE_ARRAY (7), where a string may repeat all of the one before it for nothing, and what is deprecated.
_ENCODINGS: Final = frozenset({0, 2, 3, 5, 6, 8, 9})

# A decoded value takes up to 8 bytes and two levels of 2; one of a dictionary of strings a pointer and a length.
_VALUE_BYTES: Final = 12
_DICTIONARY_VALUE_BYTES: Final = 16


def decoded_bytes(
    data: bytes | memoryview,
    footer: pq.FileMetaData,
    names: Set[str],
    *,
    row_groups: Sequence[int] | None = None,
) -> int:
    """A bound on the memory that decoding columns takes, strings kept in their dictionaries.

    Args:
        data: The file, of which only the footer and the row groups need be there.
        footer: Its footer, as pyarrow has read it.
        names: The columns.
        row_groups: Which row groups; all by default.

    Raises:
        ValueError: A page lies outside its column, or the pages of a column do not have the number of values that the
            footer says, or an encoding may take more memory than its pages tell.
    """
    view = memoryview(data)
    end = len(view) - _LENGTH_BYTES - _MAGIC_BYTES
    begin = end - int.from_bytes(view[end : end + _LENGTH_BYTES], "little")
    if begin < 0:
        raise ValueError("a footer that is larger than the file")
    groups = _structs(_struct(view, begin, end, 0)[0], 4)
    leaves = [footer.schema.column(index).path for index in range(footer.num_columns)]
    num_bytes = 0
    for group in range(len(groups)) if row_groups is None else row_groups:
        columns = _structs(groups[group], 1) if 0 <= group < len(groups) else []
        if len(columns) != len(leaves):
            raise ValueError(f"row group {group} has {len(columns)} columns, the schema {len(leaves)}")
        for path, column in zip(leaves, columns, strict=True):
            if path.partition(".")[0] in names:
                num_bytes += _column_bytes(view, path, _value(column, 3, _STRUCT, {}))
    return num_bytes


def _column_bytes(view: memoryview, name: str, column: _Struct) -> int:
    num_values, num_bytes, begin = (_value(column, field, _I64, -1) for field in (5, 7, 9))
    if num_values <= 0:
        return 0  # then decoders look at no page, and there may be none where the footer says
    dictionary = _value(column, 11, _I64, 0)
    if 0 < dictionary < begin:
        begin = dictionary
    end = begin + num_bytes
    if not 0 <= begin <= end <= len(view):
        raise ValueError(f"column {name}: bytes {begin}..{end} are outside of the file")
    decoded = found = 0
    while begin < end:
        header, begin = _struct(view, begin, end, 0)
        size, stored = _value(header, 2, _I32, -1), _value(header, 3, _I32, -1)
        if size < 0 or not 0 <= stored <= end - begin:
            raise ValueError(f"column {name}: a page of {stored} bytes, {size} when decompressed")
        begin += stored
        kind = _value(header, 1, _I32, -1)
        if kind not in _PAGES:
            raise ValueError(f"column {name}: a page of type {kind}")
        described_by, encoded_by = _PAGES[kind]
        page = _value(header, described_by, _STRUCT, {})
        claimed, encoding = _value(page, 1, _I32, -1), _value(page, encoded_by, _I32, -1)
        if claimed < 0 or encoding not in _ENCODINGS:
            raise ValueError(f"column {name}: a page of {claimed} values in encoding {encoding}")
        is_dictionary = kind == _DICTIONARY_PAGE
        decoded += size + claimed * (_DICTIONARY_VALUE_BYTES if is_dictionary else _VALUE_BYTES)
        found += 0 if is_dictionary else claimed
    if found != num_values:
        raise ValueError(f"column {name}: {num_values} values, its pages have {found}")
    return decoded


def _value(struct: _Struct, field: int, kind: int, missing: Any) -> Any:
    """A field; one of another type does not count, as it does not for any parser of Thrift."""
    found, value = struct.get(field, (kind, missing))
    return value if found == kind else missing


def _structs(struct: _Struct, field: int) -> list[_Struct]:
    return [one for one in _value(struct, field, _LIST, []) if isinstance(one, dict)]


def _struct(view: memoryview, at: int, end: int, depth: int) -> tuple[_Struct, int]:
    """A struct, and where it ends.

    Raises:
        ValueError: It does not end in time, or is not what the protocol allows.
    """
    found: _Struct = {}
    field = 0
    while True:
        head, at = _byte(view, at, end)
        if head == 0:
            return found, at
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(view, at, end)
        if field in found:
            raise ValueError(f"field {field} twice in a header")  # parsers differ in which of them counts
        kind = head & 15
        value, at = (None, at) if kind in (_TRUE, _FALSE) else _read(kind, view, at, end, depth)
        found[field] = kind, value


def _read(kind: int, view: memoryview, at: int, end: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE, _BYTE):
        return None, _byte(view, at, end)[1]
    if kind in (_I16, _I32, _I64):
        return _zigzag(view, at, end)
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        length, at = _varint(view, at, end)
        return None, at + length
    if depth >= _MAX_DEPTH or kind not in (_LIST, _STRUCT):
        raise ValueError(f"a header with a field of type {kind} at depth {depth}")
    if kind == _STRUCT:
        return _struct(view, at, end, depth + 1)
    head, at = _byte(view, at, end)
    length = head >> 4
    if length == 15:
        length, at = _varint(view, at, end)
    if length > end - at:  # an element has a byte at least
        raise ValueError(f"a list of {length} elements in a header")
    values = []
    for _ in range(length):
        value, at = _read(head & 15, view, at, end, depth + 1)
        values.append(value)
    return values, at


def _byte(view: memoryview, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise ValueError("a header that does not end")
    return view[at], at + 1


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = _byte(view, at, end)
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a header with a number of more than 64 bits")


def _zigzag(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value, at = _varint(view, at, end)
    return (value >> 1) ^ -(value & 1), at
