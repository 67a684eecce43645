"""Whether what a user's strategy made of a step is lawful: nothing lost, nothing twice, every lane as declared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.errors import PlanError
from omniload.planner.arrange import may_be_cut, part_of
from omniload.planner.plan import Plan
from omniload.planner.rules import StepRules

_SAMPLE = ("source", "epoch", "file", "block", "row", "sub")


def check_plan(
    plan: object,
    step: int,
    candidates: np.ndarray,
    carried: np.ndarray,
    rules: StepRules,
    where: str,
) -> Plan:
    """The plan, if every candidate is in it once or waits, and its lanes are as the mixture wants them.

    Args:
        plan: what the strategy returned.
        step: the step planned.
        candidates: ``PIECE[n]`` that it could take.
        carried: ``PIECE[k]`` that wait.
        rules: what the mixture wants.
        where: the strategy, for the message.

    Raises:
        PlanError: names the first piece, or lane, that is wrong.
    """
    where = f"strategy {where}: step {step}"
    if not isinstance(plan, Plan):
        raise PlanError(f"{where}: returned {type(plan).__name__} and no Plan; end it with graph.plan()")
    if plan.step != step:
        raise PlanError(f"{where}: returned the plan of step {plan.step}")
    _check_shape(plan, rules, where)
    _check_pieces(np.concatenate([plan.pieces, carried]), candidates, rules, where)
    return plan


def _check_shape(plan: Plan, rules: StepRules, where: str) -> None:
    for offsets, end, what in (
        (plan.offsets, len(plan.pieces), "pack"),
        (plan.lane_offsets, plan.num_packs, "lane"),
    ):
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) <= 0).any():
            raise PlanError(
                f"{where}: a {what} is empty, or the offsets of the {what}s do not fit what is in them"
            )
    if plan.num_lanes != rules.lanes:
        raise PlanError(f"{where}: made {plan.num_lanes} lanes; the mixture has {rules.lanes}")
    tokens = np.add.reduceat(plan.pieces["length"].astype(np.int64), plan.offsets[:-1])
    if rules.packing != "workload":
        if tokens.max() > rules.seq_len:
            raise PlanError(
                f"{where}: pack {tokens.argmax()} has {tokens.max()} tokens, over seq_len {rules.seq_len}"
            )
        if rules.packs is not None and (np.diff(plan.lane_offsets) != rules.packs // rules.lanes).any():
            raise PlanError(
                f"{where}: the lanes have unequal numbers of packs; give each {rules.packs // rules.lanes}"
            )
    over = rules.over_cap(rules.loads(plan.pieces, plan.offsets[plan.lane_offsets[:-1]]))
    if over is not None:
        raise PlanError(f"{where}: {over}")


def _check_pieces(placed: np.ndarray, candidates: np.ndarray, rules: StepRules, where: str) -> None:
    """Parts of pieces tile the candidates: each token of each candidate is in one of them, with what belongs to it."""
    names = rules.names
    placed, candidates = _ordered(placed), _ordered(candidates)
    begins = np.cumsum(candidates["length"], dtype=np.int64) - candidates["length"]
    part_begins = np.cumsum(placed["length"], dtype=np.int64) - placed["length"]
    # Laid end to end in one order, parts of candidates begin where those do, and go on inside them.
    of_part = np.searchsorted(begins, part_begins, side="right") - 1
    if len(placed) and len(candidates):
        whole = candidates[of_part]
        offset = part_begins - begins[of_part]
        wrong = (placed["start"].astype(np.int64) != whole["start"] + offset) | (
            offset + placed["length"] > whole["length"]
        )
        for name in _SAMPLE:
            wrong |= placed[name] != whole[name]
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            expected, found = _key(whole[at]), _key(placed[at])
            piece, what = (
                (whole[at], "lost") if expected < found else (placed[at], "there twice, or of another step")
            )
            raise PlanError(f"{where}: {shown(piece, names)} is {what}")
        right = part_of(whole, offset, placed["length"].astype(np.int64), rules.labels)
        wrong = placed["length"] != whole["length"]
        wrong &= ~may_be_cut(whole, rules)
        wrong |= placed != right
        if wrong.any():
            raise PlanError(
                f"{where}: {shown(placed[wrong.argmax()], names)} is changed, or cut though it may not be"
            )
    if placed["length"].sum(dtype=np.int64) != candidates["length"].sum(dtype=np.int64):
        longer = candidates if len(candidates) >= len(placed) else placed
        what = "lost" if len(candidates) >= len(placed) else "not of this step"
        raise PlanError(f"{where}: {shown(longer[-1], names)} is {what}")


def _ordered(pieces: np.ndarray) -> np.ndarray:
    return pieces[np.lexsort([pieces[name] for name in ("start", *reversed(_SAMPLE))])]


def _key(piece: np.void) -> tuple[int, ...]:
    return tuple(int(piece[name]) for name in (*_SAMPLE, "start"))


def shown(piece: np.void, names: Sequence[str]) -> str:
    """A piece by where it comes from."""
    source = int(piece["source"])
    name = names[source] if source < len(names) else str(source)
    return (
        f"a piece of source '{name}' (epoch {piece['epoch']}, file {piece['file']}, block {piece['block']}, row"
        f" {piece['row']}, tokens {piece['start']} … {int(piece['start']) + int(piece['length'])})"
    )
