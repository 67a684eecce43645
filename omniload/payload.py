"""What source loaders hand to constructors: the tokens of pieces, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omniload.samples.extras import Arrays

_NARROW = (np.uint8, np.uint16, np.uint32)


def narrowest(most: int) -> type[np.unsignedinteger]:
    """The type in which tokens up to ``most`` travel: the narrowest unsigned one that holds them."""
    return next(dtype for dtype in _NARROW if most <= np.iinfo(dtype).max)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Payload:
    """Tokens of pieces, in the order asked for: places in few arrays, as an object for each piece would cost."""

    values: Sequence[np.ndarray]
    """Arrays of any integer types."""
    masks: Sequence[np.ndarray | None]
    """``bool`` of the length of each: tokens that count in the loss; None where all do."""
    places: np.ndarray
    """``int64[3, n]``: the array that each piece lies in, and its bounds there: its tokens, and the one after it where
    the sample goes on."""
    arrays: list[Arrays] | None = None
    """Extra arrays of each piece, as they are kept; None if no piece has any."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[np.ndarray],
        loss_mask: Sequence[np.ndarray | None],
        arrays: list[Arrays] | None = None,
    ) -> Self:
        """That of pieces each of which has arrays of its own; see `tokens`, `loss_mask`."""
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        places = np.stack([np.arange(len(tokens)), np.zeros_like(lengths), lengths])
        return cls(values=tokens, masks=loss_mask, places=places, arrays=arrays)

    @classmethod
    def gathered(cls, num_pieces: int, parts: Iterable[tuple[Sequence[int] | np.ndarray, Payload]]) -> Self:
        """Put payload together.

        Args:
            num_pieces: pieces of the result.
            parts: payloads with the place of each of their pieces in the result; together they fill it.
        """
        values: list[np.ndarray] = []
        masks: list[np.ndarray | None] = []
        places = np.empty((3, num_pieces), np.int64)
        arrays: list[Arrays] | None = None
        for where, part in parts:
            places[:, where] = part.places
            places[0, where] += len(values)
            values += part.values
            masks += part.masks
            if part.arrays is not None:
                arrays = arrays or [{}] * num_pieces
                for i, of_piece in zip(where, part.arrays, strict=True):
                    arrays[i] = of_piece
        return cls(values=values, masks=masks, places=places, arrays=arrays)

    def placed(self, where: np.ndarray) -> Self:
        """The same pieces in another order: piece i comes at ``where[i]``."""
        return self.gathered(len(where), [(where, self)])

    @property
    def tokens(self) -> list[np.ndarray]:
        """Of each piece its tokens, and the one after it where the sample goes on."""
        return [self.values[array][begin:end] for array, begin, end in self.places.T.tolist()]

    @property
    def loss_mask(self) -> list[np.ndarray | None]:
        """Of each piece ``bool`` of the same length; None where all tokens count."""
        masks = ((self.masks[array], begin, end) for array, begin, end in self.places.T.tolist())
        return [None if mask is None else mask[begin:end] for mask, begin, end in masks]

    def part(self, begin: int, end: int) -> Payload:
        """That of pieces ``begin:end``."""
        return replace(
            self,
            places=self.places[:, begin:end],
            arrays=None if self.arrays is None else self.arrays[begin:end],
        )
