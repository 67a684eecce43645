"""Ways to move the same bytes to and from one bucket, each at the best settings found for it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import obstore
import s3fs
from obstore.store import S3Store

from storage import Store

_HEADER_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """What is read of one object."""

    key: str
    """The object."""
    starts: Sequence[int]
    """First bytes."""
    length: int
    """Bytes of each range."""
    into: Sequence[memoryview]
    """A writable view for each: where the bytes are wanted."""

    @property
    def num_bytes(self) -> int:
        """Of all ranges."""
        return len(self.starts) * self.length


class Mover(Protocol):
    """One way to move bytes. Every method returns how many it moved."""

    def read(self, key: str) -> int:
        """A whole object, to wherever the library puts it."""

    def read_ranges(self, ranges: Ranges) -> int:
        """Ranges, into the memory given: a library that cannot do that copies."""

    def write(self, key: str, content: bytes) -> int:
        """One object large enough for several parts."""


class PlainS3fs:
    """s3fs by its own file-system calls.

    Args:
        bucket: name of the bucket.
        options: for ``s3fs.S3FileSystem``.
    """

    def __init__(self, bucket: str, options: dict[str, Any]) -> None:
        self._bucket = bucket
        self._filesystem = s3fs.S3FileSystem(**options, use_listings_cache=False)

    def read(self, key: str) -> int:
        """Parallel ranges of 50 MiB, its default."""
        return len(self._filesystem.cat_file(f"{self._bucket}/{key}"))

    def read_ranges(self, ranges: Ranges) -> int:
        """All at once, as ``cat_ranges`` bounds it."""
        paths = [f"{self._bucket}/{ranges.key}"] * len(ranges.starts)
        ends = [start + ranges.length for start in ranges.starts]
        found = self._filesystem.cat_ranges(paths, list(ranges.starts), ends)
        return _place(found, ranges)

    def write(self, key: str, content: bytes) -> int:
        """Parts of 16 MiB; at its default of 50 MiB fewer are in flight."""
        self._filesystem.pipe_file(f"{self._bucket}/{key}", content, chunksize=16 << 20)
        return len(content)


class PlainObstore:
    """obstore by its own calls.

    Args:
        bucket: name of the bucket.
        options: as for s3fs.
    """

    def __init__(self, bucket: str, options: dict[str, Any]) -> None:
        endpoint = options["client_kwargs"]["endpoint_url"]
        self._store = S3Store(
            bucket,
            endpoint=endpoint,
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            client_options={"allow_http": True, "timeout": timedelta(seconds=300)},
        )

    def read(self, key: str) -> int:
        """One request."""
        return len(obstore.get(self._store, key).bytes())

    def read_ranges(self, ranges: Ranges) -> int:
        """Ten requests at a time, as ``get_ranges`` bounds it."""
        found = obstore.get_ranges(
            self._store,
            ranges.key,
            starts=ranges.starts,
            lengths=[ranges.length] * len(ranges.starts),
            coalesce=0,
        )
        return _place(found, ranges)

    def write(self, key: str, content: bytes) -> int:
        """Parts of 16 MiB, eight at a time."""
        obstore.put(self._store, key, content, chunk_size=16 << 20, max_concurrency=8)
        return len(content)


class OurStore:
    """``storage.Store``.

    Args:
        bucket: name of the bucket.
        options: as for s3fs.
        engine: what moves the bytes.
    """

    def __init__(self, bucket: str, options: dict[str, Any], engine: str) -> None:
        self._store = Store(f"s3://{bucket}", {**options, "engine": engine})

    def read(self, key: str) -> int:
        """As it is."""
        return len(self._store.read(key))

    def read_ranges(self, ranges: Ranges) -> int:
        """As it is."""
        wanted = [(ranges.key, start, start + ranges.length) for start in ranges.starts]
        self._store.read_ranges(wanted, into=ranges.into)
        return ranges.num_bytes

    def write(self, key: str, content: bytes) -> int:
        """As it is: checked after the write, too."""
        self._store.write(key, content)
        return len(content)

    def stream(self, key: str, content: bytes) -> int:
        """In pieces of 4 MiB, with a header that comes last."""
        with self._store.writer(key, header_bytes=_HEADER_BYTES) as writer:
            for begin in range(0, len(content), 4 << 20):
                writer.write(memoryview(content)[begin : begin + (4 << 20)])
            writer.set_header(bytes(_HEADER_BYTES))
        return len(content)


def spread(key: str, object_bytes: int, length: int, rng: np.random.Generator) -> Ranges:
    """Ranges that cover every other ``length`` bytes of an object, in random order: none touches another."""
    starts = [int(start) for start in rng.permutation(np.arange(0, object_bytes, 2 * length))]
    memory = memoryview(bytearray(len(starts) * length))
    into = [memory[begin : begin + length] for begin in range(0, memory.nbytes, length)]
    return Ranges(key=key, starts=starts, length=length, into=into)


def new_keys(prefix: str) -> itertools.cycle[str]:
    """Two names for ever, in turn, that nobody else uses."""
    name = uuid.uuid4().hex
    return itertools.cycle([f"{prefix}/{name}-0", f"{prefix}/{name}-1"])


def _place(found: Sequence[Any], ranges: Ranges) -> int:
    for data, into in zip(found, ranges.into, strict=True):
        into[:] = memoryview(data)
    return ranges.num_bytes
