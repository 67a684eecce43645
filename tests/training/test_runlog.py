"""Log files: what they say, and how they survive kills and resumes."""

from __future__ import annotations

import json

import pyarrow as pa

from storage.spans import span, start_recording, stop_recording
from tests.training.fake_lanes import fake_step
from training.runlog import LaneRecord, RunLog, rewind


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cost_counts_documents_and_not_padding():
    lane = next(lane for lane in fake_step(0) if (lane["segment_ids"] == 0).any())
    samples = pa.table(
        {
            "pack": [0, 1],
            "source": ["code", "chat"],
            "epoch": [0, 0],
            "file": ["a", "b"],
            "row": [7, 8],
            "start": [0, 64],
            "end": [9, 70],
        }
    )
    record = LaneRecord.of(lane, samples)
    expected = sum(
        int((lane["segment_ids"][pack] == segment).sum()) ** 2
        for pack in range(2)
        for segment in range(1, int(lane["segment_ids"].max()) + 1)
    )
    assert record.cost == expected
    assert record.samples == [[0, "code", 0, "a", 7, 0, 9], [1, "chat", 0, "b", 8, 64, 70]]


def test_a_line_is_on_disk_when_step_returns(tmp_path):
    start_recording()
    try:
        with RunLog(tmp_path, 3) as log:
            with span("checkpoint.write", num_bytes=5):
                pass
            log.step({"step": 0, "loss": 1.5})
            assert _lines(tmp_path / "steps-rank3.jsonl") == [{"step": 0, "loss": 1.5}]
            (written,) = _lines(tmp_path / "spans-rank3.jsonl")
            assert (written["name"], written["attributes"]) == ("checkpoint.write", {"num_bytes": 5})
            with span("checkpoint.commit"):
                pass
    finally:
        stop_recording()
    assert [line["name"] for line in _lines(tmp_path / "spans-rank3.jsonl")] == [
        "checkpoint.write",
        "checkpoint.commit",
    ]


def test_rewind_drops_steps_to_be_done_again_and_torn_lines(tmp_path):
    """On every rank's file, also those of ranks that the resumed run no longer has."""
    for rank in range(2):
        text = "".join(json.dumps({"step": step}) + "\n" for step in range(5)) + '{"step": 5, "lo'
        (tmp_path / f"steps-rank{rank}.jsonl").write_text(text)
        (tmp_path / f"spans-rank{rank}.jsonl").write_text('{"name": "a"}\n{"na')
    rewind(tmp_path, 3)
    for rank in range(2):
        assert [line["step"] for line in _lines(tmp_path / f"steps-rank{rank}.jsonl")] == [0, 1, 2]
        assert _lines(tmp_path / f"spans-rank{rank}.jsonl") == [{"name": "a"}]
    rewind(tmp_path, 0)
    assert all(path.read_text() == "" for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4
