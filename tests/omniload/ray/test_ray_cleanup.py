"""What a job leaves behind, however it ends: no process, no socket that is listened on, no shared memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.omniload.ray.jobs import Jobs, until
from tests.omniload.ray.ranks import ENDS_S, WAIT_S, Rank, left_of, segments


@pytest.mark.slow
@pytest.mark.parametrize("way", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_job_of_one_process_leaves_nothing(started: list[Rank], tmp_path: Path, way: str) -> None:
    shared = segments()
    rank = Rank(tmp_path, 4 if way == "end" else 10_000)
    started.append(rank)
    session = rank.says("session")
    rank.says("step")
    assert left_of(session, shared), "a session that runs is seen"
    children = psutil.Process(rank.process.pid).children(recursive=True)
    services = [" ".join(one.cmdline()) for one in children]
    assert any("gcs_server" in one for one in services)
    assert not [one for one in services if "monitor.py" in one or "dashboard.py" in one]
    at_work = [one for one, said in zip(children, services, strict=True) if "Actor" in said]
    assert at_work
    assert all(one.nice() == psutil.Process().nice() for one in at_work), (
        "ranks would wait for those that yield"
    )
    if way != "end":
        rank.process.send_signal(getattr(signal, way))
    status = rank.ends(WAIT_S if way == "end" else ENDS_S)
    interrupted = (1, -signal.SIGINT)  # Ray's hook at the end of the process makes it the one or the other
    expected = {"end": (0,), "SIGINT": interrupted, "SIGTERM": (143,), "SIGKILL": (-signal.SIGKILL,)}
    assert status in expected[way], rank.errors.read_text()
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


@pytest.mark.slow
def test_when_rank_0_is_killed_the_others_end_with_one_clear_error_and_nothing_is_left(
    started: list[Rank], tmp_path: Path, port: int
) -> None:
    shared = segments()
    ranks = [Rank(tmp_path, 10_000, rank, 2, port, does={"forks": True}) for rank in range(2)]
    started.extend(ranks)
    session = ranks[0].says("session")
    child = psutil.Process(ranks[0].says("child"))  # which lives on, and has all that rank 0 had open
    assert ranks[1].says("session") == session
    for rank in ranks:
        rank.says("step")
    ranks[0].process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    message = ranks[1].says("message")
    assert "rank 0" in message
    assert "\n" not in message
    assert ranks[1].ends() == 3
    assert time.monotonic() - began < 2 * ENDS_S
    of_child = f"process {child.pid} "
    until(
        lambda: all(one.startswith(of_child) for one in left_of(session, shared)),
        "only the child is left",
        ENDS_S,
    )
    assert child.is_running()
    child.kill()
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


@pytest.mark.slow
@pytest.mark.parametrize("starts_ray", [False, True], ids=["by default", "rank 0 had started Ray itself"])
def test_both_ranks_end_and_nothing_is_left(
    started: list[Rank], tmp_path: Path, port: int, starts_ray: bool
) -> None:
    shared = segments()
    ranks = [Rank(tmp_path, 6, rank, 2, port, does={"starts_ray": starts_ray}) for rank in range(2)]
    started.extend(ranks)
    session = ranks[0].says("session")
    assert [rank.ends(WAIT_S) for rank in ranks] == [0, 0], (
        ranks[0].errors.read_text() + ranks[1].errors.read_text()
    )
    until(lambda: not left_of(session, shared), f"nothing is left of {session}", ENDS_S)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGTERM", "SIGKILL"])
def test_no_actor_of_a_job_is_left_on_a_cluster_of_others(
    jobs: Jobs, cluster: str, started: list[Rank], tmp_path: Path, way: str
) -> None:
    rank = Rank(tmp_path, 10_000, ray={"address": cluster, "job": jobs.name, "loaders": 1})
    started.append(rank)
    rank.says("step")
    assert len(jobs.actors()) == 3
    rank.process.send_signal(getattr(signal, way))
    rank.ends()
    until(lambda: not jobs.actors(), "the actors of a job whose ranks are gone end", ENDS_S)
