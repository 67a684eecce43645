"""Runs contenders in turn and keeps every sample."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.definition import Contender


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed run."""

    work: int
    """What `Contender.run` returned."""
    seconds: float
    """Wall-clock time."""
    cpu_seconds: float
    """Processor time of all threads, and of the other processes the contender keeps busy."""


def interleave(
    contenders: Sequence[Contender],
    repeats: int,
    *,
    warm_up: bool = True,
    on_run: Callable[[Contender], None] | None = None,
) -> list[list[Sample]]:
    """Run every contender once to warm up, then all of them in ``repeats`` rounds.

    A round runs each contender once, so that a slow spell of the machine hits all alike and a ratio can be taken
    inside a round. Every second round goes backwards: what drifts, or a neighbour leaves behind, evens out.

    Args:
        contenders: in the order of the first round.
        repeats: number of rounds, at least 1.
        warm_up: False where nothing is timed, and a round before the first would only take time.
        on_run: told of every run that begins.

    Returns:
        For each contender, in the order given, its sample of every round.

    Raises:
        ValueError: ``repeats`` is below 1.
        RuntimeError: a contender failed; names it.
    """
    if repeats < 1:
        raise ValueError(f"repeats: {repeats} is below 1; one round is the least that can be measured")
    samples: list[list[Sample]] = [[] for _ in contenders]
    indices = range(len(contenders))
    for number in range(-1 if warm_up else 0, repeats):
        for index in reversed(indices) if number % 2 else indices:
            if on_run:
                on_run(contenders[index])
            sample = _run(contenders[index])
            if number >= 0:
                samples[index].append(sample)
    return samples


def _run(contender: Contender) -> Sample:
    try:
        contender.before()
        gc.collect()
        cpu, start = contender.cpu_seconds(), time.perf_counter()
        work = contender.run()
        seconds, busy = time.perf_counter() - start, contender.cpu_seconds() - cpu
        contender.after()
    except Exception as error:
        raise RuntimeError(f"{contender.measure}: contender '{contender.name}' failed: {error}") from error
    return Sample(work=work, seconds=seconds, cpu_seconds=busy)
