"""How long an asynchronous save blocks training that is cut over ranks with FSDP2; and the first one of a process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpointing.async_state import AsyncState
from benchmarks.checkpointing.blocking import COPY, DCP, KINDS, MEASURES, OURS, Save, contenders, measure
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Benchmark, Contender, Settings

_FIRST = "first save, 2 ranks"


class _First:
    """The first save of processes that do nothing else."""

    def __init__(self, form: str, directory: Path, num_bytes: int) -> None:
        self._form = form
        self._directory = directory
        self._num_bytes = num_bytes
        self._stack = ExitStack()
        self._save: Save | None = None

    def before(self) -> None:
        pool = self._stack.enter_context(RankPool(2, AsyncState, self._num_bytes, True))
        self._save = Save(pool, self._form, self._directory, self._num_bytes)

    def run(self) -> int:
        assert self._save is not None, "runs after before"
        return self._save.begin()

    def after(self) -> None:
        assert self._save is not None, "runs after before"
        self._save.finish()
        self._stack.close()


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with (
        contenders(settings, shard=True) as later,
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_async_fsdp-") as name,
    ):
        firsts = []
        for form in (COPY, OURS, DCP):
            first = _First(form, Path(name), settings.sized(2**30, 2**24))
            firsts.append(
                Contender(
                    name=form,
                    measure=_FIRST,
                    kind=KINDS[form],
                    run=first.run,
                    before=first.before,
                    after=first.after,
                )
            )
        yield [*later, *firsts]


BENCHMARK = Benchmark(
    name="checkpoint_async_fsdp",
    measures_what="Time that asynchronous saves keep training waiting, with the state cut over ranks with FSDP2.",
    how_to_read=(
        "The time until the slowest rank may go on; what is left of the save is not timed. With one in flight, another"
        " save was begun right before, and the ranks' own cores write it meanwhile; torch DCP then waits for that one"
        " to end. The floor copies what a rank holds and has nothing in flight. torch DCP is async_save(state_dict,"
        " checkpoint_id=...) of get_state_dict(), which copies into new memory each time; with a DefaultStager that is"
        " passed to each call, and every option of it off, as there is no accelerator, it keeps that memory. The first"
        " save pays for memory that later ones find ready."
    ),
    measures=(*MEASURES, measure(_FIRST)),
    contenders=_contenders,
)
