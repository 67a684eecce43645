"""Which rows are held out of training: a keyed hash of the row's identity, the same for any window, epoch or rank."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from omniload.sources.order import key64, mix64

Split: TypeAlias = Literal["train", "held_out"]


def in_split(
    split: Split, fraction: float, *, seed: int, content: str, row_ids: np.ndarray
) -> np.ndarray | None:
    """Which rows of a file belong to a split.

    Args:
        split: the part asked for; every row is in exactly one.
        fraction: probability that a row is held out, in [0, 1).
        seed: seed of the mixture.
        content: what tells the file from others whatever its name, so that a row that two sources share is held out
            of both.
        row_ids: ``int64[n]`` identities of the rows in the file.

    Returns:
        ``bool[n]``, or None if every row belongs to it.
    """
    threshold = int(fraction * 2**64)
    if not threshold and split == "train":
        return None
    held_out = mix64(key64(seed, "held_out", content), row_ids) < np.uint64(threshold)
    return held_out if split == "held_out" else ~held_out
