"""Costs that know nothing of the model: by attention's growth with the length, and by tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from omniload.planner.costs.protocol import fingerprint_of

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCost:
    """`attention_cost`, the default: right to a few percent for text and for decoders of usual shape.

    It does not see encoders: a mixture with images or audio is balanced by `MixedCost`.
    """

    name: ClassVar[str] = "attention"
    modules: ClassVar[tuple[str, ...]] = ("backbone",)

    @property
    def fingerprint(self) -> str:
        """Equal for models of equal costs."""
        return fingerprint_of("AttentionCost", LINEAR_TOKENS)

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """``int64[1, n]``, relative; exact for pieces below 2³¹ tokens."""
        del patches, frames
        return attention_cost(length)[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """A token costs 1: the usual balancing by tokens, blind to attention. The baseline of comparisons."""

    name: ClassVar[str] = "tokens"
    modules: ClassVar[tuple[str, ...]] = ("backbone",)

    @property
    def fingerprint(self) -> str:
        """Equal for models of equal costs."""
        return fingerprint_of("TokenCost", None)

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """``int64[1, n]``: the lengths."""
        del patches, frames
        return length.astype(np.int64)[None]
