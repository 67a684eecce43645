"""What the demo runs: the size of its data and its training runs, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.demo.data import MixtureSize
from training.demo.evidence import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """One launch of the trainer."""

    name: str
    """Name of the run and of its directory."""
    layout: Layout
    """The ranks it runs on."""
    kill_after: int | None = None
    """Number of steps after which every rank is killed with SIGKILL; None to let it end."""
    resume_from: str | None = None
    """Name of the run whose checkpoint it starts from; None to start afresh."""
    resume_step: int | None = None
    """Which checkpoint; None for the newest complete one."""
    overrides: tuple[str, ...] = ()
    """Further `key=value` settings of the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Runs that are one and the same training."""

    dtype: Literal["float32", "float64"]
    """Type of weights, activations and optimizer state."""
    steps: int
    """Steps of the training."""
    checkpoint_every: int
    """Steps between checkpoints."""
    rtol: float
    """Largest relative difference in loss and gradient norm between any run and the reference."""
    reference: RunPlan
    """The uninterrupted run."""
    others: tuple[RunPlan, ...]
    """The runs to compare with it, in the order to run them."""

    @property
    def runs(self) -> tuple[RunPlan, ...]:
        """All runs, in the order to run them."""
        return (self.reference, *self.others)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """The whole demo."""

    size: MixtureSize
    """What a step takes."""
    families: tuple[Family, ...]
    """The trainings, in the order to run them."""
    exported: str
    """Name of the run whose last checkpoint is exported; it must run to the end."""
    timeout_s: float
    """Longest time that one run may take, in seconds."""


def default_plan() -> DemoPlan:
    """The demo as `omniload demo` runs it: 40 steps in float32, 6 in float64, on at most four ranks."""
    square = Layout(dp=2, tp=2)
    wide = Layout(dp=4, tp=1)
    narrow = Layout(dp=1, tp=2)
    single = Family(
        dtype="float32",
        steps=40,
        checkpoint_every=10,
        rtol=1e-5,
        reference=RunPlan(name="uninterrupted", layout=square),
        others=(
            RunPlan(name="killed", layout=square, kill_after=25),
            RunPlan(name="resumed-dp4", layout=wide, resume_from="killed"),
            RunPlan(name="resumed-dp1-tp2", layout=narrow, resume_from="killed"),
        ),
    )
    double = Family(
        dtype="float64",
        steps=6,
        checkpoint_every=3,
        rtol=1e-12,
        reference=RunPlan(name="float64", layout=square),
        others=(
            RunPlan(name="float64-dp4", layout=wide, resume_from="float64", resume_step=3),
            RunPlan(name="float64-dp1-tp2", layout=narrow, resume_from="float64", resume_step=3),
        ),
    )
    return DemoPlan(
        size=MixtureSize(steps=40, seq_len=512, packs=8, lanes=4, switch_step=20),
        families=(single, double),
        exported="resumed-dp4",
        timeout_s=300.0,
    )
