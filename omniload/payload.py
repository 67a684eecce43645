"""What source loaders hand to constructors: the tokens of pieces, and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omniload.samples.extras import Arrays

_NOTHING = np.empty(0, np.uint16)
_NARROW = (np.uint8, np.uint16, np.uint32)


def narrowest(most: int) -> type[np.unsignedinteger]:
    """The type in which tokens up to ``most`` travel: the narrowest unsigned one that holds them."""
    return next(dtype for dtype in _NARROW if most <= np.iinfo(dtype).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """Tokens of pieces, in the order asked for."""

    tokens: list[np.ndarray]
    """One array per piece, of any integer type: its tokens, and the one after it where the sample goes on."""
    loss_mask: list[np.ndarray | None]
    """``bool`` of the same lengths: tokens that count in the loss; None where all do."""
    arrays: list[Arrays] | None = None
    """Extra arrays of each piece, as they are kept; None if no piece has any."""

    def part(self, begin: int, end: int) -> Payload:
        """That of pieces ``begin:end``."""
        return Payload(
            tokens=self.tokens[begin:end],
            loss_mask=self.loss_mask[begin:end],
            arrays=None if self.arrays is None else self.arrays[begin:end],
        )

    @classmethod
    def gathered(cls, num_pieces: int, parts: Iterable[tuple[Sequence[int], Payload]]) -> Self:
        """Put payload together.

        Args:
            num_pieces: pieces of the result.
            parts: payloads with the place of each of their pieces in the result; together they fill it.
        """
        tokens = [_NOTHING] * num_pieces
        masks: list[np.ndarray | None] = [None] * num_pieces
        arrays: list[Arrays] | None = None
        for places, part in parts:
            for i, piece, mask in zip(places, part.tokens, part.loss_mask, strict=True):
                tokens[i], masks[i] = piece, mask
            if part.arrays is not None:
                arrays = arrays or [{}] * num_pieces
                for i, of_piece in zip(places, part.arrays, strict=True):
                    arrays[i] = of_piece
        return cls(tokens=tokens, loss_mask=masks, arrays=arrays)
