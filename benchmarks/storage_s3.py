"""S3: whole reads, ranged reads and multipart writes, against the libraries underneath."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.storing.s3 import Mover, OurStore, PlainObstore, PlainS3fs, new_keys, spread
from tests.storage.proxy import fault_proxy
from tests.storage.seaweed import s3_server

_REFERENCE = "obstore"
_NEAR = "Store, engine obstore, no latency"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="storage_s3-") as directory,
        s3_server(Path(directory)) as server,
        fault_proxy("127.0.0.1", int(urlsplit(server.endpoint_url).port or 0)) as proxy,
    ):
        rng = np.random.default_rng(0)
        num_bytes = settings.sized(2**27, 2**26)
        content = rng.bytes(num_bytes)
        options = server.storage_options
        fast = OurStore(server.bucket, options, "obstore")
        fast.write("read", content)
        ranges = spread("read", num_bytes, 2**20, rng)
        plain = PlainObstore(server.bucket, options)
        movers: list[tuple[str, Kind, Mover]] = [
            (_REFERENCE, Kind.PEER, plain),
            (f"{_REFERENCE} (A/A)", Kind.CONTROL, plain),
            ("s3fs", Kind.PEER, PlainS3fs(server.bucket, options)),
            ("Store, engine obstore", Kind.OURS, fast),
            ("Store, engine s3fs", Kind.OURS, OurStore(server.bucket, options, "s3fs")),
        ]

        def reading(mover: Mover) -> Callable[[], int]:
            return lambda: mover.read("read")

        def reading_ranges(mover: Mover) -> Callable[[], int]:
            return lambda: mover.read_ranges(ranges)

        def writing(mover: Mover) -> Callable[[], int]:
            return _replacing(mover.write, content)

        contenders = [
            Contender(name=name, measure=measure, kind=kind, run=run(mover))
            for measure, run in (("read", reading), ("ranges", reading_ranges), ("write", writing))
            for name, kind, mover in movers
        ]
        streamed = _replacing(fast.stream, content)
        header_last = Contender(
            name="Store.writer, header last", measure="write", kind=Kind.OURS, run=streamed
        )
        far = {**options, "client_kwargs": {"endpoint_url": proxy.url}}
        remote = {engine: OurStore(server.bucket, far, engine) for engine in ("obstore", "s3fs")}

        def distant(name: str, kind: Kind, latency_s: float, engine: str = "obstore") -> Contender:
            return Contender(
                name=name,
                measure="distant ranges",
                kind=kind,
                run=reading_ranges(remote[engine]),
                before=lambda: setattr(proxy, "latency_s", latency_s),
            )

        yield [
            *contenders,
            header_last,
            distant(_NEAR, Kind.FLOOR, 0.0),
            distant(f"{_NEAR} (A/A)", Kind.CONTROL, 0.0),
            distant("Store, engine obstore, 20 ms", Kind.OURS, 0.02),
            distant("Store, engine s3fs, 20 ms", Kind.OURS, 0.02, "s3fs"),
        ]


def _replacing(write: Callable[[str, bytes], int], content: bytes) -> Callable[[], int]:
    """Write to two keys in turn: each run replaces an object, whose space the server gets back."""
    keys = new_keys("write")
    return lambda: write(next(keys), content)


def _measure(name: str, reference: str = _REFERENCE) -> Measure:
    return Measure(name=name, unit="MB/s", scale=1e6, higher_is_better=True, reference=reference)


BENCHMARK = Benchmark(
    name="storage_s3",
    measures_what="Bytes per second of one client of a real S3 server on this machine.",
    how_to_read=(
        "The server's work is on the same cores and not in the column cores, which is the client's: on loopback it"
        " bounds what is measured, writes most of all. ranges are 1 MiB each, apart from each other and in random"
        " order, and end in memory that the caller gave. Only Store asks the server after a write what it has."
        " distant ranges go through a proxy, itself slow and with a connection for each request, that holds every"
        " request back: what 20 ms of latency leave of the throughput is the concurrency's doing."
    ),
    measures=(
        _measure("read"),
        _measure("ranges"),
        _measure("write"),
        _measure("distant ranges", _NEAR),
    ),
    contenders=_contenders,
)
