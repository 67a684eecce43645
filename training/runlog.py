"""The files in which a run tells what it did: one JSON object per line, one file per rank and kind.

``steps-rank{r}.jsonl`` has a line per step, ``spans-rank{r}.jsonl`` one per timed piece of work of `storage`
and `checkpoint`. A run that resumes in its own folder first drops the lines of the steps it is about to do again,
so a rank's file names each step at most once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from storage.spans import drain, spans_to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneRecord:
    """What a step's log line says of one lane."""

    lane: int
    """Number of the lane in the step."""
    cost: int
    """Sum over the lane's documents of their length squared, in tokens squared: the work of attention."""
    samples: list[list[Any]]
    """``[pack, source, epoch, file, row, start, end]`` of every piece in the lane."""

    @classmethod
    def of(cls, lane: Mapping[str, Any], samples: pa.Table) -> LaneRecord:
        """Describe a lane.

        Args:
            lane: as the loader yields it.
            samples: its provenance, as ``loader.samples(lane)`` gives it.
        """
        starts = lane["cu_seqlens"]
        lengths = starts.diff().long()
        in_document = lane["segment_ids"].flatten()[starts[:-1].long()] > 0
        columns = [
            samples.column(name).to_pylist()
            for name in ("pack", "source", "epoch", "file", "row", "start", "end")
        ]
        return cls(
            lane=int(lane["lane"]),
            cost=int((lengths.square() * in_document).sum()),
            samples=[list(row) for row in zip(*columns, strict=True)],
        )

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in the file."""
        return {"lane": self.lane, "cost": self.cost, "samples": self.samples}


class RunLog:
    """Writes the log files of one rank; every line reaches the operating system before ``step`` returns.

    Args:
        out: folder of the run; must exist.
        rank: of this process.
    """

    def __init__(self, out: Path, rank: int) -> None:
        self._steps = (out / f"steps-rank{rank}.jsonl").open("a", encoding="utf-8")
        self._spans = (out / f"spans-rank{rank}.jsonl").open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spans()
        self._steps.close()
        self._spans.close()

    def step(self, line: Mapping[str, Any]) -> None:
        """Append the line of a step, and the spans recorded since the last one."""
        self._steps.write(json.dumps(line) + "\n")
        self._steps.flush()
        self.spans()

    def spans(self) -> None:
        """Append the spans recorded since the last call."""
        self._spans.writelines(json.dumps(span) + "\n" for span in spans_to_json(drain()))
        self._spans.flush()


def rewind(out: Path, step: int) -> None:
    """Take from the logs of all ranks what a run that goes on at ``step`` will do again; call it on one rank.

    Lines that a killed process left unfinished go too.
    """
    for path in sorted(out.glob("steps-rank*.jsonl")):
        _rewrite(path, (line for line in _whole_lines(path) if json.loads(line)["step"] < step))
    for path in sorted(out.glob("spans-rank*.jsonl")):
        _rewrite(path, _whole_lines(path) if step > 0 else ())


def _whole_lines(path: Path) -> list[str]:
    return [
        line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _rewrite(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(path)
