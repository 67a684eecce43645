"""Local files in parallel, against loops of bare system calls."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.storing import raw
from storage import Store

_NUM_THREADS = 4
_NUM_FILES = 8

_READ_REFERENCE = f"preadv, {_NUM_THREADS} threads"
_WRITE_REFERENCE = f"write + fsync, {_NUM_THREADS} threads"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="storage_local-") as name,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
    ):
        root = Path(name)
        store = Store(root)
        num_bytes = settings.sized(2**30, 2**26)
        content = memoryview(np.random.default_rng(0).bytes(num_bytes))
        file_bytes = num_bytes // _NUM_FILES
        contents = [content[begin : begin + file_bytes] for begin in range(0, num_bytes, file_bytes)]
        store.write("read/all", content)
        into = memoryview(bytearray(num_bytes))

        def read(name: str, run: Callable[[], int], kind: Kind) -> Contender:
            return Contender(name=name, measure="read", kind=kind, run=run)

        def write(name: str, run: Callable[[], int], kind: Kind) -> Contender:
            return Contender(
                name=name,
                measure="write",
                kind=kind,
                run=run,
                before=(root / "write").mkdir,
                after=lambda: shutil.rmtree(root / "write"),
            )

        def raw_read() -> int:
            return raw.read_into(root / "read" / "all", into, pool)

        def raw_write() -> int:
            return raw.write_files(root / "write", contents, pool)

        def ours_read() -> int:
            store.read_ranges([("read/all", 0, num_bytes)], into=[into])
            return num_bytes

        def ours_write() -> int:
            list(pool.map(lambda i: store.write(f"write/{i}", contents[i]), range(_NUM_FILES)))
            return num_bytes

        yield [
            read("preadv, one loop", lambda: raw.read_into(root / "read" / "all", into, None), Kind.FLOOR),
            read(_READ_REFERENCE, raw_read, Kind.FLOOR),
            read(f"{_READ_REFERENCE} (A/A)", raw_read, Kind.CONTROL),
            read("Store.read_ranges", ours_read, Kind.OURS),
            write(
                "write + fsync, one loop",
                lambda: raw.write_files(root / "write", contents, None),
                Kind.FLOOR,
            ),
            write(_WRITE_REFERENCE, raw_write, Kind.FLOOR),
            write(f"{_WRITE_REFERENCE} (A/A)", raw_write, Kind.CONTROL),
            write("Store.write", ours_write, Kind.OURS),
        ]


BENCHMARK = Benchmark(
    name="storage_local",
    measures_what="Bytes per second of reading one local file and writing eight, into and from memory in use.",
    how_to_read=(
        "The loops neither hide unfinished files nor rename them, nor do they fsync the directory; Store does. In"
        " memory (the default) fsync costs nothing: what is compared is copying and handing out work. On a disk"
        " (--dir) reads come from the page cache, and writes vary by more than the contenders differ."
    ),
    measures=(
        Measure(name="read", unit="GB/s", scale=1e9, higher_is_better=True, reference=_READ_REFERENCE),
        Measure(name="write", unit="GB/s", scale=1e9, higher_is_better=True, reference=_WRITE_REFERENCE),
    ),
    contenders=_contenders,
)
