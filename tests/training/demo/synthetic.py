"""Logs as the trainer writes them, made up: a valid training under any layout, to be spoiled by each test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.demo.evidence import Evidence, Layout
from training.demo.logs import read_run

LANES = 4
PACK_TOKENS = 64
FILE = "data/code.parquet"


@dataclass
class SyntheticRun:
    """The rows of a run by rank; `evidence` writes and reads them back."""

    layout: Layout
    steps: range
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    spans: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def row(self, rank: int, step: int) -> dict[str, Any]:
        return next(row for row in self.rows[rank] if row["step"] == step)

    def rows_of(self, step: int) -> list[dict[str, Any]]:
        return [row for rows in self.rows.values() for row in rows if row["step"] == step]

    def evidence(self, directory: Path, name: str = "run") -> Evidence:
        directory.mkdir(parents=True)
        for rank, rows in self.rows.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (directory / f"steps-rank{rank}.jsonl").write_text(lines)
        for rank, spans in self.spans.items():
            lines = "".join(json.dumps(span) + "\n" for span in spans)
            (directory / f"spans-rank{rank}.jsonl").write_text(lines)
        return Evidence(name=name, layout=self.layout, steps=self.steps, log=read_run(directory))


def lane_row(step: int, lane: int) -> dict[str, Any]:
    """Lane 0 goes through one long document, a pack per step; the other lanes have two whole documents each."""
    if lane == 0:
        samples = [[0, "long", 0, "data/long.parquet", 7, step * PACK_TOKENS, (step + 1) * PACK_TOKENS]]
    else:
        row = 100 * step + 10 * lane
        samples = [[lane, "code", 0, FILE, row, 0, 24], [lane, "code", 0, FILE, row + 1, 0, 40]]
    cost = sum((end - start) ** 2 for *_, start, end in samples)
    return {"lane": lane, "cost": cost, "samples": samples}


def run(dp: int = 2, tp: int = 2, steps: range = range(8)) -> SyntheticRun:
    """A run without fault; its losses are the same under any layout."""
    synthetic = SyntheticRun(layout=Layout(dp=dp, tp=tp), steps=steps)
    for rank in range(dp * tp):
        dp_rank, tp_rank = divmod(rank, tp)
        own = range(dp_rank * LANES // dp, (dp_rank + 1) * LANES // dp)
        synthetic.rows[rank] = [
            {
                "step": step,
                "loss": 8.0 / (step + 1),
                "grad_norm": 2.0 / (step + 1),
                "clipped": step < 2,
                "lr": 1e-3,
                "tokens": LANES * PACK_TOKENS,
                "num_target_tokens": LANES * PACK_TOKENS - 7,
                "step_ms": 100.0,
                "stall_ms": 5.0,
                "checkpoint_ms": 1.0,
                "time": 1_700_000_000.0 + step,
                "dp_rank": dp_rank,
                "tp_rank": tp_rank,
                "lanes": [lane_row(step, lane) for lane in own],
            }
            for step in steps
        ]
    return synthetic
