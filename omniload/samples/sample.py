"""What a row holds before it is tokenised: token ids, or text with the stretches of it that are trained on."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np


class BadSample(ValueError):
    """The bytes of a row make no sample; the message says why."""


class TokenIds(NamedTuple):
    """Ready-made tokens."""

    ids: np.ndarray
    """``int[n]`` token ids, not yet checked against the vocabulary."""
    mask: np.ndarray | None = None
    """``bool[n]``: tokens that are trained on; None if all are."""


class Text(NamedTuple):
    """Text that is encoded as a whole."""

    text: str
    """The text."""
    trained: tuple[tuple[int, int], ...] | None = None
    """Bounds, in characters and ascending, of the stretches that are trained on; None if all of it is."""
    is_chat: bool = False
    """Whether a chat template wrote it, and with it the ends of its turns."""


Sample: TypeAlias = TokenIds | Text
