"""Two ranks and four that hold a training state: what benchmarks of saving and of loading it run in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing.rank_state import RankState
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Measure, Settings

_NUM_RANKS = (2, 4)


def measures(reference: str) -> tuple[Measure, ...]:
    """Bytes per second, by the name that `pools` gives the ranks."""
    return tuple(
        Measure(name=_name(num_ranks), unit="GB/s", scale=1e9, higher_is_better=True, reference=reference)
        for num_ranks in _NUM_RANKS
    )


@contextmanager
def pools(settings: Settings, *, shard: bool) -> Iterator[list[tuple[str, RankPool, Path]]]:
    """Name, ranks and directory of each measure.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=settings.directory, prefix="state_ranks-"))
        found = []
        for num_ranks in _NUM_RANKS:
            pool = stack.enter_context(RankPool(num_ranks, RankState, settings.sized(2**30, 2**26), shard))
            directory = Path(name) / str(num_ranks)
            directory.mkdir()
            found.append((_name(num_ranks), pool, directory))
        yield found


def _name(num_ranks: int) -> str:
    return f"{num_ranks} ranks"
