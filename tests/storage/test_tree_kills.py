"""SIGKILL at every point of what is done with trees: every visible tree is whole, and none is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.seaweed import S3Server

pytestmark = pytest.mark.chaos

NUM_RANDOM_KILLS = 12


def run(scenario: str, *arguments: object) -> dict[str, int]:
    """Run ``tests.storage.kill_points`` and give what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.kill_points", scenario, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


# Where a kill can leave a tree; each must have occurred, or the kills did not reach the points that matter.
STATES = {
    "transaction": {"nothing", "committed"},
    "drain": {"local", "local+remote"},
    "evict": {"local+remote", "remote"},
    "cool_down": {"remote", "remote+cold", "cold"},
    "retain": {"remote", "remote+cold", "cold"},
}


@pytest.mark.parametrize("scenario", STATES)
def test_a_kill_at_any_point_leaves_whole_trees_and_can_be_recovered_from(
    tmp_path: Path, scenario: str
) -> None:
    found = run(scenario, str(tmp_path))
    assert {state for state, count in found.items() if count} == STATES[scenario]
    assert sum(found.values()) >= 10


def test_random_kills_on_s3_lose_nothing(s3: S3Server) -> None:
    found = run("random", f"s3://{s3.bucket}/kills", s3.storage_options, NUM_RANDOM_KILLS, 11)
    assert found.pop("whole at the end") >= 3
    assert sum(found.values()) == NUM_RANDOM_KILLS
    assert len(found) >= 2, "the kills came at different points"
