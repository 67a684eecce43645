"""Arrays that samples carry beside their tokens: the patches of an image, say, and the tokens that stand for them.

A transform made from a class may have an attribute ``extras``, which declares the arrays that it adds to rows. In the
sample's text or tokens each item (image, sound) stands as one placeholder token; the row says how many tokens it takes
in the end, none of which is trained on. A sample with such arrays is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omniload.pieces import Encoder
from omniload.samples.sample import BadSample

Arrays = dict[str, np.ndarray]
"""Extra arrays of a sample by name, as they are kept: fewer bytes, maybe, than in a lane, but as many rows."""


def _copy(out: np.ndarray, kept: np.ndarray) -> None:
    out[...] = kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraArray:
    """How an array lies in a lane, where those of its samples follow each other."""

    dtype: str
    """Name of the dtype."""
    row_shape: tuple[int, ...]
    """Shape of one row; the first axis is not in it."""
    write: Callable[[np.ndarray, np.ndarray], None] = _copy
    """Fills ``dtype[n, *row_shape]``, its first argument, from what is kept of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What a transform adds to rows besides columns for text."""

    arrays: Mapping[str, ExtraArray]
    """By the name that they have in rows and lanes; a row has all or none."""
    tokens: str
    """Column with the number of tokens that each item takes: a list of integers, at least 1."""
    placeholder: str | int
    """Name or id of the token that stands for an item."""
    encoder: Encoder | None = None
    """The encoder that the arrays go through before the backbone; None: through none that is to be balanced."""
    units: str | None = None
    """The array whose rows are what that encoder works through: its length, as tokens are the backbone's."""

    def __post_init__(self) -> None:
        if (self.encoder is None) != (self.units is None) or self.units not in (None, *self.arrays):
            raise ValueError(
                f"units: {self.units!r} is to name the array, of {sorted(self.arrays)}, whose rows the encoder"
                f" {self.encoder!r} works through; give both, or neither"
            )


def count_units(samples: Sequence[Arrays], extras: Sequence[Extras]) -> dict[Encoder, np.ndarray]:
    """``int64[n]`` by encoder: how many rows it works through for each sample."""
    counts: dict[Encoder, np.ndarray] = {}
    for one in extras:
        if one.encoder is None or one.units is None:
            continue
        of_sample = np.array([len(arrays.get(one.units, ())) for arrays in samples], np.int64)
        counts[one.encoder] = counts.get(one.encoder, 0) + of_sample
    return counts


def take_arrays(row: Mapping[str, Any], extras: Sequence[Extras]) -> Arrays:
    """The arrays a row carries.

    Raises:
        BadSample: one of them is missing while others are there, or is not an array; wrong numbers of tokens.
    """
    arrays: Arrays = {}
    for one in extras:
        if one.tokens not in row:
            continue
        counts = row[one.tokens]
        if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 1 for count in counts):
            raise BadSample(f"'{one.tokens}' is not a list of integers of at least 1")
        for name in one.arrays:
            array = row.get(name)
            if not isinstance(array, np.ndarray) or not array.ndim:
                raise BadSample(f"'{name}' is not an array, although there are {one.tokens}")
            arrays[name] = array
    return arrays


def expand(
    tokens: np.ndarray, mask: np.ndarray | None, placeholder: int, counts: Sequence[int], *, in_front: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Write out placeholders as often as their items take tokens, if they are not; none of them is trained on.

    Args:
        tokens: ``int[n]``.
        mask: ``bool[n]``: tokens that are trained on; None if all are.
        placeholder: id of the token that stands for an item.
        counts: tokens of each item, in order.
        in_front: whether the items go in front of everything if no placeholder says where.

    Returns:
        Tokens and mask of equal length.

    Raises:
        BadSample: there are other numbers of placeholders and of items.
    """
    mask = np.ones(len(tokens), dtype=bool) if mask is None else mask
    at = np.flatnonzero(tokens == placeholder)
    if not len(at) and in_front:
        at = np.arange(len(counts))
        tokens = np.concatenate([np.full(len(counts), placeholder, dtype=tokens.dtype), tokens])
        mask = np.concatenate([np.zeros(len(counts), dtype=bool), mask])
    mask = mask & (tokens != placeholder)
    if len(at) == sum(counts):
        return tokens, mask
    if len(at) != len(counts):
        raise BadSample(f"{len(at)} placeholders for {len(counts)} items of {sum(counts)} tokens")
    times = np.ones(len(tokens), dtype=np.int64)
    times[at] = counts
    return np.repeat(tokens, times), np.repeat(mask, times)
