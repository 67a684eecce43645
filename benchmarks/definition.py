"""What a benchmark is: frozen descriptions, apart from the harness that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from benchmarks.machine import memory_filesystem


class Kind(StrEnum):
    """Why a contender is there."""

    FLOOR = "floor"
    """The least that physics asks for: the same bytes moved without the features."""
    OURS = "ours"
    """What this project ships."""
    PEER = "peer"
    """What people use today."""
    CONTROL = "control"
    """The reference a second time: how far its ratio is from 1 is the noise of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One quantity that contenders are compared in."""

    name: str
    """Short, unique in its benchmark."""
    unit: str
    """Unit of the displayed value."""
    scale: float
    """What one displayed unit is: of work per second (1e9 for GB/s of work in bytes), of seconds (1e-3 for ms), or of
    work if it is not ``timed``."""
    higher_is_better: bool
    """True for a rate, work / seconds; False for a duration, seconds."""
    reference: str
    """The contender that the ratios refer to."""
    timed: bool = True
    """False for a quantity that a run computes and returns as its work, however long that takes."""

    def value(self, work: int, seconds: float) -> float:
        """The displayed value of a run that did ``work`` in ``seconds``."""
        if not self.timed:
            return work / self.scale
        return (work / seconds if self.higher_is_better else seconds) / self.scale


def _nothing() -> None:
    """The default of the hooks of a contender."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to do the work of a measure."""

    name: str
    """Unique in its measure."""
    measure: str
    """Name of the measure."""
    kind: Kind
    """Why it is there."""
    run: Callable[[], int]
    """Does the work once and returns how much it was; this call is timed."""
    before: Callable[[], None] = field(default=_nothing)
    """Called before every run; not timed."""
    after: Callable[[], None] = field(default=_nothing)
    """Called after every run; not timed."""
    cpu_seconds: Callable[[], float] = field(default=time.process_time)
    """Clock of the processor time of the processes that ``run`` keeps busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the command line decides for every benchmark."""

    quick: bool = False
    """Small sizes, for a look and for tests of the benchmark itself: the values mean little."""
    directory: Path = field(default_factory=memory_filesystem)
    """Where benchmarks put their files."""

    def sized(self, full: int, quick: int) -> int:
        """The size that applies."""
        return quick if self.quick else full


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A comparison. Lives in a module of its name, as the constant ``BENCHMARK``."""

    name: str
    """Name on the command line."""
    measures_what: str
    """One sentence."""
    how_to_read: str
    """What the values say and what they do not."""
    measures: tuple[Measure, ...]
    """What is compared."""
    contenders: Callable[[Settings], AbstractContextManager[Sequence[Contender]]]
    """Sets up, gives the contenders in the order they run, and cleans up at the end."""

    def measure(self, name: str) -> Measure:
        """The measure of that name."""
        return next(measure for measure in self.measures if measure.name == name)
