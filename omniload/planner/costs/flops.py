"""What FLOPs are counted in, and how many pairs of a query and a key attention computes."""

from __future__ import annotations

import numpy as np

FLOPS_UNIT = 1000
"""FLOPs that a cost of 1 stands for.

Fine enough that a token of a model of a thousand parameters costs something, coarse enough that a step of 10⁸ tokens of
a dense model of 4 · 10¹¹ parameters, in documents of 128k, stays below 2⁵⁸.
"""


def causal_pairs(length: np.ndarray, window: int | None = None) -> np.ndarray:
    """Pairs under a causal mask inside each document.

    Args:
        length: ``int64[n]``, below 2³¹.
        window: tokens that a token sees, itself among them (Hugging Face's ``sliding_window``); None for all so far.

    Returns:
        ``int64[n]``.
    """
    # The first tokens see fewer than the window holds.
    ramp = length if window is None else np.minimum(length, window)
    pairs: np.ndarray = ramp * (ramp + 1) // 2
    return pairs if window is None else pairs + (length - ramp) * window


def full_pairs(length: np.ndarray, block: int | None = None) -> np.ndarray:
    """Pairs where each token sees all others, of its document or of its block.

    Args:
        length: ``int64[n]``, below 2³¹.
        block: tokens of a block, cut from the start of the document; None for the document as a whole.

    Returns:
        ``int64[n]``.
    """
    rest = length if block is None else length % block
    pairs: np.ndarray = rest * rest
    return pairs if block is None else pairs + length // block * block**2
