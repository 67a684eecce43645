"""Metadata without data: sources given as the token counts of their rows' samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.pieces import PIECE, Cursor, SampleChunk


@dataclass(frozen=True)
class FakeMetadata:
    """Serves chunks of sources whose rows give samples of known lengths, split at ``seq_len``.

    ``rows[source][row]`` lists the tokens of the row's samples; one window per ``window_rows`` rows.
    """

    rows: Sequence[Sequence[Sequence[int]]]
    seq_len: int
    chunk_samples: int = 7
    window_rows: int = 5

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        rows = self.rows[source]
        first_row = cursor.window * self.window_rows
        last_row = min(first_row + self.window_rows, len(rows))
        samples: list[tuple[int, int, int]] = []  # position, sub, tokens
        rows_of: list[int] = []
        fresh, position, sub = 0, cursor.position, cursor.sub
        while first_row + position < last_row and len(samples) < self.chunk_samples:
            tokens = rows[first_row + position]
            fresh += sub == 0
            if sub < len(tokens):
                samples.append((position, sub, tokens[sub]))
                rows_of.append(fresh)
                fresh, sub = 0, sub + 1
                # The row is already counted: its next sample must not count it again.
                if sub < len(tokens):
                    continue
            position, sub = position + 1, 0
        pieces, first_piece = [], [0]
        for at, of_row, tokens in samples:
            for start in range(0, tokens, self.seq_len):
                length = min(self.seq_len, tokens - start)
                targets = min(start + length, tokens - 1) - start
                pieces.append(
                    (0, cursor.epoch, 0, cursor.window, at, of_row, start, length, targets, 0, 0, 0)
                )
            first_piece.append(len(pieces))
        ends_window = first_row + position >= last_row
        ends_epoch = ends_window and last_row == len(rows)
        if ends_epoch:
            end = Cursor(epoch=cursor.epoch + 1)
        elif ends_window:
            end = Cursor(epoch=cursor.epoch, window=cursor.window + 1)
        else:
            end = Cursor(epoch=cursor.epoch, window=cursor.window, position=position, sub=sub)
        tokens_of = np.array([tokens for _, _, tokens in samples], np.int64)
        return SampleChunk(
            begin=cursor,
            end=end,
            ends_epoch=ends_epoch,
            pieces=np.array(pieces, PIECE),
            first_piece=np.array(first_piece, np.int64),
            position=np.array([at for at, _, _ in samples], np.int64),
            sub=np.array([sub for _, sub, _ in samples], np.int64),
            rows=np.array([*rows_of, fresh], np.int64),
            failures=np.zeros(len(samples) + 1, np.int64),
            tokens=tokens_of,
            truncated=np.zeros_like(tokens_of),
            dropped=np.zeros_like(tokens_of),
        )
