"""How long an asynchronous save blocks training: the first one, a later one, and one that follows too soon."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.checkpointing import async_state
from benchmarks.checkpointing.async_state import AsyncState
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_COPY, _OURS, _DCP, _DCP_KEPT = "copy into kept memory", "checkpoint", "torch DCP", "torch DCP, kept memory"
_FORMS = {
    _COPY: Kind.FLOOR,
    f"{_COPY} (A/A)": Kind.CONTROL,
    _OURS: Kind.OURS,
    _DCP: Kind.PEER,
    _DCP_KEPT: Kind.PEER,
}
# Ranks, whether the state is cut over them, and the part of the size that is used: with DDP every rank holds it all.
_LAYOUTS = {
    "FSDP2, 2 ranks": (2, True, 1),
    "FSDP2, 4 ranks": (4, True, 1),
    "DDP, 2 ranks": (2, False, 2),
}
_FIRST = "first save, FSDP2, 2 ranks"


class _Case:
    """One way to save on one layout; a save is begun by ``run`` and finished, untimed, by ``after``."""

    def __init__(self, pool: RankPool, form: str, path: Path, num_bytes: int) -> None:
        self._pool = pool
        self._form = form
        self._path = path
        self._num_bytes = num_bytes

    def begin(self) -> int:
        self._pool.call(async_state.begin, self._form, self._path.with_name("timed"))
        return self._num_bytes

    def begin_another(self) -> None:
        self._pool.call(async_state.begin, self._form, self._path.with_name("before"))

    def finish(self) -> None:
        self._pool.call(async_state.finish)
        for path in self._path.parent.iterdir():
            remove(path)


class _First:
    """The first save of processes that do nothing else."""

    def __init__(self, form: str, directory: Path, num_bytes: int) -> None:
        self._form = form
        self._directory = directory
        self._num_bytes = num_bytes
        self._stack = ExitStack()
        self._case: _Case | None = None

    def before(self) -> None:
        pool = self._stack.enter_context(RankPool(2, AsyncState, self._num_bytes, True))
        self._case = _Case(pool, self._form, self._directory / "save", self._num_bytes)

    def run(self) -> int:
        assert self._case is not None
        return self._case.begin()

    def after(self) -> None:
        assert self._case is not None
        self._case.finish()
        self._stack.close()


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    num_bytes = settings.sized(2**30, 2**24)
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_async-")
        )
        directory = Path(name)
        contenders = []
        for layout, (num_ranks, sharded, part) in _LAYOUTS.items():
            pool = stack.enter_context(RankPool(num_ranks, AsyncState, num_bytes // part, sharded))
            for label, kind in _FORMS.items():
                case = _Case(pool, label.removesuffix(" (A/A)"), directory / "save", num_bytes // part)
                contender = partial(
                    Contender,
                    name=label,
                    kind=kind,
                    run=case.begin,
                    after=case.finish,
                    cpu_seconds=pool.cpu_seconds,
                )
                contenders.append(contender(measure=f"none in flight, {layout}"))
                contenders.append(contender(measure=f"one in flight, {layout}", before=case.begin_another))
        for form in (_COPY, _OURS, _DCP):
            first = _First(form, directory, num_bytes)
            kind = _FORMS[form]
            contenders.append(
                Contender(
                    name=form,
                    measure=_FIRST,
                    kind=kind,
                    run=first.run,
                    before=first.before,
                    after=first.after,
                )
            )
        yield contenders


def _measure(name: str) -> Measure:
    return Measure(name=name, unit="ms blocked", scale=1e-3, higher_is_better=False, reference=_COPY)


BENCHMARK = Benchmark(
    name="checkpoint_async",
    measures_what="Time that asynchronous saves of a model with AdamW's moments keep training waiting.",
    how_to_read=(
        "The time until the slowest rank may go on; what is left of the save is not timed. With one in flight, another"
        " save was begun right before, and the ranks' own cores write it meanwhile; torch DCP then waits for that one"
        " to end. The floor copies what a rank holds, which with DDP is everything, on every rank; checkpoint and DCP"
        " write replicas once. The first save pays for memory that later ones find ready."
    ),
    measures=(
        *(
            _measure(f"{state}, {layout}")
            for state in ("none in flight", "one in flight")
            for layout in _LAYOUTS
        ),
        _measure(_FIRST),
    ),
    contenders=_contenders,
)
