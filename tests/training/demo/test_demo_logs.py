"""Logs are read exactly, or refused naming file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.demo.synthetic import run
from training.demo.errors import LogError
from training.demo.logs import num_steps_logged, read_run


def test_lines_come_back_by_rank(tmp_path: Path) -> None:
    log = run(dp=2, tp=2, steps=range(3)).evidence(tmp_path / "run").log
    assert list(log.steps) == [0, 1, 2, 3]
    assert [record.step for record in log.steps[3]] == [0, 1, 2]
    assert [lane.lane for lane in log.steps[3][0].lanes] == [2, 3]
    sample = log.steps[0][2].lanes[0].samples[0]
    assert (sample.source, sample.start, sample.end) == ("long", 128, 192)


def test_spans_are_in_seconds_and_sorted(tmp_path: Path) -> None:
    synthetic = run(dp=1, tp=1, steps=range(1))
    for start in (3_000_000_000, 1_000_000_000):
        span = {"name": "checkpoint.write", "start_ns": start, "duration_ns": 500_000_000, "attributes": {}}
        synthetic.spans.setdefault(0, []).append(span)
    spans = synthetic.evidence(tmp_path / "run").log.spans
    assert [(span.rank, span.start_s, span.duration_s) for span in spans] == [(0, 1.0, 0.5), (0, 3.0, 0.5)]


def test_a_last_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run(dp=1, tp=1, steps=range(3)).evidence(tmp_path / "run")
    path = tmp_path / "run" / "steps-rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.step for record in read_run(tmp_path / "run").steps[0]] == [0, 1]
    assert num_steps_logged(tmp_path / "run") == 2


def test_a_line_torn_in_the_middle_is_refused(tmp_path: Path) -> None:
    run(dp=1, tp=1, steps=range(3)).evidence(tmp_path / "run")
    path = tmp_path / "run" / "steps-rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:40] + "\n" + lines[2])
    with pytest.raises(LogError, match=r"steps-rank0\.jsonl:2"):
        read_run(tmp_path / "run")


def test_a_line_without_a_key_is_refused(tmp_path: Path) -> None:
    synthetic = run(dp=1, tp=1, steps=range(3))
    del synthetic.rows[0][1]["grad_norm"]
    with pytest.raises(LogError, match=r"steps-rank0\.jsonl:2.*grad_norm"):
        synthetic.evidence(tmp_path / "run")


def test_a_directory_without_logs_is_refused(tmp_path: Path) -> None:
    assert num_steps_logged(tmp_path) == 0
    with pytest.raises(LogError, match="no steps-rank"):
        read_run(tmp_path)
