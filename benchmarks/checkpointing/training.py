"""A training that keeps cores busy while a save is written: in this process on all cores, or in ranks on one each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.checkpointing import workers
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.checkpointing.state import training_state
from benchmarks.checkpointing.workers import Worker


class Training:
    """Steps of a small model, with torch's threads.

    Args:
        width: of its two matrices.
    """

    def __init__(self, width: int) -> None:
        self._model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._batch = torch.randn(256, width)

    def until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Train until something is done; the steps, one at least, and the seconds they took."""
        begin = time.perf_counter()
        steps = 0
        while steps == 0 or not done():
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            steps += 1
        return steps, time.perf_counter() - begin

    def during(self, seconds: float) -> tuple[int, float]:
        """Train for about so long."""
        end = time.perf_counter() + seconds
        return self.until(lambda: time.perf_counter() > end)


class OneProcess:
    """A training in this process.

    Args:
        training: the training.
        worker: what saves; None trains alone all the time.
    """

    def __init__(self, training: Training, worker: Worker | None) -> None:
        self._training = training
        self._worker = worker

    def alone(self, seconds: float) -> float:
        """Seconds for each step."""
        steps, took = self._training.during(seconds)
        return took / steps

    def beside(self, path: Path, seconds: float) -> tuple[float, float]:
        """Seconds for each step while a save is written, or beside nothing for ``seconds``; and those in all."""
        if self._worker is None:
            steps, took = self._training.during(seconds)
        else:
            steps, took = self._training.until(self._worker.begin(path))
        return took / steps, took


class Ranks:
    """A training in ranks, each with one thread.

    Args:
        pool: of `TrainingRank`.
        worker: what saves in each; None trains alone all the time.
    """

    def __init__(self, pool: RankPool, worker: str | None) -> None:
        self._pool = pool
        self._worker = worker

    def alone(self, seconds: float) -> float:
        """See `OneProcess`; the mean of the ranks."""
        steps: list[float] = [took / count for count, took in self._pool.call(_alone, seconds)]
        return sum(steps) / len(steps)

    def beside(self, path: Path, seconds: float) -> tuple[float, float]:
        """See `OneProcess`; steps are the mean of the ranks, seconds those of the slowest."""
        if self._worker is None:
            runs = self._pool.call(_alone, seconds)
        else:
            runs = self._pool.call(_beside, self._worker, path)
        return sum(took / steps for steps, took in runs) / len(runs), max(took for _, took in runs)


class TrainingRank:
    """What a rank holds between calls.

    Args:
        num_bytes: of the state over all ranks.
        width: as of `Training`.
    """

    def __init__(self, num_bytes: int, width: int) -> None:
        state = training_state(num_bytes, shard=True)
        self.training = Training(width)
        self.workers: dict[str, Worker] = {"checkpoint": workers.Ours(state), "torch DCP": workers.Dcp(state)}


def _alone(rank: TrainingRank, seconds: float) -> tuple[int, float]:
    return rank.training.during(seconds)


def _beside(rank: TrainingRank, worker: str, path: Path) -> tuple[int, float]:
    return rank.training.until(rank.workers[worker].begin(path))
