"""Samples that have to be made from rows: parsed, transformed, tokenised; kept until their pieces are fetched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from omniload.errors import MixtureError
from omniload.payload import Payload
from omniload.samples.buffer import Buffer
from omniload.samples.extras import Arrays, count_units
from omniload.samples.prepare import PreparedSample, Preparer
from omniload.samples.run import Found, Rows
from omniload.sources.order import key64, mix64
from omniload.sources.protocol import BadRow, RawBlock, Row, Source

_RUN_ROWS = 512
_RUN_BYTES = 256 << 10
_RUN_ROWS_WITH_ARRAYS = 16  # images are many times larger than the bytes they are decoded from


class PreparingReader:
    """Reads blocks whose rows are to be made into samples.

    Args:
        source: the blocks.
        columns: which of a file's columns are needed; None: all.
        preparer: makes the samples.
        seed: seed of the mixture.
        buffer_bytes: bound on the prepared samples kept for `fetch`.
    """

    def __init__(
        self,
        source: Source,
        columns: Callable[[Sequence[str]], list[str]] | None,
        preparer: Preparer,
        *,
        seed: int,
        buffer_bytes: int,
    ) -> None:
        self._source = source
        self._columns = columns
        self._preparer = preparer
        self._seed = seed
        self.buffer: Buffer[tuple[int, int, int, int], tuple[PreparedSample, ...]] = Buffer(buffer_bytes)

    def load(self, file: int, block: int) -> RawBlock:
        """Read a block; nothing is parsed or tokenised yet."""
        schema = self._source.schema(file) if self._columns else None
        columns = self._columns(schema.names) if self._columns and schema else None
        return self._source.read_block(file, block, columns)

    def run_rows(self, num_rows: int, num_bytes: int) -> int:
        """Enough to keep the tokenizer's threads busy, few enough for a quick first sample, also of long rows."""
        most = _RUN_ROWS_WITH_ARRAYS if self._preparer.extras else _RUN_ROWS
        return min(most, max(1, num_rows * _RUN_BYTES // max(1, num_bytes)))

    def find(
        self, epoch: int, addresses: Sequence[tuple[int, int]], blocks: Sequence[RawBlock], rows: Rows
    ) -> Found:
        """Make the samples of some rows of a window's blocks."""
        prepared = self._prepare(epoch, addresses, blocks, rows)
        good = [(i, samples) for i, samples in enumerate(prepared) if not isinstance(samples, BadRow)]
        payload = [sample for _, samples in good for sample in samples]
        trained = None
        if any(sample.mask is not None for sample in payload):
            masks = [np.ones(len(s.tokens), dtype=bool) if s.mask is None else s.mask for s in payload]
            trained = np.concatenate(masks)
        failed = [(i, bad.reason) for i, bad in enumerate(prepared) if isinstance(bad, BadRow)]
        return Found(
            source_row=_int64(i for i, samples in good for _ in samples),
            sub=_int64(sub for _, samples in good for sub in range(len(samples))),
            tokens=_int64(len(sample.tokens) for sample in payload),
            trained=trained,
            bad=_int64(i for i, _ in failed),
            reasons=[reason for _, reason in failed],
            payload=payload,
            units=count_units([sample.arrays for sample in payload], self._preparer.extras),
        )

    def hold(
        self,
        epoch: int,
        addresses: Sequence[tuple[int, int]],
        blocks: Sequence[RawBlock],
        rows: Rows,
        found: Found,
        pieces_of: np.ndarray,
    ) -> None:
        """Keep the samples of each row until all its pieces are released."""
        assert found.payload is not None
        first_of_row = np.flatnonzero(found.sub == 0).tolist()
        for start, end in itertools.pairwise([*first_of_row, len(found.sub)]):
            pieces = int(pieces_of[start:end].sum())
            if pieces:
                i = found.source_row[start]
                key = (epoch, *addresses[rows.slot[i]], int(rows.row[i]))
                samples = tuple(found.payload[start:end])
                self.buffer.add(key, samples, sum(sample.num_bytes for sample in samples), pieces)

    def fetch(
        self, pieces: np.ndarray, bounds: np.ndarray, current: Sequence[RawBlock | None], longest: int
    ) -> Payload:
        """Payload of pieces, grouped by epoch and block; rows that are not held are made again."""
        groups = list(itertools.pairwise(bounds.tolist()))
        parts = [
            (np.arange(begin, end), self._fetch(pieces[begin:end], block, longest))
            for (begin, end), block in zip(groups, current, strict=True)
        ]
        return Payload.gathered(len(pieces), parts)

    def _fetch(self, pieces: np.ndarray, current: RawBlock | None, longest: int) -> Payload:
        """That of one epoch and block."""
        address = (int(pieces["epoch"][0]), int(pieces["file"][0]), int(pieces["block"][0]))
        rows = pieces["row"].tolist()
        samples = {row: held for row in rows if (held := self.buffer.get((*address, row))) is not None}
        missing = sorted(set(rows) - samples.keys())
        if missing:
            samples.update(self._again(address, missing, current))
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray | None] = []
        arrays: list[Arrays] = []
        columns = (pieces[name].tolist() for name in ("sub", "start", "length"))
        for row, sub, start, length in zip(rows, *columns, strict=True):
            if sub >= len(samples[row]):
                raise self._impure(address)
            sample = samples[row][sub]
            end = min(start + length + 1, longest)
            tokens.append(sample.tokens[start:end])
            masks.append(None if sample.mask is None else sample.mask[start:end])
            arrays.append(sample.arrays)
        extras = arrays if self._preparer.extras else None
        return Payload.of(tokens, masks, extras)

    def release(self, pieces: np.ndarray) -> None:
        """Say that these pieces will not be asked for again."""
        columns = (pieces[name].tolist() for name in ("epoch", "file", "block", "row"))
        for key in zip(*columns, strict=True):
            self.buffer.release(key, 1)

    def _again(
        self, address: tuple[int, int, int], missing: list[int], current: RawBlock | None
    ) -> dict[int, tuple[PreparedSample, ...]]:
        epoch, file, block = address
        raw = current or self.load(file, block)
        row = np.array(missing, dtype=np.int64)
        rows = Rows(position=row, slot=np.zeros_like(row), row=row)
        prepared = self._prepare(epoch, [(file, block)], [raw], rows)
        made: dict[int, tuple[PreparedSample, ...]] = {}
        for number, samples in zip(missing, prepared, strict=True):
            if isinstance(samples, BadRow):
                raise self._impure(address)
            made[number] = samples
        return made

    def _impure(self, address: tuple[int, int, int]) -> MixtureError:
        _, file, _ = address
        return MixtureError(
            f"source '{self._preparer.source}': {self._source.files[file].url}: a row gave other samples when it was"
            " prepared again; its transforms must be pure functions of row, arguments and seed"
        )

    def _prepare(
        self, epoch: int, addresses: Sequence[tuple[int, int]], blocks: Sequence[RawBlock], rows: Rows
    ) -> list[tuple[PreparedSample, ...] | BadRow]:
        raw: list[Row | BadRow] = [BadRow(reason="")] * len(rows.row)
        seeds = np.zeros(len(rows.row), dtype=np.uint64)
        for slot in np.unique(rows.slot).tolist():
            block, (file, _) = blocks[slot], addresses[slot]
            here = np.flatnonzero(rows.slot == slot)
            for i, row in zip(here.tolist(), block.rows(rows.row[here]), strict=True):
                raw[i] = row
            if self._preparer.transforms:
                path = self._source.files[file].path
                key = key64(self._seed, self._preparer.source, epoch, "transform", path)
                seeds[here] = mix64(key, block.row_ids[rows.row[here]])
        return self._preparer.prepare(raw, seeds.tolist())


def _int64(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)
