"""Arranging the candidates of a step: which go into which row of which lane, and which wait for a later step.

Three ways, by the mixture:

- ``packing: best_fit`` – rows are packs of several pieces, each lane has the same number of them, of balanced cost;
- ``packing: none`` – a row is one piece, padded to the longest of its lane; each lane has the same number of rows;
- ``packing: none`` with ``lane_tokens`` – the same, with as many rows in a lane as the budget of padded tokens holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omniload.mixture import Mixture
from omniload.planner.balance import longest_processing_time
from omniload.planner.cost import attention_cost
from omniload.planner.pack import best_fit_decreasing, choose_packs

SLACK_PERCENT = 108
"""Candidates of a step in percent of the tokens it takes: the surplus is what lets packs come out full."""

_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """The candidates that a step takes."""

    taken: np.ndarray
    """``int64[n]``: candidates by pack, in the order they lie in it."""
    offsets: np.ndarray
    """``int64[packs + 1]``: pack p holds ``taken[offsets[p]:offsets[p + 1]]``."""
    lane_offsets: np.ndarray
    """``int64[lanes + 1]``: lane l holds the packs ``lane_offsets[l]:lane_offsets[l + 1]``."""


def enough(mixture: Mixture) -> tuple[int, int]:
    """How many tokens, or how many pieces, fill a step: always if rows are counted, else nearly always."""
    if mixture.packs is None:  # as much again as all lanes take, so that lengths of a lane are alike
        return 2 * mixture.lanes * mixture.lane_budget, _NO_LIMIT
    if mixture.packing == "none":
        return _NO_LIMIT, mixture.packs
    return -(-SLACK_PERCENT * mixture.packs * mixture.seq_len // 100), _NO_LIMIT


def arrange(candidates: np.ndarray, mixture: Mixture, step: int) -> Arrangement | None:
    """Arrange a step.

    Args:
        candidates: ``PIECE[n]``: the pieces carried from earlier steps, then those drawn, in the order drawn.
        mixture: says how.
        step: the step being planned.

    Returns:
        The arrangement, or None if there are too few candidates.
    """
    if mixture.packs is None:
        return _by_budget(candidates, mixture, step)
    if mixture.packing == "none":
        return _one_per_row(candidates, mixture.packs, mixture.lanes)
    return _packed(candidates, mixture.packs, mixture, step)


def _packed(candidates: np.ndarray, num_packs: int, mixture: Mixture, step: int) -> Arrangement | None:
    order, pack = best_fit_decreasing(candidates["length"], mixture.seq_len)
    placed = candidates[order]
    chosen = choose_packs(pack, placed["length"], placed["born"], step=step, num_packs=num_packs)
    if chosen is None:
        return None
    # Candidates by pack, then the packs by lane.
    by_pack = np.argsort(pack, kind="stable")
    bounds = np.searchsorted(pack[by_pack], np.arange(int(pack.max()) + 2))
    costs = np.add.reduceat(attention_cost(placed["length"][by_pack]), bounds[:-1])
    lanes = longest_processing_time(costs[chosen], mixture.lanes)
    final = chosen[lanes.ravel()]
    counts = (bounds[1:] - bounds[:-1])[final]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    index = np.repeat(bounds[final] - offsets[:-1], counts) + np.arange(offsets[-1])
    return Arrangement(
        taken=order[by_pack[index]],
        offsets=offsets,
        lane_offsets=np.arange(0, num_packs + 1, num_packs // mixture.lanes),
    )


def _one_per_row(candidates: np.ndarray, num_rows: int, num_lanes: int) -> Arrangement | None:
    """The oldest candidates, by length, so that those of a lane are of like length and little is padding."""
    if len(candidates) < num_rows:
        return None
    length = candidates["length"][:num_rows].astype(np.int64)
    return Arrangement(
        taken=np.argsort(-length, kind="stable"),
        offsets=np.arange(num_rows + 1),
        lane_offsets=np.arange(0, num_rows + 1, num_rows // num_lanes),
    )


def _by_budget(candidates: np.ndarray, mixture: Mixture, step: int) -> Arrangement | None:
    """Lanes of descending length, each closed by the first piece it has no room for; first taken those that waited."""
    length = candidates["length"].astype(np.int64)
    order = np.argsort(-length, kind="stable")
    lane_of = np.empty(len(order), np.int64)
    lane, rows, longest = -1, 0, 0
    for i, tokens in enumerate(length[order].tolist()):
        if lane < 0 or (rows + 1) * longest > mixture.lane_budget:
            lane, rows, longest = lane + 1, 0, tokens
        lane_of[i] = lane
        rows += 1
    chosen = choose_packs(
        lane_of, length[order], candidates["born"][order], step=step, num_packs=mixture.lanes
    )
    if chosen is None:
        return None
    bounds = np.searchsorted(lane_of, np.arange(lane + 2))
    rows_of = [order[bounds[one] : bounds[one + 1]] for one in chosen.tolist()]
    taken = np.concatenate(rows_of)
    return Arrangement(
        taken=taken,
        offsets=np.arange(len(taken) + 1),
        lane_offsets=np.concatenate([[0], np.cumsum([len(rows) for rows in rows_of])]),
    )
