"""Filling the token-wise arrays of packs: the bytes that every token of the stream passes through.

There are two versions that give the same to the bit: one in Python, which says what is done, and a compiled one that
does it in one pass without the interpreter lock (`omniload._kernels`, where a compiler was there at installation).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omniload.kernels import KERNELS
from omniload.payload import Payload

IGNORE = -100
"""Target of a position that does not count in the loss; what torch's cross entropy ignores by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where pieces lie in packs laid end to end; together pieces and padding tile them. Arrays are ``int64``."""

    starts: np.ndarray
    """``[n]``: first token of each piece."""
    lengths: np.ndarray
    """``[n]``: tokens of each, at least 1."""
    numbers: np.ndarray
    """``[n]``: 1, 2, … for the pieces of a pack."""
    padding_starts: np.ndarray
    """``[k]``: first token of each run of padding."""
    padding_lengths: np.ndarray
    """``[k]``: tokens of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenArrays:
    """What is to be filled: arrays of one length, None where they are not wanted."""

    input_ids: np.ndarray
    """``int64``: the tokens; 0 in padding."""
    targets: np.ndarray | None
    """``int64``: the next token of the same sample, `IGNORE` where there is none or it does not count."""
    labels: np.ndarray | None
    """``int64``: the token itself, `IGNORE` at the first of each piece and where it does not count."""
    position_ids: np.ndarray | None
    """``int64``: position in the piece, or in the run of padding."""
    segment_ids: np.ndarray | None
    """``int32``: number of the piece in its pack; 0 in padding."""


def fill(payload: Payload, layout: Layout, arrays: TokenArrays) -> None:
    """Fill the arrays of some packs.

    Args:
        payload: of the pieces.
        layout: where the pieces lie.
        arrays: what to fill, of the packs' total length.
    """
    assert arrays.targets is None or arrays.labels is None
    if KERNELS is None:
        fill_in_python(payload, layout, arrays)
        return
    KERNELS.fill(
        list(payload.values),
        list(payload.masks),
        *np.ascontiguousarray(payload.places),
        layout.starts,
        layout.lengths,
        layout.numbers,
        layout.padding_starts,
        layout.padding_lengths,
        arrays.input_ids,
        arrays.labels if arrays.targets is None else arrays.targets,
        arrays.position_ids,
        arrays.segment_ids,
        arrays.targets is not None,
    )


def fill_in_python(payload: Payload, layout: Layout, arrays: TokenArrays) -> None:
    """As `fill`, a slice per piece: on documents of usual length that beats passes over whole arrays."""
    longest = max(layout.lengths.max(initial=0), layout.padding_lengths.max(initial=0))
    positions = np.arange(longest)
    places = zip(layout.starts.tolist(), layout.lengths.tolist(), layout.numbers.tolist(), strict=True)
    for (start, length, number), values, mask in zip(places, payload.tokens, payload.loss_mask, strict=True):
        part = slice(start, start + length)
        arrays.input_ids[part] = values[:length]
        if arrays.targets is not None:
            _shift(arrays.targets[part], values, mask)
        if arrays.labels is not None:
            arrays.labels[part] = values[:length]
            arrays.labels[start] = IGNORE
            if mask is not None:
                arrays.labels[part][~mask[:length]] = IGNORE
        if arrays.position_ids is not None:
            arrays.position_ids[part] = positions[:length]
        if arrays.segment_ids is not None:
            arrays.segment_ids[part] = number
    for start, length in zip(layout.padding_starts.tolist(), layout.padding_lengths.tolist(), strict=True):
        part = slice(start, start + length)
        for array, value in (
            (arrays.input_ids, 0),
            (arrays.targets, IGNORE),
            (arrays.labels, IGNORE),
            (arrays.segment_ids, 0),
        ):
            if array is not None:
                array[part] = value
        if arrays.position_ids is not None:
            arrays.position_ids[part] = positions[:length]


def _shift(targets: np.ndarray, tokens: np.ndarray, mask: np.ndarray | None) -> None:
    following = tokens[1 : len(targets) + 1]
    targets[: len(following)] = following
    targets[len(following) :] = IGNORE
    if (
        mask is not None
    ):  # mask[j] says whether token j may be a target; token j is the target of position j - 1
        targets[: len(following)][~mask[1 : len(following) + 1]] = IGNORE
