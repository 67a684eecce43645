"""The stream is a pure function: timing, buffers, loaders, ranks and restarts are not among its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omniload import Chaos, DataLoader, Mixture
from omniload.loader import open_loader
from omniload.planner import Plan, StreamState
from omniload.runtime.inline import InlineRuntime, Step
from tests.omniload.mixtures import (
    LANES,
    SEQ_LEN,
    hard_mixture,
    on_both_runtimes,
    on_both_runtimes_with,
    token_rows,
    write_parquet,
)

STEPS = 300
WAYS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "cut": {"packing": "concatenate", "packs": 2 * LANES, "balance": "kk"},
    "uneven lanes, delayed": {
        "packing": "workload",
        "packs": 2 * LANES,
        "delay": {"thresholds": [48], "max_steps": 3},
        "caps": {"tokens": 3 * SEQ_LEN},
    },
    "by tokens, in two levels": {
        "packing": "first_fit",
        "packs": 2 * LANES,
        "cost": "tokens",
        "balance": "two_level",
    },
}
WAYS_ON_RAY = ("as by default", "uneven lanes, delayed")
any_way = pytest.mark.parametrize("way", WAYS)
any_way_on_both_runtimes = on_both_runtimes_with("way", WAYS, on_ray=WAYS_ON_RAY)


def plans_of(mixture: Mixture, chaos: Chaos | None, steps: int = STEPS) -> tuple[list[Plan], int]:
    """The plans of a run, and how many answers were refused for a stale lease."""
    loaders = [
        [
            open_loader(name, mixture, buffer_bytes=2**14 if chaos else 2**24)
            for _ in range(chaos.source(name).num_loaders() if chaos else 1)
        ]
        for name in mixture.names
    ]
    runtime = InlineRuntime(
        mixture,
        loaders,
        [0],
        StreamState.initial(len(loaders)),
        prefetch_steps=1 + (chaos.seed % 4 if chaos else 0),
        timeout_s=60,
        chaos=chaos,
    )
    try:
        plans = []
        while len(plans) < steps and isinstance(step := runtime.next_step(), Step):
            plans.append(step.plan)
        return plans, runtime.stale_answers
    finally:
        runtime.stop()


def lanes_of(loader: DataLoader) -> dict[tuple[int, int], dict[str, Any]]:
    """Every lane of a loader's stream by step and lane."""
    with loader:
        return {(lane["step"], lane["lane"]): lane for lane in loader}


def assert_same_lane(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in one.keys() - {"is_last_in_step"}:
        if isinstance(one[key], torch.Tensor):
            assert torch.equal(one[key], other[key]), key
        else:
            assert one[key] == other[key], key


@pytest.mark.slow
@pytest.mark.chaos
@any_way
def test_plans_do_not_depend_on_timing_buffers_evictions_or_loaders(tmp_path: Path, way: str) -> None:
    mixture = Mixture.load(hard_mixture(tmp_path, **WAYS[way]))
    quiet, _ = plans_of(mixture, None)
    assert len(quiet) == STEPS
    refused = 0
    for seed in range(3):
        chaotic, stale = plans_of(mixture, Chaos(seed=seed, max_delay_s=0.001, evict_probability=0.3))
        assert [plan.hash for plan in chaotic] == [plan.hash for plan in quiet]
        refused += stale
    assert refused > 0, "no stale lease was ever refused: the disturbance was too weak"
    epochs = {int(epoch) for plan in quiet for epoch in plan.pieces["epoch"]}
    assert max(epochs) >= 2
    carried = [plan for plan in quiet if (plan.pieces["born"] < plan.step).any()]
    assert len(carried) > STEPS / 2, "hardly a step had carried pieces"


@any_way_on_both_runtimes
def test_payload_survives_evictions_byte_for_byte(execution: str, tmp_path: Path, way: str) -> None:
    mixture = hard_mixture(tmp_path, steps=25, **WAYS[way])
    quiet = lanes_of(DataLoader(mixture, execution="inline"))
    chaos = Chaos(seed=5, evict_probability=0.5, max_delay_s=0.0005)
    chaotic = lanes_of(DataLoader(mixture, chaos=chaos, buffer_bytes=2**13))
    assert quiet.keys() == chaotic.keys()
    for key, lane in quiet.items():
        assert_same_lane(lane, chaotic[key])


@pytest.mark.parametrize(
    ("execution", "way", "dp_size"),
    [
        *(("inline", way, dp_size) for way in WAYS for dp_size in (2, 3, 4, 6, 12)),
        *(pytest.param("ray", way, 3, marks=pytest.mark.slow) for way in WAYS_ON_RAY),
    ],
    indirect=["execution"],
)
def test_any_number_of_ranks_share_the_same_global_steps(
    execution: str, tmp_path: Path, dp_size: int, way: str
) -> None:
    mixture = hard_mixture(tmp_path, steps=6, **WAYS[way])
    whole = lanes_of(DataLoader(mixture, execution="inline"))
    assert len(whole) == 6 * LANES
    shared: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in range(dp_size):
        part = lanes_of(DataLoader(mixture, dp_rank=rank, dp_size=dp_size))
        assert len(part) == 6 * LANES // dp_size
        assert not shared.keys() & part.keys()
        shared |= part
    assert shared.keys() == whole.keys()
    for key, lane in whole.items():
        assert_same_lane(lane, shared[key])


@any_way_on_both_runtimes
def test_resume_at_every_step_on_any_number_of_ranks_is_exact(
    execution: str, tmp_path: Path, way: str
) -> None:
    steps = 24
    mixture = hard_mixture(tmp_path, steps=steps, **WAYS[way])
    names = Mixture.load(mixture).names
    states, hashes, plans, lanes = [], [], [], {}
    with DataLoader(mixture) as loader:
        states.append(loader.state_dict())
        for group in loader.steps():
            states.append(loader.state_dict())
            plans.append(loader.plan(group[0]["step"]).pieces)
            hashes.append(loader.plan(group[0]["step"]).hash)
            lanes |= {(lane["step"], lane["lane"]): lane for lane in group}

    streams = [StreamState.from_json(state["stream"], names) for state in states]
    at = {name: names.index(name) for name in names}
    # Everything that makes it hard did occur, at some step that is resumed from.
    assert any(piece["start"] > 0 for stream in streams for piece in stream.carried), (
        "no split document carried"
    )
    assert any(stream.sources[at["short"]].exhausted for stream in streams), "no source exhausted"
    assert not streams[2].sources[at["short"]].exhausted
    subs = {stream.sources[at["tripled"]].cursor.sub for stream in streams}
    assert subs & {1, 2}, "no state inside the samples of one row"
    kept = sum(len({p.tobytes() for p in plan if p["source"] == at["filtered"]}) for plan in plans)
    assert kept < streams[-1].sources[at["filtered"]].rows, "the filter dropped no row"

    # To make actors takes long, so those begin anew at fewer steps, with any number of ranks still.
    for step in range(0, steps + 1, 1 if execution == "inline" else 11):
        state = states[step]
        text = json.dumps(state)
        dp_size = [1, 2, 3, 4, 6, 12][step % 6]
        rank = step % dp_size
        with DataLoader(mixture, dp_rank=rank, dp_size=dp_size) as resumed:
            resumed.load_state_dict(json.loads(text))
            assert resumed.state_dict() == state
            for group in resumed.steps():
                now = group[0]["step"]
                assert resumed.plan(now).hash == hashes[now]
                for lane in group:
                    assert_same_lane(lane, lanes[lane["step"], lane["lane"]])
            assert step == steps or now == steps - 1
            assert resumed.state_dict() == states[-1]


@on_both_runtimes
def test_resume_inside_a_step_is_exact_on_the_same_ranks_and_refused_on_others(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=3)
    whole = lanes_of(DataLoader(mixture, dp_rank=1, dp_size=3))
    with DataLoader(mixture, dp_rank=1, dp_size=3) as loader:
        iterator = iter(loader)
        for _ in range(4 + 2):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with DataLoader(mixture, dp_rank=0, dp_size=3) as other_rank:
        # Every rank stands at the same place, so the state of any of them serves all.
        iterator = iter(other_rank)
        for _ in range(4 + 2):
            next(iterator)
        assert json.loads(json.dumps(other_rank.state_dict())) == state
    with DataLoader(mixture, dp_rank=1, dp_size=3) as resumed:
        resumed.load_state_dict(state)
        rest = {(lane["step"], lane["lane"]): lane for lane in resumed}
        assert list(rest) == list(whole)[6:]
        for key, lane in rest.items():
            assert_same_lane(lane, whole[key])
    with (
        DataLoader(mixture, dp_rank=0, dp_size=2) as loader,
        pytest.raises(
            ValueError, match="dp_size 3 and cannot go on with dp_size 2: load it with dp_size 3, or save"
        ),
    ):
        loader.load_state_dict(state)


@on_both_runtimes
def test_the_held_out_rows_and_the_training_rows_are_disjoint_and_complete(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, held_out=0.3)
    mixture["sources"] = {"filtered": {"path": str(tmp_path / "filtered/*.parquet"), "weight": 1}}
    seen = {}
    for split in ("train", "held_out"):
        with DataLoader(mixture, split=split, packs=1, lanes=1) as loader:
            seen[split] = {
                (row["file"], row["row"]) for lane in loader for row in loader.samples(lane).to_pylist()
            }
    assert not seen["train"] & seen["held_out"]
    total = 40 + 41 + 42
    # The last step of each split may not fill a pack; all other rows appear.
    assert total - 8 <= len(seen["train"] | seen["held_out"]) <= total
    assert 0.15 * total < len(seen["held_out"]) < 0.45 * total


@on_both_runtimes
def test_every_token_of_a_lane_is_the_token_its_provenance_names(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    mixture = hard_mixture(tmp_path, steps=4)
    mixture["sources"] = {"long": mixture["sources"]["long"]}
    files = {
        path.name: pq.read_table(path)["input_ids"].to_pylist() for path in (tmp_path / "long").iterdir()
    }
    with DataLoader(mixture) as loader:
        for lane in loader:
            tokens = lane["input_ids"].flatten().numpy()
            bounds = lane["cu_seqlens"].tolist()
            starts = [at for at in bounds[:-1] if lane["segment_ids"].flatten()[at]]
            rows = loader.samples(lane).to_pylist()
            assert len(rows) == len(starts)
            for row, at in zip(rows, starts, strict=True):
                expected = files[Path(row["file"]).name][row["row"]][row["start"] : row["end"]]
                assert tokens[at : at + len(expected)].tolist() == expected
                assert row["end"] - row["start"] <= SEQ_LEN


@on_both_runtimes
def test_every_token_but_the_first_of_each_document_is_a_target_once(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data.parquet", token_rows(0, 50, 150))
    mixture = {
        "seq_len": SEQ_LEN,
        "packs": 1,
        "sources": {"long": {"path": str(tmp_path / "data.parquet"), "weight": 1}},
    }
    with DataLoader(mixture) as loader:
        targets = 0
        for lane in loader:
            assert int((lane["targets"] >= 0).sum()) == lane["num_target_tokens"]
            targets += lane["num_target_tokens"]
        ledger = loader.ledger().sources["long"]
        left = StreamState.from_json(loader.state_dict()["stream"], ["long"]).carried
    assert ledger.read_tokens == ledger.emitted_tokens == sum(map(len, token_rows(0, 50, 150)))
    assert ledger.carried_tokens == int(left["length"].sum())
    assert targets + int(left["targets"].sum()) == ledger.emitted_tokens - 50


def test_memory_of_the_state_is_ids_only(tmp_path: Path) -> None:
    with DataLoader(hard_mixture(tmp_path, steps=10)) as loader:
        for _ in loader:
            pass
        state = loader.state_dict()
    carried = len(StreamState.from_json(state["stream"], loader.mixture.names).carried)
    assert carried > 0
    assert len(json.dumps(state)) < 1000 + 4 * 256 + 48 * carried
