"""Bytes that the block cache already has, against the same bytes in a plain local file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
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

        def contender(measure: str, name: str, kind: Kind, store: Store) -> Contender:
            ranges = large if measure == "large ranges" else small
            return Contender(name=name, measure=measure, kind=kind, run=lambda: read_ranges(store, ranges))

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
            Contender(name="cache hit", measure="whole", kind=Kind.OURS, run=lambda: len(cached.read("x"))),
            Contender(
                name=f"preadv, {_NUM_THREADS} threads",
                measure="large ranges",
                kind=Kind.FLOOR,
                run=lambda: raw.read_into(plain, into, pool),
            ),
            contender("large ranges", _LARGE_REFERENCE, Kind.FLOOR, local),
            contender("large ranges", f"{_LARGE_REFERENCE} (A/A)", Kind.CONTROL, local),
            contender("large ranges", "cache hit", Kind.OURS, cached),
            contender("small ranges", _SMALL_REFERENCE, Kind.FLOOR, local),
            contender("small ranges", f"{_SMALL_REFERENCE} (A/A)", Kind.CONTROL, local),
            contender("small ranges", "cache hit", Kind.OURS, cached),
        ]


BENCHMARK = Benchmark(
    name="storage_cache",
    measures_what="Bytes per second of reading what the block cache has: a whole object, ranges of 8 MiB and 64 KiB.",
    how_to_read=(
        "A hit reads the bytes and hashes them, so it cannot be as fast as reading alone while the file is in memory"
        " (the default); on a disk that is really read, hashing hides behind it. A small range costs the one or two"
        " pages of 64 KiB that it touches."
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
