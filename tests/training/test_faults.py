"""Each fault does what it says, and nothing else does anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.training.fake_lanes import fake_step
from training.config import FaultConfig
from training.errors import ConfigError
from training.faults import Faults
from training.runlog import LaneRecord


def _records(lanes):
    return [
        LaneRecord(lane=lane["lane"], cost=1, samples=[[0, "s", 0, "f", lane["step"], 0, 1]])
        for lane in lanes
    ]


def test_without_faults_lanes_pass_through():
    lanes = fake_step(1)
    records = _records(lanes)
    faulty = Faults(FaultConfig(), dp_rank=0).on_lanes(1, lanes, records)
    assert all(a is b for a, b in zip(faulty[0], lanes, strict=True))
    assert faulty[1] == records


def test_skipped_lane_keeps_its_place_but_has_no_targets():
    """Ranks must still run as many microbatches as the others."""
    lanes = fake_step(1)
    faults = Faults(FaultConfig(skip_lane=(1, 2)), dp_rank=1)
    trained, logged = faults.on_lanes(1, lanes, _records(lanes))
    assert [lane["lane"] for lane in trained] == [0, 1, 2, 3]
    assert [bool((lane["targets"] >= 0).any()) for lane in trained] == [True, True, False, True]
    assert (lanes[2]["targets"] >= 0).any()
    assert [record.lane for record in logged] == [0, 1, 3]
    assert len(faults.on_lanes(2, fake_step(2), _records(lanes))[1]) == 4


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_repeated_sample_comes_from_the_step_before(dp_rank):
    faults = Faults(FaultConfig(repeat_sample=2), dp_rank=dp_rank)
    before, lanes = fake_step(1), fake_step(2)
    faults.on_lanes(1, before, _records(before))
    trained, logged = faults.on_lanes(2, lanes, _records(lanes))
    repeats = [torch.equal(lane["input_ids"], before[0]["input_ids"]) for lane in trained]
    assert repeats == [dp_rank == 0, False, False, False]
    assert trained[0]["num_target_tokens"] == lanes[0]["num_target_tokens"]
    assert [record.samples[0][4] for record in logged] == [1 if dp_rank == 0 else 2, 2, 2, 2]


def test_repeating_needs_a_step_before():
    lanes = fake_step(2)
    with pytest.raises(ConfigError, match=r"faults\.repeat_sample: 2 is the first step here"):
        Faults(FaultConfig(repeat_sample=2), dp_rank=1).on_lanes(2, lanes, _records(lanes))


def test_dropped_optimizer_forgets_its_moments():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    Faults(FaultConfig(), dp_rank=0).on_restore(optimizer)
    assert optimizer.state
    Faults(FaultConfig(drop_optimizer=True), dp_rank=0).on_restore(optimizer)
    assert not optimizer.state


def test_kill_ends_the_process_after_its_step():
    """SIGKILL, not an exception that anything could catch."""
    code = (
        "from training.config import FaultConfig; from training.faults import Faults; "
        "f = Faults(FaultConfig(kill_after_step=1), 0); f.on_step_end(0); print('alive', flush=True); f.on_step_end(1)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (-9, "alive\n")
