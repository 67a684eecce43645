"""Samples that are stored as token ids in columns: references into the decoded blocks, whole runs at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.errors import ColumnMissing
from omniload.payload import Payload
from omniload.samples.buffer import Buffer
from omniload.samples.convention import Convention
from omniload.samples.run import Found, Rows
from omniload.samples.token_block import TokenBlock
from omniload.sources.protocol import Source


class PretokenisedReader:
    """Reads blocks whose rows are token ids.

    Args:
        source: its blocks have tables.
        convention: what its columns are called.
        limit: ids must be below it.
        buffer_bytes: bound on the blocks kept for `fetch`.
    """

    def __init__(self, source: Source, convention: Convention, limit: int, buffer_bytes: int) -> None:
        self._source = source
        self._convention = convention
        self._limit = limit
        self.buffer: Buffer[tuple[int, int], TokenBlock] = Buffer(buffer_bytes)

    def load(self, file: int, block: int) -> TokenBlock:
        """Decode a block.

        Raises:
            ColumnMissing: the file has no token ids in the column, though the source's first file has.
        """
        held = self.buffer.get((file, block))
        if held is not None:
            return held
        where = f"source '{self._source.name}': {self._source.files[file].url}"
        schema = self._source.schema(file)
        assert schema is not None
        column, kind = self._convention.of_schema(schema, where)
        if kind != "input_ids":
            raise ColumnMissing(
                f"{where}: no token ids in '{column}', unlike the source's first file; split the source"
            )
        labels = self._convention.labels_of(schema)
        raw = self._source.read_block(file, block, [column] if labels is None else [column, labels])
        assert raw.table is not None
        return TokenBlock(
            raw.table.column(column),
            raw.row_ids,
            self._limit,
            None if labels is None else raw.table.column(labels),
        )

    def run_rows(self, num_rows: int, num_bytes: int) -> int:
        """Enough that no cost per run shows."""
        return 1 << 16

    def find(
        self, epoch: int, addresses: Sequence[tuple[int, int]], blocks: Sequence[TokenBlock], rows: Rows
    ) -> Found:
        """The samples of some rows of a window's blocks."""
        tokens = np.zeros(len(rows.row), dtype=np.int64)
        bad = np.zeros(len(rows.row), dtype=bool)
        for slot, block in enumerate(blocks):
            here = rows.slot == slot if len(blocks) > 1 else slice(None)
            tokens[here] = block.lengths[rows.row[here]]
            bad[here] = block.bad[rows.row[here]]
        good, bad_rows = np.flatnonzero(~bad), np.flatnonzero(bad)
        trained = None
        if len(good) and any(block.trained is not None for block in blocks):
            masks = zip(rows.slot[good].tolist(), rows.row[good].tolist(), strict=True)
            trained = np.concatenate([blocks[slot].trained_of(row) for slot, row in masks])
        return Found(
            source_row=good,
            sub=np.zeros(len(good), dtype=np.int64),
            tokens=tokens[good],
            trained=trained,
            bad=bad_rows,
            reasons=[blocks[rows.slot[i]].reason(int(rows.row[i])) for i in bad_rows],
            payload=None,
        )

    def hold(
        self,
        epoch: int,
        addresses: Sequence[tuple[int, int]],
        blocks: Sequence[TokenBlock],
        rows: Rows,
        found: Found,
        pieces_of: np.ndarray,
    ) -> None:
        """Keep the blocks that the pieces point to, until they are released."""
        counts = np.bincount(rows.slot[found.source_row], weights=pieces_of, minlength=len(blocks))
        for address, block, count in zip(addresses, blocks, counts.astype(int).tolist(), strict=True):
            if count:
                self.buffer.add(address, block, block.num_bytes, count)

    def fetch(
        self, pieces: np.ndarray, bounds: np.ndarray, current: Sequence[TokenBlock | None], longest: int
    ) -> Payload:
        """Tokens and masks of pieces, grouped by epoch and block."""
        held = [
            block or self.load(int(pieces["file"][begin]), int(pieces["block"][begin]))
            for block, begin in zip(current, bounds[:-1], strict=True)
        ]
        places = np.empty((3, len(pieces)), np.int64)
        array, begins, ends = places
        row = pieces["row"].astype(np.int64)
        for number, (block, begin, end) in enumerate(zip(held, bounds[:-1], bounds[1:], strict=True)):
            array[begin:end] = number
            begins[begin:end] = block.offsets.take(row[begin:end])
            ends[begin:end] = block.lengths.take(row[begin:end])
        # Of each sample so many tokens, of which the piece has those from ``start`` on, and one more.
        start = pieces["start"].astype(np.int64)
        np.minimum(ends, longest, out=ends)
        np.minimum(ends, start + pieces["length"] + 1, out=ends)
        ends += begins
        begins += start
        return Payload(
            values=[one.values for one in held], masks=[one.trained for one in held], places=places
        )

    def release(self, pieces: np.ndarray) -> None:
        """Say that these pieces will not be asked for again."""
        blocks = pieces["file"].astype(np.uint64) << np.uint64(32) | pieces["block"]
        found, counts = np.unique(blocks, return_counts=True)
        for block, count in zip(found.tolist(), counts.tolist(), strict=True):
            self.buffer.release((block >> 32, block & 0xFFFFFFFF), count)
