"""How long ranks wait for their steps while they train."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.running.ranks import answer, ranks
from training.demo.data import MixtureSize, build

_STEP_S = 0.1
_SOURCES = ("chat", "code", "long", "prose")
"""Of the demo; they are soon read to their end."""
_MEDIAN, _WORST = "median", "99th percentile"
_RAY, _INLINE = "roles in actors that all ranks share", "everything in each rank"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    num_ranks, steps = settings.sized(8, 2), settings.sized(100, 10)
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="runtime_stall-") as name:
        size = MixtureSize(steps=10**6, seq_len=1024, packs=16, lanes=8, switch_step=10**5)
        mixture = str(build(Path(name), size).mixture)

        @functools.lru_cache(maxsize=1)
        def waited(execution: str, run: int) -> Any:
            return _waited(mixture, execution, num_ranks, steps)

        calls = dict.fromkeys(("ray", "inline"), 0)

        def share(execution: str, quantile: float) -> int:
            of_run = waited(execution, calls[execution] // 2)  # one run for both measures
            calls[execution] += 1
            return round(float(np.quantile(of_run, quantile)) / _STEP_S * 10_000)

        yield [
            Contender(
                name=label,
                measure=measure,
                kind=Kind.OURS,
                run=functools.partial(share, execution, quantile),
            )
            for execution, label in (("ray", _RAY), ("inline", _INLINE))
            for measure, quantile in ((_MEDIAN, 0.5), (_WORST, 0.99))
        ]


def _waited(mixture: str, execution: str, num_ranks: int, steps: int) -> np.ndarray:
    """``float64[ranks * steps]``: seconds that ranks waited for their steps."""
    name = f"stall-{time.time_ns():x}"
    jobs = [
        {
            "mixture": {
                "include": mixture,
                "sources": {source: {"on_exhausted": "repeat"} for source in _SOURCES},
                "ray": {"job": name, "loaders": 1, "object_store_bytes": 256 << 20},
            },
            "execution": execution,
            "rank": rank,
            "ranks": num_ranks,
            "steps": steps,
            "step_s": _STEP_S,
        }
        for rank in range(num_ranks)
    ]
    with ranks("benchmarks.running.rank", jobs) as processes:
        return np.concatenate([json.loads(answer(process)) for process in processes])


BENCHMARK = Benchmark(
    name="runtime_stall",
    measures_what="How long ranks that train for 100 ms a step wait for the next one, in parts of a step.",
    how_to_read=(
        "The demo's mixture of raw text, steps of 16 packs of 1,024 tokens, eight ranks that sleep in place of"
        " training, on the processors of this machine. A step's value is the time from asking for it to having it."
    ),
    measures=tuple(
        Measure(name=name, unit="% of a step", scale=100, higher_is_better=False, reference=_RAY, timed=False)
        for name in (_MEDIAN, _WORST)
    ),
    contenders=_contenders,
)
