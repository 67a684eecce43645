"""Samples become pieces of at most ``seq_len`` tokens, by the overflow policy; all of a run at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Overflow: TypeAlias = Literal["split", "truncate", "drop", "error"]
Labels: TypeAlias = Literal["shifted", "hf"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The pieces of n samples; all arrays are ``int64``."""

    first_piece: np.ndarray
    """``[n + 1]``: sample i owns pieces ``first_piece[i]:first_piece[i + 1]``."""
    start: np.ndarray
    """``[p]``: first token of each piece in its sample."""
    length: np.ndarray
    """``[p]``: tokens of each piece."""
    targets: np.ndarray
    """``[p]``: tokens of its target that count in the loss."""
    truncated: np.ndarray
    """``[n]``: tokens cut off."""
    dropped: np.ndarray
    """``[n]``: tokens of samples dropped whole."""


def cut(
    tokens: np.ndarray, *, seq_len: int, overflow: Overflow, labels: Labels, trained: np.ndarray | None
) -> Cut:
    """Cut samples at multiples of ``seq_len`` from their start, or truncate or drop the long ones.

    The target of a piece is what its tokens predict. With ``shifted`` labels that is each next token of the sample,
    so also the one after the piece's end where the sample goes on; with ``hf`` the model shifts inside the piece and
    its first token is nobody's target.

    Args:
        tokens: ``int64[n]`` lengths of the samples, each at least 1.
        seq_len: longest piece.
        overflow: what becomes of longer samples; ``error`` cuts like ``split``, the caller refuses.
        labels: convention of the labels.
        trained: ``bool[sum(tokens)]`` which tokens of all samples one after the other count; None if all do.
    """
    kept = np.minimum(tokens, seq_len) if overflow == "truncate" else tokens
    pieces_of = -(-kept // seq_len)
    dropped = np.zeros_like(tokens)
    if overflow == "drop":
        dropped = np.where(tokens > seq_len, tokens, 0)
        pieces_of = np.where(dropped > 0, 0, pieces_of)
    first_piece = np.concatenate([[0], np.cumsum(pieces_of)])
    sample = np.repeat(np.arange(len(tokens)), pieces_of)
    start = (np.arange(len(sample)) - first_piece[sample]) * seq_len
    length = np.minimum(kept[sample] - start, seq_len)
    # Targets are the tokens (start, last] of the sample that count.
    last = np.minimum(start + length, kept[sample] - 1) if labels == "shifted" else start + length - 1
    targets = last - start
    if trained is not None:
        counted = np.concatenate([[0], np.cumsum(trained)])
        base = np.concatenate([[0], np.cumsum(tokens)])[sample] + 1
        targets = counted[base + last] - counted[base + start]
    return Cut(
        first_piece=first_piece,
        start=start,
        length=length,
        targets=targets,
        truncated=tokens - kept,
        dropped=dropped,
    )
