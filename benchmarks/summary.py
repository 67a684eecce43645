"""From samples to medians, ranges and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.definition import Benchmark, Contender, Kind, Measure
from benchmarks.harness import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and range of some values."""

    median: float
    """The middle value."""
    low: float
    """The smallest."""
    high: float
    """The largest."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of one or more values."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How one contender did."""

    measure: Measure
    """What was compared."""
    name: str
    """The contender."""
    kind: Kind
    """Why it is there."""
    value: Spread
    """In the unit of the measure."""
    ratio: Spread | None
    """Value ÷ the reference's value of the same round: noise that both share cancels. Rounds in which that is 0 have
    none."""
    busy_cores: float
    """Median of processor time ÷ wall-clock time."""
    samples: tuple[Sample, ...]
    """Every timed run, in order."""


def summarise(
    benchmark: Benchmark, contenders: Sequence[Contender], samples: Sequence[Sequence[Sample]]
) -> list[Summary]:
    """Summaries by measure, contenders in the order given.

    Args:
        benchmark: whose measures the contenders name.
        contenders: who ran.
        samples: for each contender its samples, as `benchmarks.harness.interleave` returns them.

    Raises:
        ValueError: some ran for a measure, and its reference did not.
    """
    values = [
        [benchmark.measure(contender.measure).value(sample.work, sample.seconds) for sample in own]
        for contender, own in zip(contenders, samples, strict=True)
    ]
    summaries = []
    for measure in benchmark.measures:
        indices = [i for i, contender in enumerate(contenders) if contender.measure == measure.name]
        if not indices:
            continue  # not of this run: small sizes may have measures of their own
        reference = next((i for i in indices if contenders[i].name == measure.reference), None)
        if reference is None:
            raise ValueError(f"{benchmark.name}: no contender '{measure.reference}' for '{measure.name}'")
        for i in indices:
            ratios = [own / other for own, other in zip(values[i], values[reference], strict=True) if other]
            summaries.append(
                Summary(
                    measure=measure,
                    name=contenders[i].name,
                    kind=contenders[i].kind,
                    value=Spread.of(values[i]),
                    ratio=Spread.of(ratios) if ratios else None,
                    busy_cores=statistics.median(s.cpu_seconds / s.seconds for s in samples[i]),
                    samples=tuple(samples[i]),
                )
            )
    return summaries
