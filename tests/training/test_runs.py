"""Whole runs of the trainer on a small real mixture: log, save, die, resume, stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from checkpoint import CheckpointManager
from training.__main__ import main

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Tiny operations on several threads spend their time waiting for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, with a mixture of two pre-tokenised sources beside it, one of documents that get split."""
    folder = tmp_path_factory.mktemp("config")
    numbers = np.random.default_rng(0)
    for name, lengths in (("short", numbers.integers(2, 20, 400)), ("long", numbers.integers(50, 90, 60))):
        rows = [numbers.integers(1, 62, length).tolist() for length in lengths]
        pq.write_table(pa.table({"input_ids": rows}), folder / f"{name}.parquet", row_group_size=20)
    mixture = {
        "seq_len": 32,
        "packs": 4,
        "lanes": 2,
        "execution": "inline",
        "sources": {
            "short": {"path": "short.parquet", "weight": 0.5},
            "long": {"path": "long.parquet", "weight": 0.5},
        },
    }
    (folder / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    settings = {
        "out": str(folder / "unused"),
        "mixture": str(folder / "mixture.yaml"),
        "steps": STEPS,
        "dtype": "float64",
        "checkpoint_every": 2,
        "timeout_s": 60,
        "model": {
            "vocab_size": 62,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 2,
            "max_position_embeddings": 32,
        },
        "optimizer": {"lr": 3e-3, "clip_norm": 0.1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def run(config: Path, out: Path, *overrides: str) -> int:
    """A run in this process: one rank."""
    return main(["--config", str(config), f"out={out}", *overrides])


def lines(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The step log of a rank, without what differs from run to run."""
    text = (out / f"steps-rank{rank}.jsonl").read_text().splitlines()
    timed = {"step_ms", "stall_ms", "checkpoint_ms", "time"}
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in text]


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    assert run(config, out) == 0
    return out


def test_a_run_leaves_what_it_promises(whole):
    steps = lines(whole)
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert all(line["clipped"] and line["grad_norm"] > 0.1 for line in steps)
    assert [len(line["lanes"]) for line in steps] == [2] * STEPS
    samples = [row for line in steps for lane in line["lanes"] for row in lane["samples"]]
    assert {row[1] for row in samples} == {"short", "long"}
    assert any(row[5] > 0 for row in samples)
    assert CheckpointManager(whole / "checkpoints").steps() == [2, 4, 6]
    final = json.loads((whole / "final_state.json").read_text())
    assert final["step"] == STEPS
    assert final["tensors"]["model.norm.weight"] == {
        "dtype": "float64",
        "shape": [16],
        "xxh3_128": final["tensors"]["model.norm.weight"]["xxh3_128"],
    }
    spans = [json.loads(line)["name"] for line in (whole / "spans-rank0.jsonl").read_text().splitlines()]
    assert any(name.startswith("checkpoint.") for name in spans)


@pytest.mark.parametrize(("source", "first"), [("checkpoints/step-00000002", 2), ("checkpoints", 6)])
def test_resuming_repeats_the_rest_bit_for_bit(config, whole, tmp_path, source, first):
    """On the same mesh, from one checkpoint or from the newest of a folder."""
    assert run(config, tmp_path, f"resume={whole / source}") == 0
    assert lines(tmp_path) == lines(whole)[first:]
    assert (tmp_path / "final_state.json").read_text() == (whole / "final_state.json").read_text()


@pytest.mark.parametrize("fault", ["drop_optimizer=true", "skip_lane=[4, 1]", "repeat_sample=4"])
def test_faults_show_in_the_log(config, whole, tmp_path, fault):
    """What a proof of continuation has to notice is there to be noticed."""
    source = whole / "checkpoints" / "step-00000002"
    assert run(config, tmp_path, f"resume={source}", f"faults.{fault}") == 0
    assert lines(tmp_path) != lines(whole)[2:]
    healthy, faulty = lines(whole)[-1], lines(tmp_path)[-1]
    assert healthy["loss"] != pytest.approx(faulty["loss"], rel=1e-9)


def test_killed_ranks_resume_on_another_mesh(config, whole, tmp_path):
    """Two ranks with tensor parallelism die by SIGKILL; one rank goes on in their folder, to the same end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = [f"out={tmp_path}", "parallel.tp=2", "faults.kill_after_step=4"]
    killed = subprocess.run(
        [*torchrun, "-m", "training", "--config", str(config), *settings],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr, killed.stderr
    assert [line["step"] for line in lines(tmp_path, rank=1)] == [0, 1, 2, 3, 4]
    resumed_at = CheckpointManager(tmp_path / "checkpoints").latest()
    assert resumed_at in (2, 4)

    assert run(config, tmp_path) == 0
    expected, found = lines(whole), lines(tmp_path)
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["step"] for line in lines(tmp_path, rank=1)] == list(range(resumed_at))
    for one, other in zip(expected, found, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert one["lanes"] == other["lanes"]


@pytest.mark.slow
def test_ranks_that_share_a_loader_train_on_what_one_rank_does(config, whole, tmp_path):
    """Two data-parallel ranks whose loader is in actors that they share."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = [f"out={tmp_path}", "execution=ray", "timeout_s=120"]
    ended = subprocess.run(
        [*torchrun, "-m", "training", "--config", str(config), *settings],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for one, other, last in zip(lines(whole), lines(tmp_path), lines(tmp_path, rank=1), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert one["lanes"] == [*other["lanes"], *last["lanes"]]


def test_sigterm_saves_and_stops_between_steps(config, tmp_path):
    """Exit code 0, a checkpoint at the step reached, and a resume from there to the end."""
    settings = [f"out={tmp_path}", "steps=100000", "checkpoint_every=100000", "log_every=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "training", "--config", str(config), *settings],
        stdout=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "steps-rank0.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, "no step within 60 s"
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps == list(range(len(steps)))
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [len(steps)]
    assert f"stopping after step {steps[-1]}, as asked by SIGTERM" in output


def test_own_checkpoints_are_never_met_again(config, whole, tmp_path, capsys):
    """A fresh start, or one from an earlier step, in a folder that is further already."""
    before = (whole / "steps-rank0.jsonl").read_text()
    for resume in ("none", str(whole / "checkpoints" / "step-00000002")):
        assert run(config, whole, f"resume={resume}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "holds step 6 already" in line
    assert (whole / "steps-rank0.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("resume=/nowhere", "error: resume: no complete checkpoint at /nowhere"),
        ("mixture=/nowhere.yaml", "/nowhere.yaml"),
        ("parallel.tp=2", "parallel.tp: 2 does not divide the 1 ranks"),
        ("model.max_position_embeddings=16", "seq_len: 32 exceeds model.max_position_embeddings: 16"),
        ("model.vocab_size=50", "is outside model.vocab_size: 50"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, capsys, override, expected):
    assert run(config, tmp_path / "out", override) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_another_model_than_the_saved_one_is_refused(config, whole, tmp_path, capsys):
    assert run(config, tmp_path / "out", f"resume={whole / 'checkpoints'}", "model.intermediate_size=24") == 2
    assert "mlp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
