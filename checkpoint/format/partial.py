"""Reading some row groups of a table, each verified by itself, instead of the whole file.

The manifest vouches for the footer, the footer for the row groups.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from checkpoint.errors import CorruptCheckpoint, FormatError
from checkpoint.format.digest import digest_hex
from checkpoint.format.manifest import Manifest, check_size
from checkpoint.format.tables import ROW_GROUPS, decode_table
from storage import Store

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RowGroups:
    """The row groups of a table, by the digits of the footer.

    Attributes:
        first_row: First row of each, and the number of rows at the end; int64 ``[n + 1]``.
        begin: First byte of each in the file; int64 ``[n]``.
        end: One past the last byte; int64 ``[n]``.
        xxh3: Digest of each, 16 hex digits.
    """

    first_row: _Ints
    begin: _Ints
    end: _Ints
    xxh3: list[str]


def can_read_rows(manifest: Manifest, name: str) -> bool:
    """Whether the manifest vouches for the footer of a table."""
    return manifest.files[name].footer_bytes is not None


def read_rows(
    store: Store, manifest: Manifest, name: str, num_rows: int, first: _Ints, end: _Ints
) -> pa.Table:
    """Read ranges of rows of a table, and of the file the footer and the row groups that they lie in.

    Args:
        store: The checkpoint directory.
        manifest: Its manifest; vouches for the footer.
        name: File name of the table.
        num_rows: How many rows the whole table must have.
        first: First row of each range, ascending; int64 ``[m]``.
        end: One past the last row of each, no more than the first of the next one; int64 ``[m]``.

    Returns:
        The rows of the ranges, one after the other.

    Raises:
        CorruptCheckpoint: The file is missing, of another size, or a part that was read does not match its digest.
        FormatError: It is not a table, or has not so many rows.
    """
    path = f"{manifest.data_dir}/{name}"
    where = f"{store.url}/{path}"
    expected = manifest.files[name]
    assert expected.footer_bytes is not None, "asked before"
    check_size(store, path, expected.num_bytes)
    # As large as the file, but memory is taken only for what is filled in: everything is found where it belongs.
    data = memoryview(np.zeros(expected.num_bytes, dtype=np.uint8).data)
    footer = expected.num_bytes - expected.footer_bytes
    store.read_ranges([(path, footer, expected.num_bytes)], into=[data[footer:]])
    if digest_hex(data[footer:]) != expected.footer_xxh3:
        raise CorruptCheckpoint(
            f"{where}: the digest of its footer does not match the manifest; the file was changed after the commit"
        )
    groups = _row_groups(data, footer, where)
    if groups.first_row[-1] != num_rows:
        raise FormatError(
            f"{where}: {int(groups.first_row[-1])} rows, but the box counts of tensors.parquet add up to {num_rows}"
        )
    chosen = _overlapping(groups, first, end)
    parts = [slice(int(groups.begin[one]), int(groups.end[one])) for one in chosen]
    store.read_ranges([(path, part.start, part.stop) for part in parts], into=[data[part] for part in parts])
    for one, part in zip(chosen, parts, strict=True):
        if digest_hex(data[part]) != groups.xxh3[one]:
            raise CorruptCheckpoint(
                f"{where}: bytes {part.start}..{part.stop} do not match their digest; the file was changed after the "
                "commit"
            )
    table = decode_table(name, data, where, row_groups=chosen)
    # Where the rows of each chosen row group begin among those decoded.
    sizes = np.diff(groups.first_row)[chosen]
    shift = np.zeros(len(groups.begin), dtype=np.int64)
    shift[chosen] = np.cumsum(sizes) - sizes - groups.first_row[chosen]
    at = np.searchsorted(groups.first_row, first, side="right") - 1
    pieces = [
        table.slice(begin, length)
        for begin, length in zip((first + shift[at]).tolist(), (end - first).tolist(), strict=True)
    ]
    return pa.concat_tables(pieces).combine_chunks() if pieces else table.slice(0, 0)


def _row_groups(data: memoryview, limit: int, where: str) -> _RowGroups:
    try:
        footer = pq.read_metadata(pa.BufferReader(data))
        rows = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
        listed: Any = json.loads((footer.metadata or {})[ROW_GROUPS.encode()])
        groups = _RowGroups(
            first_row=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
            begin=np.asarray([one["begin"] for one in listed], dtype=np.int64),
            end=np.asarray([one["end"] for one in listed], dtype=np.int64),
            xxh3=[str(one["xxh3"]) for one in listed],
        )
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"{where}: no list of row groups in its footer ({type(error).__name__}: {error})"
        ) from None
    fits = len(groups.begin) == len(rows) and min(rows, default=0) >= 0
    fits = fits and bool(((groups.begin >= 0) & (groups.begin <= groups.end) & (groups.end <= limit)).all())
    if not fits:
        raise FormatError(f"{where}: the list of row groups in its footer does not fit the file")
    return groups


def _overlapping(groups: _RowGroups, first: _Ints, end: _Ints) -> list[int]:
    """Row groups that ranges of rows lie in, ascending."""
    is_needed = np.zeros(len(groups.begin), dtype=np.bool_)
    low = np.searchsorted(groups.first_row, first, side="right") - 1
    high = np.searchsorted(groups.first_row, end, side="left")
    for one, other in zip(low.tolist(), high.tolist(), strict=True):
        is_needed[one:other] = True
    return [int(one) for one in np.flatnonzero(is_needed)]
