"""Where the tokens of a step come from: files and rows of the pieces of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from omniload.planner import Plan


class Addresses(Protocol):
    """A source that knows what its addresses stand for: a loader, or what asks one."""

    name: str

    def origins(self, file: int, block: int, rows: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Where rows of a block come from: the paths of their files, and ``int64[n]`` their ids there."""


def origins(plan: Plan, lane: int, loaders: Sequence[Addresses]) -> pa.Table:
    """The pieces of one lane of a plan.

    Args:
        plan: the plan.
        lane: which of its lanes.
        loaders: one for each source, in the order of `omniload.mixture.Mixture.names`.

    Returns:
        One row per piece, in the order they lie in: ``pack`` (int64, numbered in the step), ``source`` (string),
        ``epoch`` (int64), ``file`` (string), ``row`` (int64: the id that the format gives rows, say the row number,
        or for JSONL the byte offset of the line), ``start`` and ``end`` (int64, tokens of the sample).
    """
    pieces = plan.pieces[plan.lane_slice(lane)]
    rows = np.empty(len(pieces), np.int64)
    files = np.empty(len(pieces), object)
    blocks, block_of = np.unique(pieces[["source", "file", "block"]], return_inverse=True)
    for b, (source, file, block) in enumerate(blocks.tolist()):
        here = np.flatnonzero(block_of == b)
        files[here], rows[here] = loaders[source].origins(file, block, pieces["row"][here])
    start = pieces["start"].astype(np.int64)
    return pa.table(
        {
            "pack": plan.pack_of_piece(lane),
            "source": pa.array([loaders[i].name for i in pieces["source"].tolist()], pa.string()),
            "epoch": pieces["epoch"].astype(np.int64),
            "file": pa.array(files, pa.string()),
            "row": rows,
            "start": start,
            "end": start + pieces["length"],
        }
    )
