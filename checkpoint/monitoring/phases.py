"""How long each rank was in each phase, and which ranks the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage import Span

SAVE_PHASES: Final = ("plan", "stage", "write", "digest", "commit")
"""Phases of a save, in order; ``digest`` runs beside ``write``, ``commit`` on rank 0 only."""

LOAD_PHASES: Final = ("open", "match", "read", "exchange", "verify", "copy")
"""Phases of a load, in order; the last four overlap each other."""

_WORK: Final = frozenset({"stage", "write", "digest", "read", "verify", "copy"})
_STRAGGLER_RATIO: Final = 1.5
_STRAGGLER_S: Final = 0.01


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhaseTimes:
    """Time by phase and rank.

    Attributes:
        ranks: Ranks that recorded anything, ascending.
        phases: Phases that occurred, those of saves first.
        seconds: Time in each; of spans that overlap within a rank, the time that any of them covers; float64
            ``[num_phases, num_ranks]``.
        counts: Spans of each; int64 ``[num_phases, num_ranks]``.
        num_bytes: Bytes that the spans say they handled; int64 ``[num_phases, num_ranks]``.
    """

    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    seconds: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that takes much longer over a phase than most.

    Attributes:
        phase: Which.
        rank: Who.
        seconds: Its time.
        median_s: Median of all ranks.
    """

    phase: str
    rank: int
    seconds: float
    median_s: float


def rank_of(span: Span) -> int:
    """The rank that recorded a span; 0 if it does not say."""
    rank = span.attributes.get("rank")
    return rank if isinstance(rank, int) else 0


def phase_of(span: Span) -> str | None:
    """The phase that a span is of; None if of none."""
    phase = span.name.removeprefix("checkpoint.")
    return phase if phase in SAVE_PHASES or phase in LOAD_PHASES else None


def phase_times(spans: Sequence[Span]) -> PhaseTimes:
    """Add up the spans of any number of ranks."""
    found: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if (phase := phase_of(span)) is not None:
            found.setdefault((phase, rank_of(span)), []).append(span)
    ranks = sorted({rank for _, rank in found})
    phases = [one for one in (*SAVE_PHASES, *LOAD_PHASES) if any(phase == one for phase, _ in found)]
    shape = (len(phases), len(ranks))
    seconds, counts, num_bytes = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for (phase, rank), members in found.items():
        at = phases.index(phase), ranks.index(rank)
        seconds[at] = _covered_s(members)
        counts[at] = len(members)
        num_bytes[at] = sum(_bytes_of(one) for one in members)
    return PhaseTimes(
        ranks=tuple(ranks), phases=tuple(phases), seconds=seconds, counts=counts, num_bytes=num_bytes
    )


def stragglers(times: PhaseTimes) -> list[Straggler]:
    """Ranks that take 1.5 times the median of a phase of work, and 10 ms more, slowest excess first.

    In phases that are mostly waiting (``plan``, ``open``, ``match``) it is the rank that is *shortest* there that the
    others wait for, so none is named.
    """
    found = []
    for phase, row in zip(times.phases, times.seconds, strict=True):
        median = float(np.median(row))
        if phase not in _WORK or len(row) < 2:
            continue
        for rank, value in zip(times.ranks, row.tolist(), strict=True):
            if value > _STRAGGLER_RATIO * median and value > median + _STRAGGLER_S:
                found.append(Straggler(phase=phase, rank=rank, seconds=value, median_s=median))
    return sorted(found, key=lambda one: one.median_s - one.seconds)


def _covered_s(spans: Sequence[Span]) -> float:
    """Time that is covered by any of some spans, seconds."""
    total = end = 0
    for span in sorted(spans, key=lambda one: one.start_ns):
        stop = span.start_ns + span.duration_ns
        total += max(0, stop - max(end, span.start_ns))
        end = max(end, stop)
    return total / 1e9


def _bytes_of(span: Span) -> int:
    num_bytes = span.attributes.get("num_bytes")
    return num_bytes if isinstance(num_bytes, int) else 0
