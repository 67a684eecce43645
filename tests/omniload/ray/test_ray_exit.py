"""Ranks of a machine end at different times: the first of them runs the cluster that the others are in."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.omniload.ray.jobs import until
from tests.omniload.ray.ranks import ENDS_S, Rank, left_of, segments

pytestmark = pytest.mark.slow
FOREVER = 100_000


def two(
    started: list[Rank],
    folder: Path,
    port: int,
    *,
    steps: int = FOREVER,
    first: Any,
    second: Any,
    **keys: Any,
) -> list[Rank]:
    """Both ranks of a job, which do this."""
    ranks = [
        Rank(folder, steps, rank, 2, port, does=does, **keys) for rank, does in enumerate((first, second))
    ]
    started.extend(ranks)
    return ranks


def lines_of(rank: Rank) -> list[str]:
    """What it wrote of our own where errors go."""
    return [line for line in rank.errors.read_text().splitlines() if "ray: rank 0" in line]


@pytest.mark.parametrize("then", ["closes it", "keeps it", "has it collected"])
def test_rank_0_stays_until_the_other_rank_is_done(
    started: list[Rank], tmp_path: Path, port: int, then: str
) -> None:
    """Whatever became of its own loader, and though the other makes another one when rank 0 is done."""
    shared = segments()
    steps = 25
    ranks = two(
        started,
        tmp_path,
        port,
        steps=steps,
        first={"takes": 2, "then": then},
        second={"loaders": 2, "then": "closes it"},
    )
    session = ranks[0].says("session")
    ranks[0].says("done")
    ranks[1].says("session")
    ranks[1].says("session")
    taken = [ranks[1].says("step") for _ in range(steps)]
    assert taken == list(range(steps)), "of the loader that it made after rank 0 was done"
    assert ranks[0].process.poll() is None, "which is there to its last step"
    assert [rank.ends() for rank in reversed(ranks)] == [0, 0]
    assert [lines_of(rank) for rank in ranks] == [[], []]
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


def test_rank_0_does_not_wait_for_a_rank_that_was_killed(
    started: list[Rank], tmp_path: Path, port: int
) -> None:
    """Not longer, that is, than the actors of the job need to see it; and nothing is said about it."""
    ranks = two(started, tmp_path, port, first={"takes": 2}, second={})
    ranks[0].says("done")
    for _ in range(20):
        ranks[1].says("step")
    assert ranks[0].process.poll() is None, "it waits"
    ranks[1].process.send_signal(signal.SIGKILL)
    assert ranks[0].ends() == 0
    assert lines_of(ranks[0]) == []


def test_the_other_rank_goes_on_when_one_was_killed(started: list[Rank], tmp_path: Path, port: int) -> None:
    """Once nothing was heard of it for 15 s."""
    ranks = two(started, tmp_path, port, first={}, second={}, timeout_s=40.0)
    for rank in ranks:
        rank.says("step")
    ranks[1].process.send_signal(signal.SIGKILL)
    while ranks[0].says("step") < 30:
        pass


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM"])
def test_rank_0_that_is_told_to_end_does_so_soon_and_the_other_says_why_it_does(
    started: list[Rank], tmp_path: Path, port: int, way: str
) -> None:
    """It waits for the other, which goes on, and no longer than it says."""
    shared = segments()
    ranks = two(started, tmp_path, port, first={}, second={})
    session = ranks[0].says("session")
    for rank in ranks:
        rank.says("step")
    ranks[0].process.send_signal(getattr(signal, way))
    status = ranks[0].ends()
    assert status in {"SIGINT": (1, -signal.SIGINT), "SIGTERM": (143,)}[way]
    [line] = lines_of(ranks[0])
    assert "other ranks were still there 20 s after" in line
    assert "rank 0, which ran the Ray cluster of the job, is gone" in ranks[1].says("message")
    assert ranks[1].ends() == 3
    assert any(one["step"] > 20 for one in ranks[1].said if "step" in one), "the other was at work"
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


def test_a_second_signal_ends_the_wait_of_rank_0(started: list[Rank], tmp_path: Path, port: int) -> None:
    """And the cluster with it."""
    shared = segments()
    ranks = two(started, tmp_path, port, first={"takes": 2}, second={})
    session = ranks[0].says("session")
    ranks[0].says("done")
    for _ in range(20):
        ranks[1].says("step")
    assert ranks[0].process.poll() is None, "it waits"
    ranks[0].process.send_signal(signal.SIGTERM)
    ranks[0].ends()
    assert lines_of(ranks[0]) == [], "or it would have waited to the end"
    assert "is gone" in ranks[1].says("message")
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


def test_a_rank_whose_cluster_goes_away_ends_with_the_error_of_its_loader(
    started: list[Rank], tmp_path: Path, port: int
) -> None:
    """Though Ray, which would tell the cluster of an error that nobody catches, waits for it and then ends the rank."""
    ranks = two(started, tmp_path, port, first={}, second={"careless": True})
    for rank in ranks:
        rank.says("step")
    ranks[0].process.send_signal(signal.SIGKILL)
    assert "is gone" in ranks[1].says("message")
    assert ranks[1].ends() == 1
    assert len(lines_of(ranks[1])) == 1
    *_, last = ranks[1].errors.read_text().splitlines()
    assert last.startswith(
        "omniload.errors.LoaderStopped: rank 0, which ran the Ray cluster of the job, is gone"
    )


def test_a_rank_that_is_done_loading_goes_on_when_its_cluster_goes_away(
    started: list[Rank], tmp_path: Path, port: int
) -> None:
    """Where Ray ends a process that is connected to a cluster that is gone, after a minute or what it is given."""
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    ranks = two(started, tmp_path, port, first={}, second={"takes": 2, "works_s": 15.0}, env=soon)
    ranks[0].says("step")
    ranks[1].says("trained")
    ranks[0].process.send_signal(signal.SIGKILL)
    ranks[1].says("done")
    assert ranks[1].ends() == 0
    [line] = lines_of(ranks[1])
    assert "rank 1 goes on without" in line
