"""How long ranks stall when a process of their loader is killed, by what it was, with hot standbys and without."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.running.chaos_run import ROLES, Outcome, Plan, run, table

_WITH, _WITHOUT = "with shadows", "without"
_FULL: Mapping[str, tuple[int, ...]] = {_WITH: (40, 15, 20, 15, 14, 6), _WITHOUT: (20, 0, 8, 8, 8, 4)}
_QUICK: Mapping[str, tuple[int, ...]] = {_WITH: (2, 2, 2, 2, 2, 2), _WITHOUT: (2, 0, 2, 2, 2, 2)}
_MS = 1000


def _plan(way: str, settings: Settings) -> Plan:
    kills = (_QUICK if settings.quick else _FULL)[way]
    return Plan(
        kills={role: count for role, count in zip(ROLES, kills, strict=True) if count},
        steps=settings.sized(300 if way == _WITH else 150, 60),
        shadows=int(way == _WITH),
        settle_steps=1,
        step_s=0.25,
        seed=8,
    )


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    folder = settings.directory / "chaos"
    outcomes: dict[str, Outcome] = {}

    def outcome(way: str) -> Outcome:
        """Of the one run that all measures are taken from."""
        if way not in outcomes:
            outcomes[way] = _checked(way, run(_plan(way, settings), _made(folder / way.split()[0])))
            typer.echo(table(outcomes))
        return outcomes[way]

    def contender(way: str, role: str) -> Contender:
        return Contender(
            name=way, measure=role, kind=Kind.OURS, run=_one_after_the_other(lambda: outcome(way), role)
        )

    try:
        yield [
            contender(way, role)
            for role in ROLES
            for way in (_WITHOUT, _WITH)
            if role in _plan(way, settings).kills
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _checked(way: str, outcome: Outcome) -> Outcome:
    if outcome.lost or outcome.duplicated or outcome.hangs:
        raise RuntimeError(table({way: outcome}))
    return outcome


def _one_after_the_other(outcome: Callable[[], Outcome], role: str) -> Callable[[], int]:
    """Each call gives the stall of another kill, in milliseconds."""
    numbers = itertools.count()

    def stall() -> int:
        stalls = outcome().stalls()[role]
        return round(_MS * stalls[next(numbers) % len(stalls)])

    return stall


BENCHMARK = Benchmark(
    name="runtime_chaos",
    measures_what="Seconds that the rank hit hardest waits longer than usual after a process of its loader is killed.",
    how_to_read=(
        "One run of 300 steps, 12 sources and 4 ranks on a simulated cluster of three nodes, in which 110 processes are"
        " killed at random, and a shorter one without shadows; each repetition is one kill. Every lane that every rank"
        " got is compared with those of a run undisturbed: the benchmark fails if one is lost, given twice or other"
        " than it should be, or if a rank hangs."
        "\nAll nodes are on this machine and share its cores with the processes that are started again, which is most"
        " of what there is to see: an actor takes as long as Python and its imports, a rank as long as those of torch."
        " A node is missed after five seconds without an answer. A kill that nobody waits for, as what it did was ready"
        " or done by another meanwhile, counts as 0."
    ),
    measures=tuple(
        Measure(
            name=role,
            unit="s",
            scale=_MS,
            higher_is_better=False,
            reference=_WITH if role == "shadow" else _WITHOUT,
            timed=False,
        )
        for role in ROLES
    ),
    contenders=_contenders,
)
