"""Save, asynchronous save and load of a training state cut over two ranks with FSDP2."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpointing import rank_state
from benchmarks.checkpointing.formats import remove
from benchmarks.checkpointing.rank_state import RankState
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_NUM_RANKS = 2
_SAVE_REFERENCE, _LOAD_REFERENCE = "pwrite + xxh3", "pread + xxh3"
_ASYNC_REFERENCE = "copy into kept memory"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_fsdp-") as name:
        directory = Path(name)
        with RankPool(_NUM_RANKS, RankState, settings.sized(2**30, 2**26)) as pool:
            yield _with_ranks(pool, directory)


def _with_ranks(pool: RankPool, directory: Path) -> list[Contender]:
    num_bytes = int(sum(pool.call(rank_state.num_bytes)))

    def clear(path: Path) -> None:
        for saved in path.parent.glob(f"{path.name}*"):
            remove(saved)

    def save(name: str, kind: Kind, form: str) -> Contender:
        path = directory / "save"

        def run() -> int:
            pool.call(rank_state.save, form, path)
            return num_bytes

        return Contender(
            name=name,
            measure="save",
            kind=kind,
            run=run,
            after=lambda: clear(path),
            cpu_seconds=pool.cpu_seconds,
        )

    def blocked(name: str, kind: Kind, form: str) -> Contender:
        path = directory / "async"

        def run() -> int:
            pool.call(rank_state.begin, form, path)
            return num_bytes

        def after() -> None:
            pool.call(rank_state.finish)
            clear(path)

        return Contender(
            name=name, measure="async save", kind=kind, run=run, after=after, cpu_seconds=pool.cpu_seconds
        )

    def load(name: str, kind: Kind, form: str, saved: str) -> Contender:
        path = directory / f"load-{saved}"

        def run() -> int:
            pool.call(rank_state.load, form, path)
            return num_bytes

        return Contender(name=name, measure="load", kind=kind, run=run, cpu_seconds=pool.cpu_seconds)

    for form in ("raw", "ours", "dcp"):
        pool.call(rank_state.save, form, directory / f"load-{form}")
    return [
        save("pwrite", Kind.FLOOR, "raw"),
        save(_SAVE_REFERENCE, Kind.FLOOR, "raw + xxh3"),
        save(f"{_SAVE_REFERENCE} (A/A)", Kind.CONTROL, "raw + xxh3"),
        save("checkpoint.save", Kind.OURS, "ours"),
        save("torch DCP save", Kind.PEER, "dcp"),
        blocked(_ASYNC_REFERENCE, Kind.FLOOR, "copy"),
        blocked(f"{_ASYNC_REFERENCE} (A/A)", Kind.CONTROL, "copy"),
        blocked("checkpoint.async_save", Kind.OURS, "ours"),
        blocked("torch DCP async_save", Kind.PEER, "dcp"),
        blocked("torch DCP async_save, kept memory", Kind.PEER, "dcp, kept memory"),
        load("pread", Kind.FLOOR, "raw", "raw"),
        load(_LOAD_REFERENCE, Kind.FLOOR, "raw + xxh3", "raw"),
        load(f"{_LOAD_REFERENCE} (A/A)", Kind.CONTROL, "raw + xxh3", "raw"),
        load("checkpoint.load", Kind.OURS, "ours", "ours"),
        load("torch DCP load", Kind.PEER, "dcp", "dcp"),
    ]


BENCHMARK = Benchmark(
    name="checkpoint_fsdp",
    measures_what="Bytes per second of saving and loading a model with AdamW's moments, over two FSDP2 ranks.",
    how_to_read=(
        "Bytes are those of both ranks, times those of the slower one; the ranks share the machine's cores. A floor"
        " has every rank write and read its own file, without names, layout or agreement. Loads are on the layout of"
        " the save, so nothing is resharded. The rest as in checkpoint_save_load."
    ),
    measures=(
        Measure(name="save", unit="GB/s", scale=1e9, higher_is_better=True, reference=_SAVE_REFERENCE),
        Measure(
            name="async save",
            unit="ms blocked",
            scale=1e-3,
            higher_is_better=False,
            reference=_ASYNC_REFERENCE,
        ),
        Measure(name="load", unit="GB/s", scale=1e9, higher_is_better=True, reference=_LOAD_REFERENCE),
    ),
    contenders=_contenders,
)
