"""Connected loaders whose roles are actors: the source of a circle takes from them what it sends on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from omniload import DataLoader, MixtureLoader
from tests.distributed import run_distributed
from tests.omniload.mixtures import hard_mixture
from tests.omniload.ray.jobs import TIMEOUT_S, Jobs, digest

WORLD, STEPS, CUT = 3, 8, 5


def _connected(mixture: dict[str, Any], keys: dict[str, Any]) -> MixtureLoader:
    loader = DataLoader(mixture, dp_rank=0, dp_size=1, timeout_s=TIMEOUT_S, **keys)
    assert isinstance(loader, MixtureLoader)
    loader.connect("tp=3", timeout_s=TIMEOUT_S)
    return loader


def _begin_and_end(
    rank: int, world_size: int, mixture: dict[str, Any], first: dict[str, Any], then: dict[str, Any]
) -> tuple[list[str], str, str]:
    """Digests of all lanes, of which some are loaded in one way and the rest in another; and what hosts them."""
    with _connected(mixture, first) as loader:
        found = [digest(lane) for group in islice(loader.steps(), CUT) for lane in group]
        found.append(json.dumps(loader.control.skip_steps(1, loader.control.earliest_step + 2).step))
        host = type(loader._host).__name__
        state = json.dumps(loader.state_dict())
    dist.barrier()
    with _connected(mixture, then) as loader:
        loader.load_state_dict(json.loads(state))
        found += [digest(lane) for lane in loader]
        state = json.dumps(loader.state_dict())
    return found, state, host


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ray", "inline"])
def test_a_circle_goes_on_in_the_other_runtime_with_the_same_lanes(
    jobs: Jobs, cluster: str, tmp_path: Path, first: str
) -> None:
    mixture = hard_mixture(tmp_path, steps=STEPS + 4)
    ways = {
        "ray": {"execution": "ray", "ray": {"address": cluster, "job": jobs.name, "loaders": 1}},
        "inline": {"execution": "inline"},
    }
    then = next(way for way in ways if way != first)
    by_rank = run_distributed(_begin_and_end, WORLD, mixture, ways[first], ways[then])
    assert [host for _, _, host in by_rank] == ["SourceHost", "ReceiverHost", "ReceiverHost"]
    with DataLoader(mixture, execution="inline", timeout_s=TIMEOUT_S) as loader:
        steps = loader.steps()
        expected = [digest(lane) for group in islice(steps, CUT) for lane in group]
        at = json.loads(by_rank[0][0][len(expected)])
        loader.control.skip_steps(1, at)
        expected += [str(at), *(digest(lane) for group in steps for lane in group)]
        state = json.dumps(loader.state_dict())
    for found, its, _ in by_rank:
        assert found == expected
        assert its == state
