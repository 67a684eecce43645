"""How long asynchronous saves keep training waiting, by two ranks and by four, with none and with one in flight."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing import async_state
from benchmarks.checkpointing.async_state import AsyncState
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Contender, Kind, Measure, Settings
from benchmarks.peers import byte_checkpoint

COPY, OURS, DCP, DCP_KEPT = "copy into kept memory", "checkpoint", "torch DCP", "torch DCP, kept memory"
KINDS = {COPY: Kind.FLOOR, OURS: Kind.OURS, DCP: Kind.PEER, DCP_KEPT: Kind.PEER}
_PUBLISHED = "bytecheckpoint"
_NUM_RANKS = (2, 4)


def measure(name: str) -> Measure:
    """Milliseconds for which training waits."""
    return Measure(name=name, unit="ms blocked", scale=1e-3, higher_is_better=False, reference=COPY)


MEASURES = tuple(
    measure(f"{state} in flight, {num_ranks} ranks") for state in ("none", "one") for num_ranks in _NUM_RANKS
)


class Save:
    """One way to save on one layout; a save is begun by ``begin`` and finished, untimed, by ``finish``.

    Args:
        pool: the ranks.
        form: the way, as of `AsyncState.form`.
        directory: where it goes, emptied afterwards.
        num_bytes: what `begin` returns.
    """

    def __init__(self, pool: RankPool, form: str, directory: Path, num_bytes: int) -> None:
        self._pool = pool
        self._form = form
        self._directory = directory
        self._num_bytes = num_bytes

    def begin(self) -> int:
        """Until all ranks may go on."""
        self._pool.call(async_state.begin, self._form, self._directory / "timed")
        return self._num_bytes

    def begin_another(self) -> None:
        """To be in flight meanwhile."""
        self._pool.call(async_state.begin, self._form, self._directory / "before")

    def finish(self) -> None:
        """Until nothing is in flight."""
        self._pool.call(async_state.finish)
        for path in self._directory.iterdir():
            remove(path)


@contextmanager
def contenders(settings: Settings, *, shard: bool) -> Iterator[Sequence[Contender]]:
    """What saves, and the floor.

    Args:
        settings: Sizes and places.
        shard: Cut the state over the ranks with FSDP2; else all ranks have all of it, as under DDP.
    """
    num_bytes = settings.sized(2**30, 2**24)
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=settings.directory, prefix="blocking-"))
        found = []
        for num_ranks in _NUM_RANKS:
            # As many bytes in all, whether they are cut or replicated.
            pool = stack.enter_context(
                RankPool(num_ranks, AsyncState, num_bytes if shard else num_bytes // num_ranks, shard)
            )
            kinds = KINDS | ({_PUBLISHED: Kind.PEER} if shard and byte_checkpoint.installed() else {})
            found += _of_ranks(pool, Path(name), num_ranks, num_bytes, kinds)
        yield found


def _of_ranks(
    pool: RankPool, directory: Path, num_ranks: int, num_bytes: int, kinds: Mapping[str, Kind]
) -> list[Contender]:
    def contender(
        name: str, kind: Kind, state: str, save: Save, before: Callable[[], None] = lambda: None
    ) -> Contender:
        return Contender(
            name=name,
            measure=f"{state} in flight, {num_ranks} ranks",
            kind=kind,
            run=save.begin,
            before=before,
            after=save.finish,
            cpu_seconds=pool.cpu_seconds,
        )

    saves = {form: Save(pool, form, directory, num_bytes) for form in kinds}
    found = [contender(form, kinds[form], "none", save) for form, save in saves.items()]
    found.append(contender(f"{COPY} (A/A)", Kind.CONTROL, "none", saves[COPY]))
    for form in (COPY, OURS, DCP_KEPT):
        save = saves[form]
        before = (lambda: None) if form == COPY else save.begin_another
        found.append(contender(form, KINDS[form], "one", save, before))
    found.append(contender(f"{COPY} (A/A)", Kind.CONTROL, "one", saves[COPY]))
    return found
