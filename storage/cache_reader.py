"""Reading objects through a ``BlockCache``: which version, which blocks, and what to do when it is replaced."""

import io
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from storage.backend import FileStat, RangeRead
from storage.buffers import new_memory
from storage.cache import BlockCache
from storage.cache_block import Block, BlockPart, Version, parts_of
from storage.errors import Corrupt, StorageError, Transient
from storage.spans import span

__all__ = ["CacheReader", "OneVersion", "Source", "strong_tag"]

_MAX_REPLACEMENTS: Final = 5
_MAX_KNOWN: Final = 50_000  # versions remembered: about 20 MB

_Result = TypeVar("_Result")


class Source(Protocol):
    """Where objects come from when the cache does not have them. Errors are the driver's own."""

    def look_up(self, path: str) -> Version | None:
        """Ask the server for the present version; None if it gives no tag that names exactly these bytes."""

    def fetch(self, path: str, start: int, into: memoryview) -> int:
        """Fill ``into`` from offset ``start``; return how many bytes the object had of it."""

    def fetch_all(self, path: str) -> bytes:
        """The whole object."""

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As ``storage.errors.classify``."""


def strong_tag(etag: object) -> str | None:
    """The tag that names exactly these bytes, without quotes; None for none or a weak one (``W/"..."``)."""
    text = str(etag or "")
    return None if text.startswith("W/") else text.strip('"') or None


class _ReplacedError(Exception):
    """The object is no longer of the version that was being read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


class CacheReader:
    """Reads of the objects of one source. Safe to use from many threads.

    Every call returns bytes of one version. What is fetched is kept only after the server has said once more that the
    version is the same, so that no block ever holds bytes of another one.

    Args:
        cache: Where blocks are kept.
        source: Where they come from.
    """

    def __init__(self, cache: BlockCache, source: Source) -> None:
        self._cache = cache
        self._source = source
        # With the time of asking. Operations on these are atomic, and asking twice does no harm.
        self._known: dict[str, tuple[Version | None, float]] = {}
        self._volatile: set[str] = set()
        self._num_changes = itertools.count()
        self._last_change = -1

    def __reduce__(self) -> tuple[type["CacheReader"], tuple[BlockCache, Source]]:
        return type(self), (self._cache, self._source)

    def version(self, path: str) -> Version | None:
        """The version to read now, asked of the server unless it was within ``recheck_s``; None: cannot be cached."""
        known = self._trusted(path)
        return self._look_up(path) if known is None else known[0]

    def forget(self, path: str | None = None) -> None:
        """Ask the server next time, because this object (None: any) was written or removed."""
        self._last_change = next(self._num_changes)
        if path is None:
            self._known.clear()
        else:
            self._known.pop(path, None)

    def never_trust(self, path: str) -> None:
        """Ask the server every time from now on: it is written by something that does not say when it is done."""
        self._volatile.add(path)
        self.forget(path)

    def read_here(self, path: str, wanted: Sequence[RangeRead]) -> bool:
        """Read ranges that lie in one block of an object if that takes no request; else they are undefined."""
        known = self._trusted(path)
        if known is None or known[0] is None or max(one.end for one in wanted) > known[0].size:
            return False
        block_bytes = self._cache.block_bytes
        return self._cache.load(
            *(part for one in wanted for part in parts_of(known[0], block_bytes, one.start, one.into))
        )

    def read_range(self, path: str, start: int, into: memoryview) -> int:
        """Fill ``into`` from offset ``start``; return how many bytes the object has of it."""

        def attempt(version: Version | None) -> int:
            if version is not None and start + into.nbytes > version.size:
                # It may have grown, and an old version must not make a read too short.
                version = self._look_up(path)
            if version is None:
                return self._source.fetch(path, start, into)
            return self._read(version, path, start, into)

        return self._of_one_version(path, attempt)

    def read_all(self, path: str) -> bytes:
        """The whole object."""

        def attempt(version: Version | None) -> bytes:
            if version is None:
                return self._source.fetch_all(path)
            return self._read_all(version, path)

        return self._of_one_version(path, attempt)

    def read_pinned(self, version: Version, path: str, start: int, into: memoryview) -> int:
        """As ``read_range``, of a given version.

        Raises:
            Corrupt: It was replaced, and not all of the range was cached.
        """
        try:
            return self._read(version, path, start, into)
        except _ReplacedError:
            self.forget(path)
            raise Corrupt(version.url, "was replaced while it was open: open it again") from None

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As the source does."""
        return self._source.classify(error, path)

    def _trusted(self, path: str) -> tuple[Version | None, float] | None:
        known = self._known.get(path)
        return known if known is not None and time.monotonic() - known[1] < self._cache.recheck_s else None

    def _look_up(self, path: str) -> Version | None:
        last_change, asked_s = self._last_change, time.monotonic()
        version = self._source.look_up(path)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        if path not in self._volatile and last_change == self._last_change:
            self._known[path] = (version, asked_s)
        return version

    def _of_one_version(self, path: str, attempt: Callable[[Version | None], _Result]) -> _Result:
        for _ in range(_MAX_REPLACEMENTS):
            try:
                return attempt(self.version(path))
            except _ReplacedError as error:
                self.forget(path)
                url = error.url
        raise Transient(url, f"was replaced {_MAX_REPLACEMENTS} times while it was being read")

    def _read(self, version: Version, path: str, start: int, into: memoryview) -> int:
        into = into[: max(0, version.size - start)]
        for part in parts_of(version, self._cache.block_bytes, start, into):
            if not self._cache.load(part):
                with self._cache.fetching(part.block):
                    if not self._cache.load(part):  # somebody else may have fetched it while we waited
                        self._fetch(version, path, part)
        return into.nbytes

    def _fetch(self, version: Version, path: str, part: BlockPart) -> None:
        block = part.block
        data = part.into if part.is_whole else new_memory(block.num_bytes)
        with span("storage.cache_miss", path=block.url, num_bytes=block.num_bytes):
            num_read = self._source.fetch(path, block.start, data)
            self._confirm(version, path, block.start + num_read, block.start + block.num_bytes)
        self._cache.store(block, data)
        if not part.is_whole:
            part.into[:] = data[part.begin : part.begin + part.into.nbytes]

    def _read_all(self, version: Version, path: str) -> bytes:
        # BytesIO is the one way to fill a bytes object in place: it gives it away without a copy if no view is left.
        buffer = io.BytesIO(bytes(version.size))
        with buffer.getbuffer() as view:
            parts = list(parts_of(version, self._cache.block_bytes, 0, view))
            num_here = 0
            while num_here < len(parts) and self._cache.load(parts[num_here]):
                num_here += 1
            blocks = [part.block for part in parts]
            if 0 < num_here < len(blocks):
                self._fetch_from(version, path, blocks[num_here:], view[blocks[num_here].start :])
            for part in parts:
                part.into.release()
        return buffer.getvalue() if num_here or not blocks else self._fetch_all(version, path, blocks)

    def _fetch_from(self, version: Version, path: str, blocks: list[Block], into: memoryview) -> None:
        """Fetch all of an object from some block on by one request, as without a cache, even if some of it is here."""
        start = blocks[0].start
        with span("storage.cache_miss", path=version.url, num_bytes=into.nbytes):
            num_read = self._source.fetch(path, start, into)
            self._confirm(version, path, start + num_read, version.size)
        self._store(blocks, into, start)

    def _fetch_all(self, version: Version, path: str, blocks: list[Block]) -> bytes:
        """Fetch all of an object by one request, as without a cache."""
        with span("storage.cache_miss", path=version.url, num_bytes=version.size):
            content = self._source.fetch_all(path)
            self._confirm(version, path, len(content), version.size)
        self._store(blocks, memoryview(content), 0)
        return content

    def _store(self, blocks: list[Block], data: memoryview, start: int) -> None:
        for block in blocks:
            begin = block.start - start
            self._cache.store(block, data[begin : begin + block.num_bytes])

    def _confirm(self, version: Version, path: str, end: int, wanted_end: int) -> None:
        """Check that what was just fetched is of this version, and all of what was asked for."""
        if self._look_up(path) != version:
            raise _ReplacedError(version.url)
        if end != wanted_end:
            raise Corrupt(version.url, f"bytes up to {wanted_end} wanted, the server sent them up to {end}")


class OneVersion:
    """One version of one object, for ``storage.range_file.open_ranges``."""

    def __init__(self, reader: CacheReader, version: Version) -> None:
        self._reader = reader
        self._version = version

    def stat(self, path: str) -> FileStat:
        """As it was when opened."""
        return FileStat(path=path, size=self._version.size, etag=self._version.etag)

    def read_range(self, wanted: RangeRead) -> int:
        """Of this version only.

        Raises:
            Corrupt: It was replaced, and not all of the range was cached.
        """
        return self._reader.read_pinned(self._version, wanted.path, wanted.start, wanted.into)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As the source does."""
        return self._reader.classify(error, path)
