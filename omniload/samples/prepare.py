"""Rows become samples: transforms, tokens, end-of-text token, loss mask. A bad row is set aside with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from omniload.errors import MixtureError
from omniload.samples.chat import ChatTemplate
from omniload.samples.convention import Convention, read_sample
from omniload.samples.extras import Arrays, Extras, expand, take_arrays
from omniload.samples.sample import BadSample, Sample, Text, TokenIds
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
    arrays: Arrays = field(default_factory=dict)
    """What else belongs to it; a sample that has some is never cut."""

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(
            int(array.nbytes)
            for array in (self.tokens, self.mask, *self.arrays.values())
            if array is not None
        )


_Encoded: TypeAlias = tuple[np.ndarray, np.ndarray | None]  # token ids and loss mask


class _Read(NamedTuple):
    """A sample before it is tokenised, and the row it was read from."""

    sample: Sample
    row: Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparer:
    """Makes samples from the rows of one source. Pure: a row gives the same samples whatever rows come with it."""

    source: str
    """Name of the source, for messages."""
    convention: Convention
    """What the columns are called."""
    template: ChatTemplate
    """Renders chats."""
    transforms: tuple[Transform, ...]
    """Applied to every row, in order."""
    tokenizer: Tokenizer | None
    """Needed for rows of text."""
    eos: int | None
    """Token appended to every sample made from text."""
    extras: tuple[Extras, ...] = ()
    """The arrays that the transforms may add to rows."""
    placeholders: tuple[int, ...] = ()
    """For each of these, the id of the token that stands for one of its items."""
    whole_tokens: int | None = None
    """A sample with extra arrays and more tokens is bad; None: what is too long is dropped or refused later."""

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
        found = [self._read(row, seed) for row, seed in zip(rows, seeds, strict=True)]
        texts = [
            sample
            for read in found
            if not isinstance(read, BadRow)
            for sample, _ in read
            if isinstance(sample, Text)
        ]
        encoded = iter(self._encode(texts))
        # All samples of a row take their part of `encoded`, also those after a bad one.
        made = [
            read if isinstance(read, BadRow) else [self._make(one, encoded) for one in read] for read in found
        ]
        return [samples if isinstance(samples, BadRow) else _all_or_none(samples) for samples in made]

    def _read(self, row: Row | BadRow, seed: int) -> list[_Read] | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            rows = apply_all(self.transforms, row, seed) if self.transforms else [row]
            if len(rows) > MAX_SUBS:
                raise BadSample(f"gives {len(rows)} samples, more than {MAX_SUBS}")
            return [_Read(read_sample(one, self.convention, self.template), one) for one in rows]
        except BadSample as error:
            return BadRow(reason=str(error))

    def _encode(self, texts: Sequence[Text]) -> list[_Encoded | None]:
        """Tokens and mask of each text; None for one that is not valid Unicode."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise MixtureError(f"source '{self.source}' holds text: set tokenizer: to a tokenizer.json")
        encoded: list[_Encoded | None] = [None] * len(texts)
        whole = [i for i, text in enumerate(texts) if text.trained is None]
        for i, ids in zip(whole, self.tokenizer.encode([texts[i].text for i in whole]), strict=True):
            encoded[i] = None if ids is None else (ids, None)
        if len(whole) < len(texts):
            parts = [(i, text.text, text.trained) for i, text in enumerate(texts) if text.trained is not None]
            indices, strings, spans = zip(*parts, strict=True)
            for i, both in zip(indices, self.tokenizer.encode_spans(strings, spans), strict=True):
                encoded[i] = both
        return encoded

    def _make(self, read: _Read, encoded: Iterator[_Encoded | None]) -> PreparedSample | BadRow:
        sample, row = read
        try:
            if isinstance(sample, Text):
                tokens, mask = self._from_text(sample, next(encoded))
            else:
                tokens, mask = self._from_ids(sample)
            arrays: Arrays = {}
            if self.extras:
                arrays = take_arrays(row, self.extras)
                tokens, mask = self._expand(sample, tokens, mask, row)
                if arrays and self.whole_tokens is not None and len(tokens) > self.whole_tokens:
                    raise BadSample(f"{len(tokens)} tokens with images exceed seq_len {self.whole_tokens}")
            if mask is not None and not mask[1:].any():  # nothing predicts the first
                raise BadSample("no token to train on")
        except BadSample as error:
            return BadRow(reason=str(error))
        return PreparedSample(tokens=tokens, mask=mask, arrays=arrays)

    def _from_ids(self, sample: TokenIds) -> _Encoded:
        ids, mask = sample
        limit = id_limit(self.tokenizer)
        if ids.min() < 0 or ids.max() >= limit:
            raise BadSample(f"token id {ids.min() if ids.min() < 0 else ids.max()} is not in [0, {limit})")
        return ids.astype(self.tokenizer.dtype if self.tokenizer else np.uint32), mask

    def _from_text(self, sample: Text, encoded: _Encoded | None) -> _Encoded:
        if encoded is None:
            raise BadSample("text that is not valid Unicode")
        tokens, mask = encoded
        if not tokens.size:
            raise BadSample("empty")
        if self.eos is None or (sample.is_chat and tokens[-1] == self.eos):
            return tokens, mask
        ended = np.empty(len(tokens) + 1, tokens.dtype)  # half the time of np.append, once per document
        ended[:-1], ended[-1] = tokens, self.eos
        # A chat has ends of its own in it; only what has none is taught to end here.
        return ended, None if mask is None else np.append(mask, not sample.is_chat)

    def _expand(self, sample: Sample, tokens: np.ndarray, mask: np.ndarray | None, row: Row) -> _Encoded:
        in_front = not (isinstance(sample, Text) and sample.is_chat)
        for one, placeholder in zip(self.extras, self.placeholders, strict=True):
            counts = row.get(one.tokens, ())
            if len(counts) or (tokens == placeholder).any():
                tokens, mask = expand(tokens, mask, placeholder, counts, in_front=in_front)
        return tokens, mask


def id_limit(tokenizer: Tokenizer | None) -> int:
    """Ids of ready-made tokens must be below this: the vocabulary's size where a tokenizer is given."""
    return tokenizer.vocab_size if tokenizer else 2**31


def _all_or_none(samples: list[PreparedSample | BadRow]) -> tuple[PreparedSample, ...] | BadRow:
    good = tuple(sample for sample in samples if isinstance(sample, PreparedSample))
    if len(good) == len(samples):
        return good
    return next(sample for sample in samples if isinstance(sample, BadRow))
