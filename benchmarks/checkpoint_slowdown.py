"""What a save in the background costs a training that keeps every core busy, by who does the writing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpointing import workers
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.state import training_state
from benchmarks.checkpointing.workers import Process, Thread, Worker
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_NOTHING = "no save"
_THREAD = "thread"
_MEASURES = ("step time", "delay", "save speed")


class _Training:
    """Steps of a small model on all cores."""

    def __init__(self, width: int) -> None:
        self._model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._batch = torch.randn(256, width)

    def step(self) -> None:
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds_per_step(self, seconds: float) -> float:
        """Trains for about so long."""
        begin = now = time.perf_counter()
        steps = 0
        while now - begin < seconds:
            self.step()
            steps += 1
            now = time.perf_counter()
        return (now - begin) / steps


@dataclass(kw_only=True)
class _Run:
    """Trains while a worker saves; one run gives one value for each measure, in whatever order they are asked for."""

    training: _Training
    worker: Worker | None
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
        before = self.training.seconds_per_step(self.alone_s)
        done: Callable[[], bool]
        if self.worker is None:
            until = time.perf_counter() + self.alone_s
            done = lambda: time.perf_counter() > until  # noqa: E731
        else:
            done = self.worker.begin(self.path)
        begin = time.perf_counter()
        steps = 0
        while steps == 0 or not done():
            self.training.step()
            steps += 1
        took = time.perf_counter() - begin
        remove(self.path)
        alone = (before + self.training.seconds_per_step(self.alone_s)) / 2
        return {
            "step time": round(1e4 * took / steps / alone),
            "delay": round(1e6 * (took - steps * alone)),
            "save speed": round(self.num_bytes / took),
        }


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_slowdown-")
        )
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        state = training_state(settings.sized(2**28, 2**24))
        staged = torch.empty(state.num_bytes, dtype=torch.uint8)
        training = _Training(settings.sized(1024, 128))

        def ways() -> Iterator[tuple[str, Kind, Worker | None]]:
            yield _NOTHING, Kind.FLOOR, None
            yield f"{_NOTHING} (A/A)", Kind.CONTROL, None
            yield _THREAD, Kind.PEER, Thread(staged)
            yield "thread at work 10 % of the time", Kind.PEER, Thread(staged, duty=0.1)
            yield "thread at nice 19", Kind.PEER, Thread(staged, nice=19)
            yield "process at nice 19", Kind.PEER, stack.enter_context(Process(staged))
            yield "checkpoint.async_save", Kind.OURS, workers.Ours(state)
            yield "torch DCP async_save, kept memory", Kind.PEER, workers.Dcp(state)

        contenders = []
        for name_, kind, worker in ways():
            run = _Run(
                training=training,
                worker=worker,
                path=Path(name) / "save",
                num_bytes=state.num_bytes,
                alone_s=1.0 if not settings.quick else 0.1,
                values={},
            )
            contenders += [
                Contender(name=name_, measure=measure, kind=kind, run=partial(run.value, measure))
                for measure in _MEASURES
                if worker is not None or measure == "step time"
            ]
        yield contenders


BENCHMARK = Benchmark(
    name="checkpoint_slowdown",
    measures_what="Slow-down of a training on all cores while a save is written, by who writes it.",
    how_to_read=(
        "step time is of the steps that run while the save is written, delay what it adds to the training in all: a"
        " slow writer is felt less in each step, but for longer. Where training leaves cores idle, as it does when it"
        " waits for a GPU, every writer is faster and costs less. The time until an asynchronous save returns is not"
        " in here: see checkpoint_async."
    ),
    measures=(
        Measure(
            name="step time",
            unit="of a step alone",
            scale=1e4,
            higher_is_better=False,
            reference=_NOTHING,
            timed=False,
        ),
        Measure(name="delay", unit="ms", scale=1e3, higher_is_better=False, reference=_THREAD, timed=False),
        Measure(
            name="save speed",
            unit="MB/s",
            scale=1e6,
            higher_is_better=True,
            reference=_THREAD,
            timed=False,
        ),
    ),
    contenders=_contenders,
)
