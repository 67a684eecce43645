"""Loading a training state into the layout that it was saved in, by two ranks and by four."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing import rank_state
from benchmarks.checkpointing.rank_state import RankState
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Contender, Kind, Measure, Settings

_REFERENCE = "pread"
_NUM_RANKS = (2, 4)
_FORMS = ("raw", "ours", "dcp")

MEASURES = tuple(
    Measure(name=f"{num_ranks} ranks", unit="GB/s", scale=1e9, higher_is_better=True, reference=_REFERENCE)
    for num_ranks in _NUM_RANKS
)


@contextmanager
def contenders(settings: Settings, *, shard: bool) -> Iterator[Sequence[Contender]]:
    """What loads, and the floors.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=settings.directory, prefix="same_layout-"))
        found = []
        for num_ranks in _NUM_RANKS:
            pool = stack.enter_context(RankPool(num_ranks, RankState, settings.sized(2**30, 2**26), shard))
            found += _of_ranks(pool, Path(name) / str(num_ranks), f"{num_ranks} ranks")
        yield found


def _of_ranks(pool: RankPool, directory: Path, measure: str) -> list[Contender]:
    num_bytes = int(sum(pool.call(rank_state.num_bytes)))
    directory.mkdir()
    for form in _FORMS:
        pool.call(rank_state.save, form, directory / form)

    def load(name: str, kind: Kind, form: str, saved: str) -> Contender:
        def run() -> int:
            pool.call(rank_state.load, form, directory / saved)
            return num_bytes

        return Contender(
            name=name,
            measure=measure,
            kind=kind,
            run=run,
            before=lambda: _forget(directory),
            cpu_seconds=pool.cpu_seconds,
        )

    return [
        load(_REFERENCE, Kind.FLOOR, "raw", "raw"),
        load(f"{_REFERENCE} (A/A)", Kind.CONTROL, "raw", "raw"),
        load(f"{_REFERENCE} + xxh3", Kind.FLOOR, "raw + xxh3", "raw"),
        load("checkpoint.load", Kind.OURS, "ours", "ours"),
        load("torch DCP load", Kind.PEER, "dcp", "dcp"),
    ]


def _forget(directory: Path) -> None:
    """Have files of a disk read from there, and not from memory; those in memory stay there."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
