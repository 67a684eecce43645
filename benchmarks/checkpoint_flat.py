"""Time that an asynchronous save of flat shards (FSDP1) keeps training waiting, against gathering the shards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing import async_state, flat_state
from benchmarks.checkpointing.flat_state import FlatState
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_NUMS_RANKS = (2, 4)
_REFERENCE = "all-gather of the shards"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    # The six ranks together take about thirty times this: torch DCP gathers the whole state on each of them.
    num_bytes = settings.sized(2**28, 2**26)
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_flat-") as name,
        ExitStack() as pools,
    ):
        contenders = []
        for num_ranks in _NUMS_RANKS:
            pool = pools.enter_context(RankPool(num_ranks, FlatState, num_bytes))
            contenders += _with_ranks(pool, num_ranks, Path(name))
        yield contenders


def _with_ranks(pool: RankPool, num_ranks: int, directory: Path) -> list[Contender]:
    num_bytes = int(sum(pool.call(async_state.num_bytes)))
    path = directory / f"{num_ranks}"

    def gather(name: str, kind: Kind, function: Callable[[FlatState], None]) -> Contender:
        def run() -> int:
            pool.call(function)
            return num_bytes

        return Contender(
            name=name, measure=_measure(num_ranks), kind=kind, run=run, cpu_seconds=pool.cpu_seconds
        )

    def blocked(name: str, kind: Kind, form: str) -> Contender:
        def run() -> int:
            pool.call(async_state.begin, form, path)
            return num_bytes

        def after() -> None:
            pool.call(async_state.finish)
            remove(path)

        return Contender(
            name=name,
            measure=_measure(num_ranks),
            kind=kind,
            run=run,
            after=after,
            cpu_seconds=pool.cpu_seconds,
        )

    return [
        blocked("copy into kept memory", Kind.FLOOR, "copy into kept memory"),
        gather(_REFERENCE, Kind.FLOOR, flat_state.gather),
        gather(f"{_REFERENCE} (A/A)", Kind.CONTROL, flat_state.gather),
        gather("all-gather in one call", Kind.FLOOR, flat_state.gather_at_once),
        blocked("checkpoint.async_save", Kind.OURS, "checkpoint"),
        blocked("torch DCP async_save", Kind.PEER, "torch DCP"),
    ]


def _measure(num_ranks: int) -> str:
    return f"{num_ranks} ranks"


BENCHMARK = Benchmark(
    name="checkpoint_flat",
    measures_what="Milliseconds for which saving a model under FSDP1, with AdamW's moments, holds training up.",
    how_to_read=(
        "Gathering is an all-gather, over gloo, of each flat parameter and its moments: what FSDP1 does to give a state"
        " dict, and what a save of that pays before it copies anything. In one call, into memory that is kept, is the"
        " least that gathering could cost. The ranks share the machine's cores and its loopback; a network between them"
        " would only be slower. Nothing else is in flight; the rest of the save is not timed."
    ),
    measures=tuple(
        Measure(
            name=_measure(num_ranks),
            unit="ms blocked",
            scale=1e-3,
            higher_is_better=False,
            reference=_REFERENCE,
        )
        for num_ranks in _NUMS_RANKS
    ),
    contenders=_contenders,
)
