"""Loading a training state into the layout that it was saved in, by two ranks and by four."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpointing import rank_state
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.checkpointing.state_ranks import measures, pools
from benchmarks.definition import Contender, Kind, Settings
from benchmarks.peers import byte_checkpoint

_REFERENCE = "pread"
_FORMS = ("raw", "ours", "dcp")

MEASURES = measures(_REFERENCE)


@contextmanager
def contenders(settings: Settings, *, shard: bool) -> Iterator[Sequence[Contender]]:
    """What loads, and the floors.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    with pools(settings, shard=shard) as found:
        published = shard and byte_checkpoint.installed()
        yield [
            one
            for measure, pool, directory in found
            for one in _of_ranks(pool, directory, measure, published=published)
        ]


def _of_ranks(pool: RankPool, directory: Path, measure: str, *, published: bool) -> list[Contender]:
    num_bytes = int(sum(pool.call(rank_state.num_bytes)))
    for form in (*_FORMS, "bytecheckpoint") if published else _FORMS:
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

    found = [
        load(_REFERENCE, Kind.FLOOR, "raw", "raw"),
        load(f"{_REFERENCE} (A/A)", Kind.CONTROL, "raw", "raw"),
        load(f"{_REFERENCE} + xxh3", Kind.FLOOR, "raw + xxh3", "raw"),
        load("checkpoint.load", Kind.OURS, "ours", "ours"),
        load("torch DCP load", Kind.PEER, "dcp", "dcp"),
    ]
    if published:
        found.append(load("bytecheckpoint.load", Kind.PEER, "bytecheckpoint", "bytecheckpoint"))
    return found


def _forget(directory: Path) -> None:
    """Have files of a disk read from there, and not from memory; those in memory stay there."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
