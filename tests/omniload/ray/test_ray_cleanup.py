"""What a job leaves behind, however it ends: no process, no socket that is listened on, no shared memory."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.omniload.mixtures import hard_mixture
from tests.omniload.ray.jobs import Jobs, until

ENDS_S = 30.0
"""How long what is left of a job may last."""
WAIT_S = 180.0


class Rank:
    """A process of a job, and what it says."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        rank: int = 0,
        size: int = 1,
        port: int = 0,
        does: tuple[str, ...] = (),
        **keys: Any,
    ) -> None:
        mixture = hard_mixture(folder / "data", steps=steps)
        orders = {
            **dict.fromkeys(does, True),
            "mixture": mixture,
            "step_s": 0.1,
            "keys": {"timeout_s": 60.0, "ray": {"loaders": 1}, **keys},
        }
        launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # As from a shell: nothing of the cluster that the tests share, but what it takes to join it.
        own = keys.get("ray", {}).get("address") is None
        env = {key: value for key, value in os.environ.items() if not (own and key.startswith("RAY_"))}
        env |= {key: str(value) for key, value in launched.items()} if size > 1 else {}
        self.errors = folder / f"{rank}.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.omniload.ray.rank_script", json.dumps(orders)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env | {"OMNILOAD_RUNTIME_DIR": str(folder / "runtime")},
            )
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def end(self) -> None:
        """Kill it, if it is there."""
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def says(self, key: str) -> Any:
        """The next that it says of something."""
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            if line.startswith("{"):
                self.said.append(json.loads(line))
                if key in self.said[-1]:
                    return self.said[-1][key]
        pytest.fail(f"it ended without saying {key}: {self.errors.read_text()[-2000:]}")

    def ends(self, within_s: float = ENDS_S) -> int:
        """Its exit status."""
        return self.process.wait(within_s)


def left_of(session: str, shared: set[str]) -> list[str]:
    """What there is of a session of Ray: processes, sockets listened on, segments of shared memory."""
    name = Path(session).name
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            said = " ".join(process.info["cmdline"] or [])
            held = [one.path for one in process.open_files() if name in one.path]
            if (name in said or held) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} {said[:80]} {held[:1]}")
        except psutil.Error:
            continue
    sockets = Path("/proc/net/unix").read_text().splitlines()
    found += [line for line in sockets if name in line]
    found += [str(path) for path in _segments() - shared]
    return found


def _segments() -> set[str]:
    """Ray's segments of shared memory that have a name; one without goes with the last process that maps it."""
    return {str(path) for path in Path("/dev/shm").glob("plasma*")}


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Rank]]:
    """Ranks that are ended in any case."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_job_of_one_process_leaves_nothing(started: list[Rank], tmp_path: Path, way: str) -> None:
    shared = _segments()
    rank = Rank(tmp_path, 4 if way == "end" else 10_000)
    started.append(rank)
    session = rank.says("session")
    rank.says("step")
    assert left_of(session, shared), "a session that runs is seen"
    services = [" ".join(one.cmdline()) for one in psutil.Process(rank.process.pid).children(recursive=True)]
    assert any("gcs_server" in one for one in services)
    assert not [one for one in services if "monitor.py" in one or "dashboard.py" in one]
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
    shared = _segments()
    ranks = [Rank(tmp_path, 10_000, rank, 2, port, does=("forks",)) for rank in range(2)]
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
@pytest.mark.parametrize("does", [(), ("starts_ray",)], ids=["by default", "rank 0 had started Ray itself"])
def test_both_ranks_end_and_nothing_is_left(
    started: list[Rank], tmp_path: Path, port: int, does: tuple[str, ...]
) -> None:
    shared = _segments()
    ranks = [Rank(tmp_path, 6, rank, 2, port, does=does) for rank in range(2)]
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
