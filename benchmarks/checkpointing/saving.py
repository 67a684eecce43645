"""Saving a training state and waiting for it, by two ranks and by four."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpointing import rank_state
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.checkpointing.state_ranks import measures, pools
from benchmarks.definition import Contender, Kind, Settings
from benchmarks.peers import byte_checkpoint

_REFERENCE = "pwrite + xxh3"

MEASURES = measures(_REFERENCE)


@contextmanager
def contenders(settings: Settings, *, shard: bool) -> Iterator[Sequence[Contender]]:
    """What saves, and the floors.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    with pools(settings, shard=shard) as found:
        published = shard and byte_checkpoint.installed()
        every: list[Contender] = []
        for measure, pool, directory in found:
            held = pool.call(rank_state.num_bytes)
            num_bytes = sum(held) if shard else held[0]
            every += _of_ranks(pool, directory, measure, num_bytes, published=published)
        yield every


def _of_ranks(
    pool: RankPool, directory: Path, measure: str, num_bytes: int, *, published: bool
) -> list[Contender]:
    def save(name: str, kind: Kind, form: str) -> Contender:
        def run() -> int:
            pool.call(rank_state.save, form, directory / "save")
            return num_bytes

        def clear() -> None:
            for path in directory.iterdir():
                remove(path)

        return Contender(
            name=name, measure=measure, kind=kind, run=run, after=clear, cpu_seconds=pool.cpu_seconds
        )

    found = [
        save("pwrite", Kind.FLOOR, "share"),
        save(_REFERENCE, Kind.FLOOR, "share + xxh3"),
        save(f"{_REFERENCE} (A/A)", Kind.CONTROL, "share + xxh3"),
        save("checkpoint.save", Kind.OURS, "ours"),
        save("torch DCP save", Kind.PEER, "dcp"),
    ]
    if published:
        found.append(save("bytecheckpoint.save, no fsync", Kind.PEER, "bytecheckpoint"))
    return found
