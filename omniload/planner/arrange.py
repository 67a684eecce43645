"""The ways of packing: candidates of a step into packs, more of them perhaps than the step takes.

- ``best_fit``, ``first_fit`` – packs of several whole pieces, longest first; the fullest packs are taken;
- ``concatenate`` – pieces end to end in the order drawn, cut where a pack is full;
- ``workload`` – one pack per lane, of as equal cost as can be and of any length up to ``caps.tokens``;
- ``none`` – a pack is one piece, padded to the longest of its lane; each lane has the same number of them, or with
  ``lane_tokens`` as many as that budget of padded tokens holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omniload.errors import PlanError
from omniload.planner.packing import (
    MAX_WAIT_STEPS,
    best_fit_decreasing,
    choose_packs,
    concatenate,
    first_fit_decreasing,
    workload_by_rank,
)
from omniload.planner.rules import StepRules
from omniload.samples.cut import Labels

CostOf = Callable[[np.ndarray], np.ndarray]
"""``int64[modules, n]`` of ``PIECE[n]``."""
Packer = Callable[[np.ndarray, int], np.ndarray]
"""A user's way: the pack of each of ``int64[n]`` tokens, given the capacity; -1 to let it wait."""
_Way = Callable[[np.ndarray, StepRules, int, CostOf], "Packs | None"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Candidates in packs."""

    piece: np.ndarray
    """``int64[m]``: the candidate of each part, by pack, in the order they lie in it."""
    start: np.ndarray | None
    """``int64[m]``: tokens of the candidate before the part; None if every part is a whole candidate."""
    length: np.ndarray
    """``int64[m]``: tokens of the part."""
    bounds: np.ndarray
    """``int64[packs + 1]``: pack p holds the parts ``bounds[p]:bounds[p + 1]``."""
    ranked: np.ndarray
    """``int64[packs]``: the packs, the one to be taken first in front; with ``lane_offsets``, those of the step."""
    lane_offsets: np.ndarray | None = None
    """``int64[lanes + 1]``: lane l holds ``ranked[lane_offsets[l]:lane_offsets[l + 1]]``; None: to be balanced."""

    @property
    def num_packs(self) -> int:
        """Packs there are."""
        return len(self.bounds) - 1

    def tokens(self) -> np.ndarray:
        """``int64[packs]``."""
        return np.add.reduceat(self.length, self.bounds[:-1])

    def of(self, candidates: np.ndarray) -> Self:
        """The same packs, of the candidates of these indices: ``int64[n]``."""
        return replace(self, piece=candidates[self.piece])

    def cut(
        self, candidates: np.ndarray, labels: Labels, parts: np.ndarray | slice = slice(None)
    ) -> np.ndarray:
        """``PIECE[m]``: the parts as pieces.

        Args:
            candidates: ``PIECE[n]``.
            labels: convention of the labels.
            parts: which of them.
        """
        pieces: np.ndarray = candidates.take(self.piece[parts])
        if self.start is None:
            return pieces
        return part_of(pieces, self.start[parts], self.length[parts], labels)

    def take(
        self, candidates: np.ndarray, packs: np.ndarray, labels: Labels
    ) -> tuple[np.ndarray, np.ndarray]:
        """``PIECE[m]`` of some packs in the order given, and ``int64[packs + 1]`` where each begins."""
        counts = np.diff(self.bounds)[packs]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        parts = np.repeat(self.bounds[packs] - offsets[:-1], counts) + np.arange(offsets[-1])
        return self.cut(candidates, labels, parts), offsets

    def left(self, candidates: np.ndarray, packs: np.ndarray, labels: Labels) -> np.ndarray:
        """``PIECE[n]``: what some packs leave of the candidates, in their order."""
        taken = np.zeros(self.num_packs, bool)
        taken[packs] = True
        parts = np.repeat(taken, np.diff(self.bounds))
        used = np.bincount(self.piece[parts], self.length[parts], len(candidates)).astype(np.int64)
        rest = np.flatnonzero(used < candidates["length"])
        pieces: np.ndarray = candidates.take(rest)
        if self.start is not None and used[rest].any():
            # Documents are cut from their start on, so what is left of one is its end.
            return part_of(pieces, used[rest], pieces["length"] - used[rest], labels)
        return pieces


_MOST_PATCHES = 2**31 - 1
"""Patches of a pack that packing in two dimensions reckons with."""


def packer(method: str | Packer) -> tuple[str, _Way]:
    """A way of packing by its name, or the user's own.

    Raises:
        PlanError: there is none of that name.
    """
    if callable(method):
        name = getattr(method, "__name__", "a function")
        return name, lambda candidates, rules, step, _: _by_user(method, name, candidates, rules, step)
    if method not in WAYS:
        raise PlanError(f"pack: '{method}' is none of {', '.join(WAYS)}")
    return method, WAYS[method]


def _best_fit(candidates: np.ndarray, rules: StepRules, step: int, _: CostOf) -> Packs | None:
    cap = rules.cap("patches")
    urgent = _overdue(candidates, step)
    if cap is None:
        order, pack = best_fit_decreasing(candidates["length"], rules.seq_len, urgent=urgent)
    else:
        # With its share of the lane's patches in each pack, whatever packs a lane gets fit into it. A piece with more
        # than that makes packs possible of which not all lanes can have one; balancing sees to that.
        share = cap // (rules.num_packs // rules.lanes)
        largest = int(candidates["patches"].max(initial=0))
        order, pack = best_fit_decreasing(
            candidates["length"],
            rules.seq_len,
            candidates["patches"],
            min(max(share, largest), _MOST_PATCHES),
            urgent=urgent,
        )
    return _preferred(candidates, order, pack, rules, step)


def _first_fit(candidates: np.ndarray, rules: StepRules, step: int, _: CostOf) -> Packs | None:
    order, pack = first_fit_decreasing(candidates["length"], rules.seq_len, urgent=_overdue(candidates, step))
    return _preferred(candidates, order, pack, rules, step)


def _overdue(candidates: np.ndarray, step: int) -> np.ndarray:
    """``bool[n]``: pieces whose packs are taken before fuller ones."""
    overdue: np.ndarray = step - candidates["born"].astype(np.int64) >= MAX_WAIT_STEPS
    return overdue


def _by_user(method: Packer, name: str, candidates: np.ndarray, rules: StepRules, step: int) -> Packs | None:
    length = candidates["length"].astype(np.int64)
    pack = np.asarray(method(length.copy(), rules.seq_len))
    if pack.shape != length.shape or pack.dtype.kind not in "iu":
        raise PlanError(
            f"pack '{name}': gave {pack.dtype}{list(pack.shape)}; return the pack of each candidate,"
            f" int64[{len(length)}]"
        )
    order = np.flatnonzero(pack >= 0)
    _, pack = np.unique(pack[order], return_inverse=True)
    tokens = np.bincount(pack, length[order]).astype(np.int64)
    if len(tokens) and tokens.max() > rules.seq_len:
        raise PlanError(f"pack '{name}': a pack has {tokens.max()} tokens, over seq_len {rules.seq_len}")
    return _preferred(candidates, order, pack, rules, step)


def _preferred(
    candidates: np.ndarray, order: np.ndarray, pack: np.ndarray, rules: StepRules, step: int
) -> Packs | None:
    """Whole candidates in packs, the overdue and then the fullest preferred; None if they are too few."""
    length, born = candidates["length"][order], candidates["born"][order]
    available = int(pack.max()) + 1 if len(pack) else 0
    if available < rules.num_packs:
        return None
    ranked = choose_packs(pack, length, born, step=step, num_packs=available)
    assert ranked is not None, "all of them are ranked"
    by_pack = np.argsort(pack, kind="stable")
    return Packs(
        piece=order[by_pack],
        start=None,
        length=length[by_pack].astype(np.int64),
        bounds=np.searchsorted(pack[by_pack], np.arange(available + 1)),
        ranked=ranked,
    )


def _concatenated(candidates: np.ndarray, rules: StepRules, _step: int, _: CostOf) -> Packs | None:
    """The packs in the order they are filled, so that nothing waits longer than what came before it."""
    length = candidates["length"].astype(np.int64)
    packing = concatenate(length, rules.seq_len, cuttable=may_be_cut(candidates, rules))
    # The pack filled last takes what comes in the next step.
    available = int(packing.pack[-1]) if len(packing.pack) else 0
    if available < rules.num_packs:
        return None
    parts = packing.pack < rules.num_packs
    return Packs(
        piece=packing.piece[parts],
        start=packing.start[parts],
        length=packing.length[parts],
        bounds=np.searchsorted(packing.pack[parts], np.arange(rules.num_packs + 1)),
        ranked=np.arange(rules.num_packs),
    )


def _by_workload(candidates: np.ndarray, rules: StepRules, step: int, cost_of: CostOf) -> Packs | None:
    """A pack per lane, of balanced cost."""
    length = candidates["length"].astype(np.int64)
    if length.sum() < rules.num_packs * rules.seq_len or len(candidates) < rules.lanes:
        return None
    patches = rules.cap("patches")
    packing = workload_by_rank(
        length,
        cost_of(candidates).sum(axis=0),
        num_packs=rules.lanes,
        capacity=rules.most_tokens,
        carried=candidates["born"] < step,
        patches=None if patches is None else candidates["patches"].astype(np.int64),
        patch_capacity=patches or 0,
    )
    return Packs(
        piece=packing.piece,
        start=None,
        length=packing.length,
        bounds=np.searchsorted(packing.pack, np.arange(rules.lanes + 1)),
        ranked=np.arange(rules.lanes),
        lane_offsets=np.arange(rules.lanes + 1),
    )


def _one_per_row(candidates: np.ndarray, rules: StepRules, step: int, _: CostOf) -> Packs | None:
    """The oldest candidates, by length, so that those of a lane are of like length and little is padding."""
    if rules.lane_tokens is not None:
        return _by_budget(candidates, rules, rules.lane_tokens, step)
    if len(candidates) < rules.num_packs:
        return None
    length = candidates["length"][: rules.num_packs].astype(np.int64)
    order = np.argsort(-length, kind="stable")
    return _rows(order, length[order], np.arange(0, rules.num_packs + 1, rules.num_packs // rules.lanes))


def _by_budget(candidates: np.ndarray, rules: StepRules, budget: int, step: int) -> Packs | None:
    """Lanes of descending length, each closed by the first piece it has no room for; first taken those that waited."""
    length = candidates["length"].astype(np.int64)
    order = np.argsort(-length, kind="stable")
    lane_of = np.empty(len(order), np.int64)
    lane, rows, longest = -1, 0, 0
    for i, tokens in enumerate(length[order].tolist()):
        if lane < 0 or (rows + 1) * longest > budget:
            lane, rows, longest = lane + 1, 0, tokens
        lane_of[i] = lane
        rows += 1
    chosen = choose_packs(lane_of, length[order], candidates["born"][order], step=step, num_packs=rules.lanes)
    if chosen is None:
        return None
    bounds = np.searchsorted(lane_of, np.arange(lane + 2))
    rows_of = [order[bounds[one] : bounds[one + 1]] for one in chosen.tolist()]
    taken = np.concatenate(rows_of)
    return _rows(taken, length[taken], np.concatenate([[0], np.cumsum([len(rows) for rows in rows_of])]))


def _rows(piece: np.ndarray, length: np.ndarray, lane_offsets: np.ndarray) -> Packs:
    """Packs of one candidate each, in the order of their lanes."""
    return Packs(
        piece=piece,
        start=None,
        length=length,
        bounds=np.arange(len(piece) + 1),
        ranked=np.arange(len(piece)),
        lane_offsets=lane_offsets,
    )


def may_be_cut(pieces: np.ndarray, rules: StepRules) -> np.ndarray:
    """``bool[n]``: pieces of which every part has as many targets as its length says, and that bring no images."""
    untrained = pieces["length"].astype(np.int64) - pieces["targets"]
    if rules.labels == "hf":
        plain = untrained == 1
    else:
        # One that is no target is the last of the document, unless the document goes on after the piece and one token
        # of it is masked; that can only be where the piece is as long as can be.
        plain = (untrained == 0) | ((untrained == 1) & (pieces["length"] < rules.seq_len))
    may_be: np.ndarray = plain & (pieces["patches"] == 0) & (pieces["frames"] == 0)
    return may_be


def part_of(pieces: np.ndarray, start: np.ndarray, length: np.ndarray, labels: Labels) -> np.ndarray:
    """``PIECE[n]``: of each piece so many tokens from one on: parts of pieces that may be cut, or all of others."""
    parts: np.ndarray = pieces.copy()
    parts["targets"] = _targets_of(pieces, start, length, labels)
    parts["start"] += start.astype(np.uint32)
    parts["length"] = length
    return parts


def _targets_of(pieces: np.ndarray, start: np.ndarray, length: np.ndarray, labels: Labels) -> np.ndarray:
    """``int64[n]``: targets of parts of pieces; only of those that may be cut, or parts that are the whole."""
    whole = length == pieces["length"]
    if labels == "hf":  # the first token of a part is nobody's target
        return np.where(whole, pieces["targets"], length - 1)
    # Every token predicts the next one, but for the last one of the document.
    untrained = pieces["length"].astype(np.int64) - pieces["targets"]
    at_end = start + length == pieces["length"]
    return np.where(whole, pieces["targets"], length - np.where(at_end, untrained, 0))


WAYS: dict[str, _Way] = {
    "best_fit": _best_fit,
    "first_fit": _first_fit,
    "concatenate": _concatenated,
    "workload": _by_workload,
    "none": _one_per_row,
}
"""The ways that a mixture file names."""
