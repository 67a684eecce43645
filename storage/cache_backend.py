"""A backend whose reads go through a ``BlockCache``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import BinaryIO

from storage.backend import Backend, FileStat, RangeRead, Sink
from storage.cache import BlockCache
from storage.cache_block import Version
from storage.cache_reader import CacheReader, OneVersion, strong_tag
from storage.errors import StorageError
from storage.local import LocalBackend
from storage.parallel import run_all
from storage.paths import join
from storage.range_file import open_ranges
from storage.range_jobs import gather

__all__ = ["CachedBackend", "cached_backend"]


def cached_backend(cache: BlockCache, backend: Backend, url: str) -> "CachedBackend":
    """Read a remote backend through a cache.

    Args:
        cache: Where blocks are kept.
        backend: Where they come from.
        url: Of the backend's root.
    """
    return CachedBackend(backend, CacheReader(cache, _BackendSource(backend, url)), "", cache.block_bytes)


class CachedBackend:
    """A remote backend, read through a cache; made by ``cached_backend``.

    Objects without a strong tag are read from the backend every time. What this backend or its ``sub`` ones write or
    delete is noticed at once; what others do, within the ``recheck_s`` of the cache. ``stat`` and listings are never
    cached.

    Args:
        backend: Rooted where this one is.
        reader: Of the tree that this backend lies in.
        root: Where it lies in that tree.
        block_bytes: Of the cache.
    """

    def __init__(self, backend: Backend, reader: CacheReader, root: str, block_bytes: int) -> None:
        self._backend = backend
        self._reader = reader
        self._root = root
        self.range_bytes = block_bytes  # jobs of one block each, so that several are fetched at once
        self.ranges_per_call = backend.ranges_per_call

    def read(self, path: str) -> bytes:
        """From the cache; what is missing by one request."""
        return self._reader.read_all(join(self._root, path))

    def read_range(self, wanted: RangeRead) -> int:
        """From the cache; missing blocks one by one."""
        return self._reader.read_range(join(self._root, wanted.path), wanted.start, wanted.into)

    def read_here(self, wanted: Sequence[RangeRead]) -> list[RangeRead]:
        """Read in parallel what is here already, without asking the server.

        Returns:
            The parts that are missing, each of one block; the others are done.
        """
        missing: list[RangeRead] = []

        def read(parts: Sequence[RangeRead]) -> None:
            for (path, _), of_block in groupby(parts, self._block_of):
                group = list(of_block)
                if not self._reader.read_here(join(self._root, path), group):
                    missing.extend(group)

        # In order, so that those of one block are read one after the other and its file is looked at once.
        parts = sorted(chain.from_iterable(map(self._blocks_of, wanted)), key=self._block_of)
        jobs = gather(parts, LocalBackend.range_bytes, LocalBackend.ranges_per_call)
        if len(jobs) == 1:
            read(jobs[0])
        else:
            run_all([partial(read, job) for job in jobs], "ranges from the cache")
        return missing

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """To the backend only."""
        with self._changing(path):
            self._backend.write(path, views)

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """To the backend only."""
        with self._changing(path):
            self._backend.create(path, views)

    def sink(self, path: str, header_bytes: int) -> Sink:
        """To the backend only."""
        return _ForgettingSink(self._backend.sink(path, header_bytes), self._reader, join(self._root, path))

    def open(self, path: str) -> BinaryIO:
        """A file that reads one version, whatever is stored under the name meanwhile."""
        full = join(self._root, path)
        version = self._reader.version(full)
        if version is None:
            return self._backend.open(path)
        return open_ranges(OneVersion(self._reader, version), full, version.url)

    def list_objects(self, prefix: str) -> list[FileStat]:
        """As the backend does."""
        return self._backend.list_objects(prefix)

    def list_dirs(self, prefix: str) -> list[str]:
        """As the backend does."""
        return self._backend.list_dirs(prefix)

    def stat(self, path: str) -> FileStat:
        """As the backend does."""
        return self._backend.stat(path)

    def delete(self, path: str) -> None:
        """As the backend does; its blocks are left to be evicted."""
        with self._changing(path):
            self._backend.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """As the backend does; the blocks are left to be evicted."""
        try:
            self._backend.delete_tree(prefix)
        finally:
            self._reader.forget()

    def sub(self, path: str) -> "CachedBackend":
        """Another root in the same tree."""
        return CachedBackend(self._backend.sub(path), self._reader, join(self._root, path), self.range_bytes)

    def local_path(self, path: str) -> Path | None:
        """As the backend does: files of the cache are blocks, not objects."""
        return self._backend.local_path(path)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As the backend does."""
        return self._backend.classify(error, path)

    def _blocks_of(self, wanted: RangeRead) -> Iterator[RangeRead]:
        """Cut a range at the borders of blocks."""
        num_bytes = wanted.into.nbytes
        begin, end = 0, self.range_bytes - wanted.start % self.range_bytes
        if num_bytes <= end:
            yield wanted
            return
        while begin < num_bytes:
            yield wanted.part(begin, end - begin)
            begin, end = end, end + self.range_bytes

    def _block_of(self, part: RangeRead) -> tuple[str, int]:
        return part.path, part.start // self.range_bytes

    @contextmanager
    def _changing(self, path: str) -> Iterator[None]:
        # After a failure too: a request whose answer was lost may have had its effect.
        try:
            yield
        finally:
            self._reader.forget(join(self._root, path))


class _ForgettingSink:
    """A sink after whose end the version is asked for again."""

    def __init__(self, sink: Sink, reader: CacheReader, path: str) -> None:
        self._sink = sink
        self._reader = reader
        self._path = path

    def append(self, views: Sequence[memoryview]) -> None:
        self._sink.append(views)

    def commit(self, header: bytes) -> None:
        try:
            self._sink.commit(header)
        finally:
            self._reader.forget(self._path)

    def abort(self) -> None:
        self._sink.abort()


class _BackendSource:
    """A backend as the source of a cache."""

    def __init__(self, backend: Backend, url: str) -> None:
        self._backend = backend
        self._url = url

    def look_up(self, path: str) -> Version | None:
        found = self._backend.stat(path)
        tag = strong_tag(found.etag)
        return None if tag is None else Version(url=join(self._url, path), etag=tag, size=found.size)

    def fetch(self, path: str, start: int, into: memoryview) -> int:
        return self._backend.read_range(RangeRead(path=path, start=start, into=into))

    def fetch_all(self, path: str) -> bytes:
        return self._backend.read(path)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        return self._backend.classify(error, path)
