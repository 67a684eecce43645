"""Bytes that the block cache already has, against the same bytes in a plain local file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.storing import raw
from storage import BlockCache, Store
from tests.storage.seaweed import s3_server

_NUM_THREADS = 4
_LARGE_BYTES = 8 << 20
_SMALL_BYTES = 64 << 10
_NUM_SMALL = 2000

_WHOLE_REFERENCE = "Path.read_bytes"
_LARGE_REFERENCE = "local Store, large ranges"
_SMALL_REFERENCE = "local Store, small ranges"

_FIRST = "cache hit, first use in the process"
_LATER = "cache hit, later use"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="storage_cache-") as name,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
        s3_server(Path(name)) as server,
    ):
        num_bytes = settings.sized(2**28, 2**25)
        content = np.random.default_rng(0).bytes(num_bytes)
        local = Store(Path(name) / "plain")
        local.write("x", content)
        plain = Path(name) / "plain" / "x"
        cache = BlockCache(Path(name) / "cache", 2 * num_bytes + (1 << 27), recheck_s=3600)
        cached = Store(f"s3://{server.bucket}", server.storage_options, cache=cache)
        cached.write("x", content)
        cached.read("x")
        into = memoryview(bytearray(num_bytes))
        large = [("x", at, min(at + _LARGE_BYTES, num_bytes)) for at in range(0, num_bytes, _LARGE_BYTES)]
        starts = np.random.default_rng(1).integers(0, num_bytes - _SMALL_BYTES, _NUM_SMALL)
        small = [("x", int(start), int(start) + _SMALL_BYTES) for start in starts]

        def read_ranges(store: Store, ranges: list[tuple[str, int, int]]) -> int:
            views, done = [], 0
            for _, start, end in ranges:
                views.append(into[done : done + end - start])
                done += end - start
            store.read_ranges(ranges, into=views)
            return done

        def plain_ranges(measure: str, name: str, kind: Kind) -> Contender:
            ranges = large if measure == "large ranges" else small
            return Contender(name=name, measure=measure, kind=kind, run=lambda: read_ranges(local, ranges))

        def hits(measure: str, run: Callable[[], int]) -> list[Contender]:
            return [
                Contender(name=_FIRST, measure=measure, kind=Kind.OURS, run=run, before=cache.release),
                Contender(name=_LATER, measure=measure, kind=Kind.OURS, run=run),
            ]

        yield [
            Contender(
                name=_WHOLE_REFERENCE, measure="whole", kind=Kind.FLOOR, run=lambda: len(plain.read_bytes())
            ),
            Contender(
                name=f"{_WHOLE_REFERENCE} (A/A)",
                measure="whole",
                kind=Kind.CONTROL,
                run=lambda: len(plain.read_bytes()),
            ),
            *hits("whole", lambda: len(cached.read("x"))),
            Contender(
                name=f"preadv, {_NUM_THREADS} threads",
                measure="large ranges",
                kind=Kind.FLOOR,
                run=lambda: raw.read_into(plain, into, pool),
            ),
            plain_ranges("large ranges", _LARGE_REFERENCE, Kind.FLOOR),
            plain_ranges("large ranges", f"{_LARGE_REFERENCE} (A/A)", Kind.CONTROL),
            *hits("large ranges", lambda: read_ranges(cached, large)),
            plain_ranges("small ranges", _SMALL_REFERENCE, Kind.FLOOR),
            plain_ranges("small ranges", f"{_SMALL_REFERENCE} (A/A)", Kind.CONTROL),
            *hits("small ranges", lambda: read_ranges(cached, small)),
        ]


BENCHMARK = Benchmark(
    name="storage_cache",
    measures_what="Bytes per second of reading what the block cache has: a whole object, ranges of 8 MiB and 64 KiB.",
    how_to_read=(
        "When a process first uses a block it opens it, and hashes the pages of 64 KiB that it reads; later, while"
        " the block is among the 128 that it keeps open, it only reads. With files in memory (the default) hashing"
        " shows; on a disk that is really read it hides behind it. A small range costs at first use the one or two"
        " pages that it touches."
    ),
    measures=(
        Measure(name="whole", unit="GB/s", scale=1e9, higher_is_better=True, reference=_WHOLE_REFERENCE),
        Measure(
            name="large ranges", unit="GB/s", scale=1e9, higher_is_better=True, reference=_LARGE_REFERENCE
        ),
        Measure(
            name="small ranges", unit="GB/s", scale=1e9, higher_is_better=True, reference=_SMALL_REFERENCE
        ),
    ),
    contenders=_contenders,
)
