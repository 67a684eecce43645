"""``shuffle: global``: the rows of a source in one permutation of all of them, another in every epoch.

Nothing but the permuted row numbers of one block is ever held: the permutation is evaluated where it is needed
(`omniload.sources.order.Feistel`). It takes a format whose rows can be read one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing, MixtureError
from omniload.sources.epochs import EveryEpoch
from omniload.sources.gathered import GatheredBlock
from omniload.sources.order import Feistel, key64
from omniload.sources.protocol import FileEntry, RawBlock, Source
from omniload.sources.split import Split, in_split

BLOCK_ROWS = 512
"""Permuted rows that are read together; not part of their order."""


@runtime_checkable
class RowAccess(Source, Protocol):
    """A source whose rows can be read by number, each for about what its own bytes cost; the numbers are their ids."""

    def num_rows(self, file: int) -> int:
        """Rows of a file; reads at most the file's own index."""

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> RawBlock:
        """Read the rows of some numbers, ``int64[n]`` ascending."""


class ShuffledRows:
    """All rows of a source in permuted order, as blocks of `BLOCK_ROWS`.

    The permutation of an epoch stands in place of a file: block b of "file" e holds the rows at the places
    ``b * BLOCK_ROWS`` and following of epoch e. Rows outside the split are left out.

    Start-up reads the index of every file, for the numbers of rows.

    Args:
        source: the rows.
        seed: seed of the mixture.
        split: which rows to read.
        held_out: fraction of the rows that are held out of training.

    Raises:
        MixtureError: the format reads rows in blocks only.
        ColumnMissing: the files have not all the same columns.
    """

    def __init__(self, source: Source, *, seed: int, split: Split, held_out: float) -> None:
        if not isinstance(source, RowAccess):
            raise MixtureError(
                f"source '{source.name}': shuffle: global reads single rows, and its format (or rows, or read_columns)"
                " gives blocks only; set shuffle: window and raise window_blocks, or write Megatron .bin/.idx or MDS"
            )
        self._source = source
        self._seed = seed
        self._split: Split = split
        self._held_out = held_out
        self.name = source.name
        sizes, schemas = [], []
        for file in range(len(source.files)):
            sizes.append(self._source.num_rows(file))
            schemas.append(self._source.schema(file) if sizes[-1] else None)
        self._schema = self._of_all(schemas)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._num_rows = int(self._starts[-1])
        size = sum(entry.size for entry in source.files)
        everything = FileEntry(
            path="",
            url=f"all files of '{source.name}'",
            size=size,
            find_digest=partial(getattr, source, "fingerprint"),
        )
        self.files: Sequence[FileEntry] = EveryEpoch(everything)

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._source.fingerprint}-global"

    def num_blocks(self, file: int) -> int:
        """Blocks of an epoch."""
        return -(-self._num_rows // BLOCK_ROWS)

    def schema(self, file: int) -> pa.Schema | None:
        """Columns of the files, of types that those of all files fit in; null if a file does not tell."""
        return self._schema

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RawBlock:
        """Read the rows of a block one by one, neighbours in a file together."""
        wanted = None if columns is None else list(columns)
        files, rows, numbers = self._places(file, block)
        parts: list[RawBlock] = []
        part, place = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for one in np.unique(files).tolist():
            here = np.flatnonzero(files == one)
            order = np.argsort(rows[here])
            part[here], place[here[order]] = len(parts), np.arange(len(here))
            parts.append(self._source.read_rows(one, rows[here[order]], wanted))
        return GatheredBlock(parts, part, place, numbers)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: numbers of the rows, counted over all files."""
        return self._places(file, block)[2]

    def origins(self, file: int, block: int, rows: np.ndarray) -> tuple[list[FileEntry], np.ndarray]:
        """Where rows of a block come from: their files, and ``int64[n]`` their ids there."""
        files, numbers, _ = self._places(file, block)
        return [self._source.files[one] for one in files[rows].tolist()], numbers[rows]

    def close(self) -> None:
        """Let go of open files."""
        self._source.close()

    def _of_all(self, schemas: Sequence[pa.Schema | None]) -> pa.Schema | None:
        """One schema for the rows of all files, as rows of several are read together."""
        unified: pa.Schema | None = None
        for entry, schema in zip(self._source.files, schemas, strict=True):
            if schema is None:
                continue
            where = f"source '{self.name}': {entry.url}"
            remedy = "shuffle: global mixes the rows of all files: make it a source of its own"
            if unified is None:
                unified = schema
            if set(schema.names) != set(unified.names):
                raise ColumnMissing(
                    f"{where}: has the columns {', '.join(schema.names)}, not {', '.join(unified.names)} as the files"
                    f" before; {remedy}"
                )
            try:
                unified = pa.schema([_fitting(field, schema.field(field.name)) for field in unified])
            except pa.ArrowException as error:
                raise ColumnMissing(
                    f"{where}: columns of other types than in the files before ({' '.join(str(error).split())});"
                    f" {remedy}"
                ) from error
        return unified

    def _places(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File, number in it and number over all files of the rows of a block that belong to the split."""
        at = np.arange(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, self._num_rows))
        numbers = Feistel(max(self._num_rows, 1), key64(self._seed, self.name, epoch, "global")).of(at)
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = numbers - self._starts[files]
        keep = np.ones(len(rows), bool)
        if self._held_out or self._split == "held_out":
            for one in np.unique(files).tolist():
                here, entry = np.flatnonzero(files == one), self._source.files[one]
                chosen = in_split(
                    self._split,
                    self._held_out,
                    seed=self._seed,
                    content=entry.content,
                    row_ids=rows[here],
                )
                keep[here] = True if chosen is None else chosen
        return files[keep], rows[keep], numbers[keep]


def _fitting(one: pa.Field, other: pa.Field) -> pa.Field:
    """A column whose type holds the values of both, null if one of them is."""
    if pa.types.is_null(one.type) or pa.types.is_null(other.type):
        return pa.field(one.name, pa.null())
    return pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive").field(0)
