"""Batches of single samples keep the laws that packs keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniload import Chaos, DataLoader
from omniload.planner import StreamState
from tests.omniload.mixtures import LANES, SEQ_LEN, hard_mixture, on_both_runtimes
from tests.omniload.test_laws import assert_same_lane, lanes_of

BUDGET = 3 * SEQ_LEN
WAYS: dict[str, dict[str, Any]] = {
    "samples": {"packing": "none", "packs": 3 * LANES},
    "budget": {"packing": "none", "packs": None, "lane_tokens": BUDGET},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@on_both_runtimes
def test_a_row_is_one_sample_padded_to_the_longest_of_its_lane(tmp_path: Path, way: dict[str, Any]) -> None:
    shapes = set()
    with DataLoader(hard_mixture(tmp_path, steps=8, **way)) as loader:
        for lane in loader:
            used = (lane["segment_ids"] > 0).sum(dim=1)
            assert lane["segment_ids"].max() == 1
            assert used.min() > 0
            assert used.max() == lane["input_ids"].shape[1]
            assert len(loader.samples(lane)) == len(lane["input_ids"])
            if "lane_tokens" in way:
                assert lane["input_ids"].numel() <= BUDGET
            else:
                assert len(lane["input_ids"]) == 3
            shapes.add(tuple(lane["input_ids"].shape))
    assert len(shapes) > 5, "all lanes were alike: nothing was padded"


@pytest.mark.parametrize(
    ("execution", "dp_size"),
    [("inline", 3), ("inline", 4), pytest.param("ray", 2, marks=pytest.mark.slow)],
    indirect=["execution"],
)
def test_any_number_of_ranks_share_the_batches(
    execution: str, tmp_path: Path, way: dict[str, Any], dp_size: int
) -> None:
    mixture = hard_mixture(tmp_path, steps=6, **way)
    whole = lanes_of(DataLoader(mixture, execution="inline"))
    shared: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in range(dp_size):
        shared |= lanes_of(DataLoader(mixture, dp_rank=rank, dp_size=dp_size))
    assert len(whole) == 6 * LANES
    assert shared.keys() == whole.keys()
    for key, lane in whole.items():
        assert_same_lane(lane, shared[key])


@on_both_runtimes
def test_resume_at_every_step_is_exact(execution: str, tmp_path: Path, way: dict[str, Any]) -> None:
    mixture = hard_mixture(tmp_path, steps=12, **way)
    states, hashes = [], []
    with DataLoader(mixture, chaos=Chaos(seed=3, max_delay_s=0.0005, evict_probability=0.3)) as loader:
        for group in loader.steps():
            hashes.append(loader.plan(group[0]["step"]).hash)
            states.append(json.dumps(loader.state_dict()))
    for step in range(0, len(states), 1 if execution == "inline" else 7):
        state = states[step]
        with DataLoader(mixture) as resumed:
            resumed.load_state_dict(json.loads(state))
            for group in resumed.steps():
                assert resumed.plan(group[0]["step"]).hash == hashes[group[0]["step"]]
            assert json.dumps(resumed.state_dict()) == states[-1]
        assert group[0]["step"] == len(hashes) - 1 or step == len(states) - 1


@on_both_runtimes
def test_every_sample_is_served_once_in_an_epoch(tmp_path: Path, way: dict[str, Any]) -> None:
    mixture = hard_mixture(tmp_path, **way)
    mixture["sources"] = {"filtered": {"path": str(tmp_path / "filtered/*.parquet"), "weight": 1}}
    seen: list[tuple[str, int]] = []
    with DataLoader(mixture, lanes=1, packs=way["packs"] and 3) as loader:
        for lane in loader:
            seen += [
                (row["file"], row["row"]) for row in loader.samples(lane).to_pylist() if not row["start"]
            ]
        left = StreamState.from_json(loader.state_dict()["stream"], ["filtered"])
    assert left.sources[0].exhausted
    assert len(seen) == len(set(seen))
    assert len(seen) + int((left.carried["start"] == 0).sum()) == 40 + 41 + 42
    assert len(seen) > 60
