"""What the proof works on: a run's log with what it must hold, and the global batches that the logs add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.demo.logs import RunLog, SampleRange, StepRecord

GlobalBatch = Mapping[int, tuple[SampleRange, ...]]
"""The samples of every lane of one step, over all data-parallel ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a run was cut into ranks."""

    dp: int
    """Data-parallel size."""
    tp: int
    """Tensor-parallel size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp} × tp{self.tp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A run's log and what it must hold."""

    name: str
    """Name of the run."""
    layout: Layout
    """The ranks it ran on."""
    steps: range
    """The steps it must have logged, each once on every rank."""
    log: RunLog
    """What it did log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the proof."""

    run: str
    """Name of the run."""
    layout: str
    """The ranks it ran on."""
    steps: range
    """The steps that the claim is about."""
    claim: str
    """What should hold."""
    passed: bool
    """Whether it does."""
    detail: str
    """The measured value if it does; what is wrong first if not."""

    @property
    def steps_text(self) -> str:
        """First and last step, for display."""
        first, last = self.steps.start, self.steps.stop - 1
        return f"{first}–{last}" if last > first else str(first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far a number that a run logged is from the reference's at one step."""

    step: int
    """Index of the step."""
    relative: float
    """|value - reference| / |reference|, the largest over ranks; NaN if either is not finite."""


def global_batches(log: RunLog) -> dict[int, GlobalBatch]:
    """The union over ranks of the lanes of each step, by step and lane.

    Where several ranks ran one lane, as on the tensor-parallel axis, the lowest rank's record counts; that
    they agree is the business of `check_complete`.
    """
    batches: dict[int, dict[int, tuple[SampleRange, ...]]] = {}
    for step, records in by_step(log).items():
        batch = batches[step] = {}
        for record in records:
            for lane in record.lanes:
                batch.setdefault(lane.lane, lane.samples)
    return dict(batches)


def by_step(log: RunLog) -> dict[int, Sequence[StepRecord]]:
    """Step lines of all ranks by step, in order of steps, then ranks."""
    grouped: dict[int, list[StepRecord]] = defaultdict(list)
    for records in log.steps.values():
        for record in records:
            grouped[record.step].append(record)
    return dict(sorted(grouped.items()))
