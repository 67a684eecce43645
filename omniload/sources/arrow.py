"""Arrow IPC files and streams, and Feather: a row is known by its record batch and its place in that.

A block is the record batches that start in the same MiB of the file, mostly one: tiny ones come together, none is cut.
The row id is ``batch << 32 | row``, which can be told without the batches before and finds the row again:
``pyarrow.ipc.open_file(path).get_batch(row_id >> 32)[row_id & 0xFFFFFFFF]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing
from omniload.sources.arrow_file import BLOCK_BYTES, ArrowFile, Index
from omniload.sources.arrow_lengths import check_lengths
from omniload.sources.listing import Listing
from omniload.sources.protocol import FileEntry
from omniload.sources.recent import Recent
from omniload.sources.table import TableBlock
from storage import Store

_KNOWN_FILES = 8
"""Whose indices are kept, 16 bytes for each record batch: a stream's costs a pass over its headers."""
_BATCH_BITS = 32
_EMPTY_ROWS = 1 << 24
"""Rows that a batch without any bytes may claim; beyond, 8 a byte: a number that memory is asked for by."""
_ALIGNMENT = 64


class ArrowSource:
    """Arrow IPC, in its file form (with a footer; Feather 2 is the same) and its stream form, local or remote.

    Memory: one block as stored and decompressed, with the dictionaries of its file if columns have some. Of a block all
    columns are read; those not asked for are not decompressed. A stream is indexed by a pass over its headers when its
    blocks are first asked for.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._known = Recent(_KNOWN_FILES, lambda file: ArrowFile(self._store, self.files[file]))
        self._num_blocks: dict[int, int] = {}

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{BLOCK_BYTES}"

    def num_blocks(self, file: int) -> int:
        """Runs of record batches of a file.

        Raises:
            CorruptSource: it has no sound footer, or its messages do not follow each other.
        """
        if file not in self._num_blocks:
            self._num_blocks[file] = len(self._file(file).index.blocks) - 1
        return self._num_blocks[file]

    def schema(self, file: int) -> pa.Schema:
        """Columns of a file.

        Raises:
            CorruptSource: it does not begin with them.
        """
        return self._file(file).schema

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> TableBlock:
        """Read a run of record batches, with some or all of their columns.

        Raises:
            ColumnMissing: the file has not all of the columns.
            CorruptSource: its bytes are not Arrow.
        """
        wanted = None if columns is None else list(columns)
        batches = self._batches(file, block, wanted)
        table = pa.Table.from_batches(batches)
        first = int(self._file(file).index.blocks[block])
        ids = [_ids(first + i, batch.num_rows) for i, batch in enumerate(batches)]
        return TableBlock(table if wanted is None else table.select(wanted), np.concatenate(ids))

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: number of each row's batch in the file, above 32 bits for its place in that."""
        return self.read_block(file, block).row_ids

    def close(self) -> None:
        """Nothing stays open."""

    def _file(self, file: int) -> ArrowFile:
        return self._known.get(file)

    def _batches(self, file: int, block: int, wanted: list[str] | None) -> list[pa.RecordBatch]:
        arrow = self._file(file)
        fields = None if wanted is None else self._fields(file, wanted)
        index = arrow.index
        first, last = index.blocks[block : block + 2].tolist()
        memory = self._memory(file, first, last)
        where = int(index.starts[first])
        try:
            check_lengths(memoryview(memory))
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
            with pa.ipc.open_stream(memory, options=options) as reader:
                batches = [_sound(reader.read_next_batch()) for _ in range(last - first)]
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            arrow.corrupt(where, f"in the record batches from there: {error}")
        if sum(batch.nbytes for batch in batches) * 2 < memory.size:
            batches = [_copy(batch) for batch in batches]  # what is left of the memory is let go
        return batches

    def _fields(self, file: int, wanted: list[str]) -> list[int]:
        names = self.schema(file).names
        for column in wanted:
            if column not in names:
                raise ColumnMissing(
                    f"source '{self.name}': {self.files[file].url}: no column '{column}', unlike the source's first"
                    f" file; it has {', '.join(names)}; make it a source of its own"
                )
        return sorted({names.index(column) for column in wanted})

    def _memory(self, file: int, first: int, last: int) -> pa.Buffer:
        """A stream of these batches: the schema, the dictionaries that hold there, and they themselves."""
        arrow = self._file(file)
        ranges = [*_dictionaries(arrow, first), *_ranges(arrow, first, last)]
        head = arrow.schema_bytes
        # The batches lie on the boundaries that their writer aligned them to.
        before = len(head) + sum(end - start for start, end in ranges[:-1])
        slack = (ranges[-1][0] - before) % _ALIGNMENT
        memory = pa.allocate_buffer(slack + before + ranges[-1][1] - ranges[-1][0])
        view = memoryview(memory).cast("B")
        view[slack : slack + len(head)] = head
        into = []
        at = slack + len(head)
        for start, end in ranges:
            into.append(view[at : at + end - start])
            at += end - start
        path = self.files[file].path
        self._store.read_ranges([(path, start, end) for start, end in ranges], into)
        return memory.slice(slack)


def _ranges(arrow: ArrowFile, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Bytes of some batches; between those of a stream lie the dictionaries that change there."""
    starts, ends = arrow.index.starts[first:last], arrow.index.ends[first:last]
    if arrow.is_stream:
        yield int(starts[0]), int(ends[-1])
        return
    gaps = np.flatnonzero(ends[:-1] != starts[1:])
    yield from zip(starts[np.append(0, gaps + 1)].tolist(), ends[np.append(gaps, -1)].tolist(), strict=True)


def _dictionaries(arrow: ArrowFile, batch: int) -> list[tuple[int, int]]:
    """Bytes of the dictionaries that hold at a batch: of a file all, of a stream the last before it of each id."""
    index: Index = arrow.index
    if not arrow.is_stream:
        return [(start, end) for start, end, _, _ in index.dictionaries]
    held: dict[int, list[tuple[int, int]]] = {}
    for start, end, id_, adds in index.dictionaries:
        if start < index.starts[batch]:
            held[id_] = [*(held.pop(id_, []) if adds else []), (start, end)]
    # Readers expect one of each id before any that adds.
    return [one[0] for one in held.values()] + [more for one in held.values() for more in one[1:]]


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch none of whose offsets and indices leads out of its memory.

    Raises:
        ValueError: it is not; text that is not UTF-8 is left for its row to fail.
    """
    for column in batch.columns:  # before anything else looks at them
        column.validate()
        stored = column.storage if isinstance(column, pa.ExtensionArray) else column
        stored.view(_as_bytes(stored.type)).validate(full=True)
    if batch.num_rows > 8 * batch.nbytes + _EMPTY_ROWS:
        raise ValueError(f"{batch.num_rows} rows in {batch.nbytes} bytes")
    return batch


def _as_bytes(type_: pa.DataType) -> pa.DataType:
    """The type, with any bytes where it has text."""
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_as_bytes(type_.key_type), _as_bytes(type_.item_type))
    if pa.types.is_dictionary(type_):
        return pa.dictionary(type_.index_type, _as_bytes(type_.value_type), type_.ordered)
    for is_it, make in (
        (pa.types.is_list, pa.list_),
        (pa.types.is_large_list, pa.large_list),
        (pa.types.is_fixed_size_list, lambda field: pa.list_(field, type_.list_size)),
    ):
        if is_it(type_):
            return make(type_.value_field.with_type(_as_bytes(type_.value_type)))
    for is_it, plain in (
        (pa.types.is_string, pa.binary()),
        (pa.types.is_large_string, pa.large_binary()),
        (pa.types.is_string_view, pa.binary_view()),
    ):
        if is_it(type_):
            return plain
    return type_


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [pa.concat_arrays([column, column[:0]]) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _ids(batch: int, num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.int64) + (batch << _BATCH_BITS)
