"""Rows become samples: transforms, tokens, end-of-text token, loss mask. A bad row is set aside with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omniload.errors import MixtureError
from omniload.samples.convention import BadSample, Sample, Segment, read_sample
from omniload.samples.tokenize import Tokenizer
from omniload.samples.transforms import Transform, apply_all
from omniload.sources.protocol import BadRow, Row

MAX_SUBS = 2**16
"""Samples a row may give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSample:
    """One sample, ready to be cut."""

    tokens: np.ndarray
    """``unsigned[n]`` token ids, n >= 1."""
    mask: np.ndarray | None
    """``bool[n]``: tokens that are trained on; None if all are."""

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return int(self.tokens.nbytes) + (0 if self.mask is None else int(self.mask.nbytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparer:
    """Makes samples from the rows of one source. Pure: a row gives the same samples whatever rows come with it."""

    source: str
    """Name of the source, for messages."""
    column: str | None
    """Column that holds the sample, if the source names one."""
    transforms: tuple[Transform, ...]
    """Applied to every row, in order."""
    tokenizer: Tokenizer | None
    """Needed for rows of text."""
    eos: int | None
    """Token appended to every sample made from text."""

    def prepare(
        self, rows: Sequence[Row | BadRow], seeds: Sequence[int]
    ) -> list[tuple[PreparedSample, ...] | BadRow]:
        """Samples of each row, or why it has none; a row with one bad sample is bad as a whole.

        Args:
            rows: as stored.
            seeds: 64 pseudo-random bits of each row's own, for the transforms.

        Raises:
            MixtureError: a row of text and no tokenizer; a transform that breaks its contract.
        """
        found = [self._samples(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        texts = [
            text
            for samples in found
            if not isinstance(samples, BadRow)
            for sample in samples
            if isinstance(sample, list)
            for text, _ in sample
        ]
        if texts and self.tokenizer is None:
            raise MixtureError(f"source '{self.source}' holds text: set tokenizer: to a tokenizer.json")
        encoded = iter(self.tokenizer.encode(texts) if self.tokenizer and texts else [])
        # All samples of a row take their part of `encoded`, also those after a bad one.
        made = [
            samples if isinstance(samples, BadRow) else [self._make(sample, encoded) for sample in samples]
            for samples in found
        ]
        return [samples if isinstance(samples, BadRow) else _all_or_none(samples) for samples in made]

    def _samples(self, row: Row | BadRow, seed: int) -> list[Sample] | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            rows = apply_all(self.transforms, row, seed) if self.transforms else [row]
            if len(rows) > MAX_SUBS:
                raise BadSample(f"gives {len(rows)} samples, more than {MAX_SUBS}")
            return [read_sample(one, self.column) for one in rows]
        except BadSample as error:
            return BadRow(reason=str(error))

    def _make(self, sample: Sample, encoded: Iterator[np.ndarray | None]) -> PreparedSample | BadRow:
        if isinstance(sample, np.ndarray):
            return self._from_ids(sample)
        return self._from_segments(sample, [next(encoded) for _ in sample])

    def _from_ids(self, ids: np.ndarray) -> PreparedSample | BadRow:
        limit = id_limit(self.tokenizer)
        if ids.min() < 0 or ids.max() >= limit:
            return BadRow(
                reason=f"token id {ids.min() if ids.min() < 0 else ids.max()} is not in [0, {limit})"
            )
        return PreparedSample(
            tokens=ids.astype(self.tokenizer.dtype if self.tokenizer else np.uint32), mask=None
        )

    def _from_segments(
        self, segments: list[Segment], encoded: list[np.ndarray | None]
    ) -> PreparedSample | BadRow:
        parts = [part for part in encoded if part is not None]
        if len(parts) < len(segments):
            return BadRow(reason="text that is not valid Unicode")
        if not any(part.size for part in parts):
            return BadRow(reason="empty")
        mask = None
        if not all(trained for _, trained in segments):
            mask = np.repeat([trained for _, trained in segments], [part.size for part in parts])
            if not mask.any():
                return BadRow(reason="no token to train on")
        if self.eos is not None:
            parts.append(np.array([self.eos], dtype=parts[0].dtype))
            mask = None if mask is None else np.append(mask, False)
        return PreparedSample(tokens=np.concatenate(parts) if len(parts) > 1 else parts[0], mask=mask)


def id_limit(tokenizer: Tokenizer | None) -> int:
    """Ids of ready-made tokens must be below this: the vocabulary's size where a tokenizer is given."""
    return tokenizer.vocab_size if tokenizer else 2**31


def _all_or_none(samples: list[PreparedSample | BadRow]) -> tuple[PreparedSample, ...] | BadRow:
    good = tuple(sample for sample in samples if isinstance(sample, PreparedSample))
    if len(good) == len(samples):
        return good
    return next(sample for sample in samples if isinstance(sample, BadRow))
