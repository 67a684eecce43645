"""Saving a training state and waiting for it, by two ranks and by four."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing import rank_state
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.rank_state import RankState
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Contender, Kind, Measure, Settings

_REFERENCE = "pwrite + xxh3"
_NUM_RANKS = (2, 4)

MEASURES = tuple(
    Measure(name=f"{num_ranks} ranks", unit="GB/s", scale=1e9, higher_is_better=True, reference=_REFERENCE)
    for num_ranks in _NUM_RANKS
)


@contextmanager
def contenders(settings: Settings, *, shard: bool) -> Iterator[Sequence[Contender]]:
    """What saves, and the floors.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=settings.directory, prefix="saving-"))
        found = []
        for num_ranks in _NUM_RANKS:
            pool = stack.enter_context(RankPool(num_ranks, RankState, settings.sized(2**30, 2**26), shard))
            held = pool.call(rank_state.num_bytes)
            num_bytes = sum(held) if shard else held[0]
            found += _of_ranks(pool, Path(name) / str(num_ranks), f"{num_ranks} ranks", num_bytes)
        yield found


def _of_ranks(pool: RankPool, directory: Path, measure: str, num_bytes: int) -> list[Contender]:
    directory.mkdir()

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

    return [
        save("pwrite", Kind.FLOOR, "share"),
        save(_REFERENCE, Kind.FLOOR, "share + xxh3"),
        save(f"{_REFERENCE} (A/A)", Kind.CONTROL, "share + xxh3"),
        save("checkpoint.save", Kind.OURS, "ours"),
        save("torch DCP save", Kind.PEER, "dcp"),
    ]
