"""How many rows a pass over a source has, estimated from the part of it that was read."""

from __future__ import annotations

from collections.abc import Iterable

from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.sources.order import Order
from omniload.sources.protocol import Source


class EpochSize:
    """A ratio estimate: rows of the windows read, by their part of the source's bytes; exact after a whole pass.

    So that nothing is read for it: the sizes of files are known from their listing, and the rows from the chunks.

    Args:
        source: the rows.
        mixture: says how they are ordered.
    """

    def __init__(self, source: Source, mixture: Mixture) -> None:
        self._source = source
        self._order = Order(
            seed=mixture.seed,
            name=source.name,
            shuffle=mixture.shuffle,
            window_blocks=mixture.window_blocks,
        )
        # With `global` a permutation of all rows stands in place of each file.
        self._total_bytes = source.files[0].size if mixture.shuffle == "global" else _total(source)
        self._rows = 0  # of the windows that were read in this pass, and their part of it
        self._part = 0.0
        self._is_whole = False  # whether it was read from its beginning
        self._exact: int | None = None
        self._rows_of_window: int | None = None  # so far; None if it was entered in the middle

    def note(self, chunk: SampleChunk) -> None:
        """Count the rows of the next chunk in the source's order."""
        begin, end = chunk.begin, chunk.end
        if not begin.position and not begin.sub:
            self._rows_of_window = 0
            if not begin.window:
                self._rows, self._part, self._is_whole = 0, 0.0, True
        if self._rows_of_window is None:
            return
        self._rows_of_window += int(chunk.rows.sum())
        if (end.epoch, end.window) != (begin.epoch, begin.window):
            self._rows += self._rows_of_window
            self._part += self._part_of(self._blocks(begin))
            self._rows_of_window = None
            if chunk.ends_epoch and self._is_whole:
                self._exact = self._rows

    def rows(self, cursor: Cursor) -> float | None:
        """Rows of a pass; None if that cannot be told, as of files without bytes.

        Args:
            cursor: where the source stands; if no window is finished, the rows of that one are counted.
        """
        if self._exact is not None:
            return self._exact
        rows, part = self._rows, self._part
        if not rows:
            blocks = self._blocks(cursor)
            rows = sum(len(self._source.row_ids(file, block)) for file, block in blocks)
            part = self._part_of(blocks)
        return rows / part if part else None

    def _blocks(self, cursor: Cursor) -> tuple[tuple[int, int], ...]:
        source = self._source
        return self._order.window(
            cursor.epoch, cursor.file, cursor.block, len(source.files), source.num_blocks
        ).blocks

    def _part_of(self, blocks: Iterable[tuple[int, int]]) -> float:
        source = self._source
        num_bytes = sum(source.files[file].size / source.num_blocks(file) for file, _ in blocks)
        return num_bytes / self._total_bytes if self._total_bytes else 0.0


def _total(source: Source) -> int:
    return sum(entry.size for entry in source.files)
