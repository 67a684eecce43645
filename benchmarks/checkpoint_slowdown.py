"""What a save in the background costs a training that keeps every core busy, by who does the writing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpointing import workers
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.checkpointing.state import training_state
from benchmarks.checkpointing.training import OneProcess, Ranks, Training, TrainingRank
from benchmarks.checkpointing.workers import Priority, Process, Thread, Worker
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_NOTHING, _THREAD, _OURS, _DCP = (
    "no save",
    "thread",
    "checkpoint.async_save",
    "torch DCP async_save, kept memory",
)
_STEP, _DELAY, _SPEED = "step time", "delay", "save speed"
_IN_RANKS = ", 2 ranks"


@dataclass(kw_only=True)
class _Run:
    """Trains while a save is written; one run gives a value for each measure, in whatever order they are asked for."""

    training: OneProcess | Ranks
    path: Path
    num_bytes: int
    alone_s: float
    values: dict[str, int]

    def value(self, measure: str) -> int:
        if measure not in self.values:
            self.values = self._values()
        return self.values.pop(measure)

    def _values(self) -> dict[str, int]:
        # Before and after, so that what drifts evens out.
        before = self.training.alone(self.alone_s)
        step, took = self.training.beside(self.path, self.alone_s)
        remove(self.path)
        alone = (before + self.training.alone(self.alone_s)) / 2
        return {
            _STEP: round(1e4 * step / alone),
            _DELAY: round(1e6 * took * (1 - alone / step)),
            _SPEED: round(self.num_bytes / took),
        }


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_slowdown-")
        )
        num_bytes, width = settings.sized(2**27, 2**24), settings.sized(1024, 128)
        pool = stack.enter_context(RankPool(2, TrainingRank, num_bytes, width))
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        state = training_state(num_bytes)
        staged = torch.empty(state.num_bytes, dtype=torch.uint8)
        training = Training(width)
        ways: list[tuple[str, Kind, Worker | None]] = [
            (_NOTHING, Kind.FLOOR, None),
            (f"{_NOTHING} (A/A)", Kind.CONTROL, None),
            (_THREAD, Kind.PEER, Thread(staged)),
            ("thread at nice 19", Kind.PEER, Thread(staged, priority=Priority.NICE)),
            ("process at nice 19", Kind.PEER, stack.enter_context(Process(staged, Priority.NICE))),
            ("process at SCHED_IDLE", Kind.PEER, stack.enter_context(Process(staged, Priority.IDLE))),
            (_OURS, Kind.OURS, workers.Ours(state)),
            (_DCP, Kind.PEER, workers.Dcp(state)),
        ]
        in_ranks: list[tuple[str, Kind, str | None]] = [
            (_NOTHING, Kind.FLOOR, None),
            (f"{_NOTHING} (A/A)", Kind.CONTROL, None),
            (_OURS, Kind.OURS, "checkpoint"),
            (_DCP, Kind.PEER, "torch DCP"),
        ]

        def contenders(name_: str, kind: Kind, one: OneProcess | Ranks, *, saves: bool) -> list[Contender]:
            run = _Run(
                training=one,
                path=Path(name) / "save",
                num_bytes=state.num_bytes,
                alone_s=settings.sized(500, 100) / 1000,
                values={},
            )
            where = _IN_RANKS if isinstance(one, Ranks) else ""
            return [
                Contender(name=name_, measure=measure + where, kind=kind, run=partial(run.value, measure))
                for measure in (_STEP, _DELAY, _SPEED)
                if saves or measure == _STEP
            ]

        found = []
        for label, kind, worker in ways:
            found += contenders(label, kind, OneProcess(training, worker), saves=worker is not None)
        for label, kind, form in in_ranks:
            found += contenders(label, kind, Ranks(pool, form), saves=form is not None)
        yield found


def _measures(where: str, slowest: str) -> tuple[Measure, ...]:
    def computed(
        name: str, unit: str, scale: float, reference: str, *, higher_is_better: bool = False
    ) -> Measure:
        return Measure(
            name=name + where,
            unit=unit,
            scale=scale,
            higher_is_better=higher_is_better,
            reference=reference,
            timed=False,
        )

    return (
        computed(_STEP, "of a step alone", 1e4, _NOTHING),
        computed(_DELAY, "ms", 1e3, slowest),
        computed(_SPEED, "MB/s", 1e6, slowest, higher_is_better=True),
    )


BENCHMARK = Benchmark(
    name="checkpoint_slowdown",
    measures_what="Slow-down of a training on all cores while a save is written, by who writes it.",
    how_to_read=(
        "step time is of the steps that run while the save is written, delay what it adds to the training in all: a"
        " slow writer is felt less in each step, but for longer. One process trains with a thread on each core, which"
        " wait for each other all the time; two ranks train with one thread each. Where training leaves cores idle, as"
        " it does when it waits for a GPU, every writer is faster and costs less. The time until an asynchronous save"
        " returns is not in here: see checkpoint_async_fsdp."
    ),
    measures=(*_measures("", _THREAD), *_measures(_IN_RANKS, _DCP)),
    contenders=_contenders,
)
