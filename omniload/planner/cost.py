"""Cost of a pack, as integers computed from lengths only."""

from __future__ import annotations

import numpy as np

LINEAR_TOKENS = 12 * 2048
"""Length at which attention costs as much as the rest of a decoder layer.

A layer of hidden size h spends about ``24 h²`` FLOPs per token on its matrices and ``2 h L`` per token on causal
attention over a document of L tokens: equal at ``L = 12 h``. The constant is that of h = 2048.
"""


def attention_cost(length: np.ndarray) -> np.ndarray:
    """Relative cost of a document-masked decoder on pieces of these lengths: quadratic plus linear.

    Args:
        length: integers, tokens per piece.

    Returns:
        ``int64`` of the same shape; exact for pieces below 2³¹ tokens.
    """
    tokens = length.astype(np.int64)
    return tokens * (tokens + LINEAR_TOKENS)
