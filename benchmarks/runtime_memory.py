"""Host memory of all processes that load for a job: torch's DataLoader in each rank, and roles that ranks share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading.corpus import write_tokens
from benchmarks.loading.pss import pss_bytes
from benchmarks.running.ranks import answer, ranks

_SEQ_LEN, _RANK_PACKS = 4096, 8
"""A rank takes 32,768 tokens a step, as a batch of torch's loader has."""
_MOST_SOURCES = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    sources: int
    ranks: int
    workers: int

    def __str__(self) -> str:
        return f"{self.sources} sources, {self.ranks} ranks, {self.workers} workers"


_FULL = tuple(
    _Shape(sources=sources, ranks=ranks, workers=workers)
    for sources in (1, 8, 32, 128, _MOST_SOURCES)
    for ranks in (1, 4, 8, 16)
    for workers in (1, 2)
)
_QUICK = (_Shape(sources=2, ranks=2, workers=1),)


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="runtime_memory-") as name:
        # The same bytes under many names: what is read is held by each source for itself.
        corpus = write_tokens(Path(name), settings.sized(4_800_000, 400_000))
        first = corpus.files[0]
        paths = [str(Path(name) / f"source-{i}.parquet") for i in range(_MOST_SOURCES)]
        for path in paths:
            Path(path).symlink_to(first)
        # What loads nothing depends on the ranks alone: measured once for all shapes of so many.
        bare = cache(lambda ranks: _measure("bare", _Shape(sources=0, ranks=ranks, workers=0), ()))
        found = []
        for shape in _FULL if not settings.quick else _QUICK:
            runs: dict[Kind, Callable[[], int]] = {Kind.FLOOR: partial(bare, shape.ranks)}
            if _torch_bytes(shape) < psutil.virtual_memory().total:
                runs[Kind.PEER] = partial(_measure, "torch", shape, paths)
            runs[Kind.OURS] = partial(_measure, "ray", shape, paths)
            found += [
                Contender(name=_NAMES[kind], measure=str(shape), kind=kind, run=run)
                for kind, run in runs.items()
            ]
        yield found


_NAMES = {
    Kind.FLOOR: "processes that import torch and ray",
    Kind.PEER: "torch DataLoader in each rank",
    Kind.OURS: "omniload.DataLoader on Ray",
}


def _torch_bytes(shape: _Shape) -> int:
    """About what torch's loaders take, by measurement of smaller shapes: more than a machine has is not tried."""
    return (170 + shape.workers * (28 + 6 * shape.sources)) * shape.ranks << 20


def _measure(kind: str, shape: _Shape, paths: Sequence[str]) -> int:
    """PSS in bytes of everything, once every rank has loaded a few steps."""
    name = f"memory-{time.time_ns():x}"
    jobs = [
        {
            "kind": kind,
            "name": name,
            "rank": rank,
            "ranks": shape.ranks,
            "workers": shape.workers,
            "paths": paths[: shape.sources],
            "mixture": {
                "seq_len": _SEQ_LEN,
                "packs": _RANK_PACKS * shape.ranks,
                "lanes": shape.ranks,
                "window_blocks": 1,
            },
        }
        for rank in range(shape.ranks)
    ]
    with ranks("benchmarks.loading.memory_rank", jobs) as processes:
        for process in processes:
            while answer(process) != "ready":
                pass  # what libraries say of themselves
        time.sleep(2.0)  # what is read ahead comes to rest
        return pss_bytes([process.pid for process in processes])


BENCHMARK = Benchmark(
    name="runtime_memory",
    measures_what="Memory (PSS) of all processes of a job on one machine, object store and services included.",
    how_to_read=(
        "The same Parquet row group (0.6 M tokens, which 1,000 documents of FineWeb come to) under as many names as"
        " there are sources. A rank takes 32,768 tokens at a time, of either loader; ours gives it targets, positions"
        " and segments besides. Torch's workers hold a decoded row group of each source; our actors, as many as a rank"
        " of torch's has workers, hold a window of one, its tokens in two bytes each. The floor is what ranks have that"
        " load nothing. The torch loader does no packing and no shuffling. With 1 source per rank sharing costs more"
        " than it saves: Ray's services and the actors. Torch's loaders are left out where the machine has too"
        " little memory for them (by 6 MiB per source and worker): 128 sources, 8 ranks, 2 workers take 14 GB. A shape"
        " alone: --only '128 sources, 8 ranks, 2 workers' --repeats 1; all forty take an hour and more."
    ),
    measures=tuple(
        Measure(
            name=str(shape),
            unit="MiB",
            scale=1 << 20,
            higher_is_better=False,
            reference=_NAMES[Kind.OURS],
            timed=False,
        )
        for shape in (*_FULL, *_QUICK)
    ),
    contenders=_contenders,
)
