"""Runs the trainings of one family one after the other, and reads what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from checkpoint import CheckpointManager
from training.demo.errors import RunError
from training.demo.evidence import Check, Evidence
from training.demo.logs import read_run
from training.demo.plan import Family, RunPlan
from training.demo.prove import prove_family
from training.demo.runs import launch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run that ended as planned."""

    plan: RunPlan
    """What was launched."""
    directory: Path
    """Where it wrote."""
    evidence: Evidence
    """Its log, and what it must hold."""
    dtype: str
    """Type of its numbers."""
    seconds: float
    """Wall-clock time from launch to exit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyResult:
    """The runs of one training."""

    family: Family
    """What was planned."""
    runs: tuple[RunResult, ...]
    """In the order of the plan: the reference first."""

    @property
    def reference(self) -> RunResult:
        """The uninterrupted run."""
        return self.runs[0]

    @property
    def others(self) -> tuple[RunResult, ...]:
        """The runs to compare with it."""
        return self.runs[1:]

    def prove(self, *, lanes: int) -> list[Check]:
        """Checks that the runs are one and the same training of `lanes` lanes a step."""
        others = [run.evidence for run in self.others]
        return prove_family(self.reference.evidence, others, lanes=lanes, rtol=self.family.rtol)


class Watcher(Protocol):
    """Who shows that runs go on: the terminal in the demo, nobody in tests."""

    def watch(self, plan: RunPlan, steps: range) -> AbstractContextManager[Callable[[int], None]]:
        """Entered while a run goes on; gives what to tell the number of steps done so far."""

    def ended(self, result: RunResult) -> None:
        """Called when a run has ended as planned."""


def run_family(
    family: Family, *, directory: Path, mixture: Path, timeout_s: float, watcher: Watcher
) -> FamilyResult:
    """Runs every run of a family.

    Args:
        family: What to run.
        directory: Each run writes into a directory of its name below.
        mixture: The mixture file.
        timeout_s: Longest time that one run may take, in seconds.
        watcher: Told of every run.

    Raises:
        RunError: A run failed, or left no checkpoint to resume from.
        RunTimeoutError: A run did not end in time.
        LogError: A log is not what the trainer writes.
    """
    results: dict[str, RunResult] = {}
    for plan in family.runs:
        resume, first_step = None, 0
        if plan.resume_from is not None:
            resume, first_step = checkpoint_of(results[plan.resume_from].directory, plan.resume_step)
        steps = range(first_step, plan.kill_after or family.steps)
        with watcher.watch(plan, steps) as on_progress:
            seconds = launch(
                plan,
                family,
                directory=directory / plan.name,
                mixture=mixture,
                resume=resume,
                steps=steps,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )
        results[plan.name] = RunResult(
            plan=plan,
            directory=directory / plan.name,
            evidence=Evidence(
                name=plan.name, layout=plan.layout, steps=steps, log=read_run(directory / plan.name)
            ),
            dtype=family.dtype,
            seconds=seconds,
        )
        watcher.ended(results[plan.name])
    return FamilyResult(family=family, runs=tuple(results.values()))


def checkpoint_of(run: Path, step: int | None = None) -> tuple[Path, int]:
    """Finds a run's checkpoint and the number of steps in it.

    Args:
        run: The run's directory.
        step: Which checkpoint; None for the newest complete one.

    Raises:
        RunError: There is no complete checkpoint.
    """
    root = run / "checkpoints"
    if step is None:
        step = CheckpointManager(root).latest()
    if step is None:
        raise RunError(f"{root}: no complete checkpoint")
    return root / f"step-{step:08d}", step
