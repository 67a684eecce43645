"""Payload in few flat arrays, as it travels between processes: a message costs per array, not per document.

Tokens travel in the narrowest unsigned type that holds them, and masks as bits; positions, segments and targets do not
travel at all, since the receiver derives them faster than it could receive them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from omniload.joining import join_parts
from omniload.payload import Payload, narrowest
from omniload.samples.extras import Arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The payload of some pieces, in order."""

    tokens: np.ndarray
    """``unsigned[t]``: the tokens of all pieces end to end, each with the one after it where its sample goes on."""
    bounds: np.ndarray
    """``int64[p + 1]``: piece i has the tokens ``bounds[i]:bounds[i + 1]``."""
    mask: np.ndarray | None
    """``uint8[ceil(t / 8)]``: a bit for each token, whether it counts in the loss; None if all do."""
    masked: np.ndarray | None
    """``bool[p]``: pieces that have a mask of their own; the bits of the others are set."""
    arrays: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Extra arrays by name: the rows of all pieces end to end, ``int64[p + 1]`` bounds, and ``bool[p]`` which pieces
    have one."""

    @classmethod
    def of(cls, payload: Payload) -> Self:
        """The same payload, flat."""
        array, begins, ends = payload.places
        bounds = _bounds(ends - begins)
        mask = masked = None
        has_mask = np.array([one is not None for one in payload.masks], bool)
        if has_mask[array].any():
            masked = has_mask[array]
            every = [
                np.ones(length, bool) if one is None else one
                for one, length in zip(payload.loss_mask, (ends - begins).tolist(), strict=True)
            ]
            mask = np.packbits(np.concatenate(every))
        return cls(
            tokens=_joined(payload, int(bounds[-1])),
            bounds=bounds,
            mask=mask,
            masked=masked,
            arrays={} if payload.arrays is None else _flat(payload.arrays),
        )

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        held = [self.tokens, self.bounds, self.mask, self.masked]
        held += [array for arrays in self.arrays.values() for array in arrays]
        return sum(array.nbytes for array in held if array is not None)

    def payload(self) -> Payload:
        """The payload of each piece; views, where that can be."""
        num_pieces = len(self.bounds) - 1
        masks: list[np.ndarray | None] = [None]
        places = np.stack([np.zeros(num_pieces, np.int64), self.bounds[:-1], self.bounds[1:]])
        if self.mask is not None and self.masked is not None:
            masks.append(np.unpackbits(self.mask, count=len(self.tokens)).view(bool))
            places[0] = self.masked  # the tokens stand there twice, without the mask and with it
        arrays: list[Arrays] | None = None
        if self.arrays:
            arrays = [{} for _ in range(num_pieces)]
            for name, (rows, bounds, has) in self.arrays.items():
                of_piece = _slices(bounds)
                for i in np.flatnonzero(has).tolist():
                    arrays[i][name] = rows[of_piece[i]]
        return Payload(values=[self.tokens] * len(masks), masks=masks, places=places, arrays=arrays)


def _joined(payload: Payload, num_tokens: int) -> np.ndarray:
    """All tokens in the narrowest type that holds them."""
    dtype = np.result_type(*{one.dtype for one in payload.values}) if payload.values else np.dtype(np.uint16)
    joined = np.empty(num_tokens, dtype)
    join_parts(payload.values, payload.places, joined)
    if dtype in (np.uint8, np.uint16):
        return joined
    return joined.astype(narrowest(int(joined.max(initial=0))))


def _flat(arrays: Sequence[Arrays]) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    flat = {}
    for name in dict.fromkeys(name for of_piece in arrays for name in of_piece):
        has = np.array([name in of_piece for of_piece in arrays])
        parts = [of_piece[name] for of_piece in arrays if name in of_piece]
        lengths = np.zeros(len(arrays), np.int64)
        lengths[has] = [len(part) for part in parts]
        flat[name] = (np.concatenate(parts), _bounds(lengths), has)
    return flat


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _slices(bounds: np.ndarray) -> list[slice]:
    ends = bounds.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
