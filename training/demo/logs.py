"""Reads what a training run leaves behind: step lines, spans and the digests of its final state.

A run that was killed may have torn the last line of a file; that line is left out. Anything else that is not
what the trainer writes is an error that names file and line: a proof over misread logs proves nothing.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from training.demo.errors import LogError

_T = TypeVar("_T")
_STEPS_FILE = re.compile(r"steps-rank(\d+)\.jsonl")
_SPANS_FILE = re.compile(r"spans-rank(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SampleRange:
    """The tokens of one sample that lie in one pack."""

    pack: int
    """Index of the pack within the step."""
    source: str
    """Name of the source."""
    epoch: int
    """Pass over the source, from 0."""
    file: str
    """File the row was read from."""
    row: int
    """Row within the file."""
    start: int
    """First token of the sample in this pack."""
    end: int
    """One past the last token of the sample in this pack."""

    @property
    def document(self) -> tuple[str, int, str, int]:
        """What the sample is a part of: source, epoch, file, row."""
        return self.source, self.epoch, self.file, self.row


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneRecord:
    """One lane as one rank ran it."""

    lane: int
    """Index of the lane within the step."""
    cost: int
    """Sum over segments of the squared length, in tokens squared."""
    samples: tuple[SampleRange, ...]
    """In the order of the lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of a rank's step log."""

    rank: int
    """Global rank."""
    dp_rank: int
    """Index on the data-parallel axis."""
    tp_rank: int
    """Index on the tensor-parallel axis."""
    step: int
    """Index of the plan, from 0."""
    loss: float
    """Mean cross entropy per target token of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clipped: bool
    """Whether the gradient was scaled down."""
    tokens: int
    """Tokens of the global batch, padding left out."""
    step_ms: float
    """Duration of the step, in milliseconds."""
    stall_ms: float
    """Part of it spent waiting for the loader."""
    checkpoint_ms: float
    """Part of it in which a checkpoint held up training."""
    time: float
    """Unix time at the end of the step, in seconds."""
    lanes: tuple[LaneRecord, ...]
    """The lanes that this rank ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """One timed phase on one rank."""

    rank: int
    """Global rank."""
    name: str
    """Dotted name, for example `checkpoint.write`."""
    start_s: float
    """Unix time, in seconds."""
    duration_s: float
    """In seconds."""
    attributes: Mapping[str, Any]
    """What the phase was about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """Everything a run logged, by rank."""

    directory: Path
    """The run's output directory."""
    steps: Mapping[int, tuple[StepRecord, ...]]
    """Step lines by rank, in the order written."""
    spans: tuple[SpanRecord, ...]
    """Spans of all ranks, by rank and start."""


def read_run(directory: Path) -> RunLog:
    """Reads the step lines and spans of every rank.

    Raises:
        LogError: There is no step log, or a line is not what the trainer writes.
    """
    steps: dict[int, tuple[StepRecord, ...]] = {}
    spans: list[SpanRecord] = []
    for path in sorted(directory.glob("*.jsonl")):
        if match := _STEPS_FILE.fullmatch(path.name):
            rank = int(match[1])
            steps[rank] = tuple(_parsed(path, functools.partial(_step, rank)))
        elif match := _SPANS_FILE.fullmatch(path.name):
            rank = int(match[1])
            spans.extend(_parsed(path, functools.partial(_span, rank)))
    if not steps:
        raise LogError(f"{directory}: no steps-rank*.jsonl; the run did not start training")
    spans.sort(key=lambda span: (span.rank, span.start_s))
    return RunLog(directory=directory, steps=dict(sorted(steps.items())), spans=tuple(spans))


def num_steps_logged(directory: Path) -> int:
    """Complete lines in rank 0's step log: cheap enough to poll while the run goes on."""
    try:
        return (directory / "steps-rank0.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _parsed(path: Path, parse: Callable[[dict[str, Any]], _T]) -> Iterator[_T]:
    """Parses each complete line of a file; a last one without newline was torn by a kill and is left out."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            yield parse(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise LogError(f"{path}:{number}: not a line of the trainer's log ({error!r})") from error


def _step(rank: int, row: dict[str, Any]) -> StepRecord:
    return StepRecord(
        rank=rank,
        dp_rank=int(row["dp_rank"]),
        tp_rank=int(row["tp_rank"]),
        step=int(row["step"]),
        loss=float(row["loss"]),
        grad_norm=float(row["grad_norm"]),
        clipped=bool(row["clipped"]),
        tokens=int(row["tokens"]),
        step_ms=float(row["step_ms"]),
        stall_ms=float(row["stall_ms"]),
        checkpoint_ms=float(row["checkpoint_ms"]),
        time=float(row["time"]),
        lanes=tuple(_lane(lane) for lane in row["lanes"]),
    )


def _lane(row: dict[str, Any]) -> LaneRecord:
    samples = []
    for pack, source, epoch, file, line, start, end in row["samples"]:
        samples.append(
            SampleRange(pack=pack, source=source, epoch=epoch, file=file, row=line, start=start, end=end)
        )
    return LaneRecord(lane=int(row["lane"]), cost=int(row["cost"]), samples=tuple(samples))


def _span(rank: int, row: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        rank=rank,
        name=str(row["name"]),
        start_s=row["start_ns"] / 1e9,
        duration_s=row["duration_ns"] / 1e9,
        attributes=dict(row["attributes"]),
    )
