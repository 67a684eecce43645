"""Processes of a job are killed at random while it runs; the ranks get what they would have got."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.running.chaos_run import LANES, ROLES, Plan, run

STEPS = 80
"""More than are taken between so many kills on a slow machine."""


@pytest.mark.slow
@pytest.mark.chaos
def test_nothing_is_lost_or_given_twice_whatever_is_killed(tmp_path: Path) -> None:
    kills = dict(zip(ROLES, (3, 2, 2, 2, 2, 1), strict=True))
    outcome = run(Plan(kills=kills, steps=STEPS, shadows=1, seed=5, settle_steps=1), tmp_path)
    assert Counter(kill.role for kill in outcome.kills) == kills
    assert (outcome.lost, outcome.duplicated, outcome.hangs) == (0, 0, 0)
    assert outcome.lanes == STEPS * LANES
