"""SIGKILL at every point of a save and at random ones: the newest visible checkpoint is complete and verifies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.killed_saves import KILLED, SCENARIOS, TIMED_OUT

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_RANDOM_KILLS = {
    "one rank": 130,
    "one rank overwriting": 100,
    "two ranks": 35,
    "two ranks overwriting": 35,
}


def run(*arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.killed_saves", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_point(name: str, tmp_path: Path) -> None:
    """The manifest, and nothing else, decides; ranks that live on end by themselves."""
    scenario = SCENARIOS[name]
    results = run("points", name, tmp_path)
    manifest = "write manifest.json" if scenario.overwrite else "create manifest.json"
    points = {(victim, point) for victim, point, _, _ in results}
    wanted = {"end of checkpoint.plan", "end of checkpoint.write"}
    wanted |= {"end of checkpoint.stage"} if scenario.background else set()
    for rank in range(scenario.world_size):
        file = f"model-{rank:05d}-000.safetensors"
        steps = {f"before data of {file}", f"after data of {file}", f"before close of {file}"}
        assert points >= {(rank, one) for one in wanted | steps}
    last = {
        "before write stored.parquet",
        f"before {manifest}",
        f"after {manifest}",
        "end of checkpoint.commit",
    }
    last |= {"before delete_tree", "after delete_tree"} if scenario.overwrite else set()
    assert points >= {(0, one) for one in last}

    committed = [point for _, point, _, value in results if value == 3]
    assert {f"after {manifest}", "end of checkpoint.commit"} <= set(committed)
    names = [point for victim, point, _, _ in results if victim == 0]
    for victim, point, codes, value in results:
        assert codes[victim] == KILLED, point
        late = victim == 0 and names.index(point) >= names.index(f"after {manifest}")
        assert (value == 3) == late, (victim, point)
        for rank, code in enumerate(codes):
            assert rank == victim or code == TIMED_OUT, "the others time out instead of waiting for ever"


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    """Saves go on in the same directory after each kill."""
    outcomes = run("random", name, tmp_path / "run", NUM_RANDOM_KILLS[name], 7)
    assert outcomes["killed"] > NUM_RANDOM_KILLS[name] // 4, "the others ended before"
    assert min(outcomes["committed"], outcomes["nothing"]) > 0, (
        "some kills came before, and some after the commit"
    )


def test_there_are_enough_random_kills() -> None:
    assert sum(NUM_RANDOM_KILLS.values()) >= 300
