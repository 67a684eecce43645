"""``Store``: a tree of objects at any URL."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from storage.backend import Backend, FileStat, RangeRead
from storage.buffers import Data, as_views, new_memory, num_bytes_of, writable_view
from storage.cache import BlockCache
from storage.cache_backend import CachedBackend, cached_backend
from storage.coalescing import Run
from storage.errors import BadRequest, Corrupt, UnsafePath
from storage.local import LocalBackend
from storage.parallel import run_all
from storage.paths import byte_order, check_object, check_prefix, is_local, join, local_root, normalise_url
from storage.range_jobs import jobs_of
from storage.retry import DEFAULT_POLICY, Retrier, RetryPolicy, num_retries
from storage.retrying import RetryingBackend
from storage.spans import SpanHandle, span
from storage.writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Store"]


class Store:
    """A tree of objects below one URL. Safe to use from many threads.

    Objects are written whole: another reader sees the old object, the new one or none, never a part, whatever
    happens to the writing process. What a call returned from is durable. All paths are relative POSIX paths;
    directories exist only by what lies in them (local directories that became empty are still listed).

    Every operation raises ``StorageError`` subclasses naming the object (see ``storage.errors``), and ``UnsafePath``
    for a path that is absolute, leaves the store or is reserved.

    Args:
        url: A plain path, ``file://``, ``s3://bucket/prefix``, ``memory://`` or any URL that fsspec has a driver for.
        storage_options: Passed to the driver (credentials, endpoint); environment variables such as
            ``AWS_ENDPOINT_URL`` and ``AWS_PROFILE`` count as usual.
        retry: When a request that failed for a reason that passes is repeated, and how long it may take. Stores made
            by ``sub`` share its budget.
        cache: Keeps what is read on a local disk; see ``BlockCache`` for what it promises. None: nothing is kept.

    Raises:
        UnsupportedURL: Unknown scheme (the message says what to install), or a chain of file systems.
        BadRequest: Options or a cache for a local path.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, object] | None = None,
        *,
        retry: RetryPolicy = DEFAULT_POLICY,
        cache: BlockCache | None = None,
    ) -> None:
        self._url = normalise_url(url)
        self._backend = _open_backend(self._url, dict(storage_options or {}), Retrier(retry))
        if cache is not None:
            if is_local(self._url):
                raise BadRequest(f"{self._url}: a cache means nothing for a local path")
            self._backend = cached_backend(cache, self._backend, self._url)

    @property
    def url(self) -> str:
        """Absolute local path, or URL without a trailing slash."""
        return self._url

    def __repr__(self) -> str:
        return f"Store({self._url!r})"

    def read(self, path: str) -> bytes:
        """The whole object."""
        check_object(path)
        with self._operation("read", path) as current:
            data = self._backend.read(path)
            current.annotate(num_bytes=len(data))
            return data

    def read_ranges(
        self, ranges: Sequence[tuple[str, int, int]], into: "Sequence[Buffer] | None" = None
    ) -> list[memoryview]:
        """Read exact byte ranges of any objects, concurrently.

        Args:
            ranges: ``(path, start, end)``, end exclusive, in any order; they may overlap.
            into: One writable C-contiguous buffer of exactly ``end - start`` bytes per range; fresh memory if None.
                After an error their content is undefined.

        Returns:
            Flat byte views of the buffers, in the order of ``ranges``.

        Raises:
            Corrupt: An object ends before a range does; names the object, the range and how far it reaches.
            BadRequest: A malformed range, or buffers that do not fit.
        """
        views = _destinations(ranges, into)
        wanted = [
            RangeRead(path=path, start=start, into=view)
            for (path, start, _), view in zip(ranges, views, strict=True)
            if view.nbytes
        ]
        with span(
            "storage.read_ranges", path=self._url, num_bytes=num_bytes_of(views), num_ranges=len(ranges)
        ) as current:
            if isinstance(self._backend, CachedBackend):
                wanted = self._backend.read_here(wanted)
            jobs = jobs_of(wanted, self._backend.range_bytes, self._backend.ranges_per_call)
            if len(jobs) == 1:
                self._read_job(jobs[0], current)
            else:
                run_all(
                    [partial(self._read_job, job, current) for job in jobs], f"{self._url} (reading ranges)"
                )
        return views

    def write(self, path: str, data: Data) -> None:
        """Store one object whole, atomic and durable, replacing one of that name.

        Args:
            path: Where.
            data: A buffer, or a list of buffers that follow each other; not copied locally.

        Raises:
            NoSpace: Disk or quota full; nothing is left behind and an old object stays.
        """
        check_object(path)
        views = as_views(data)
        with self._operation("write", path, num_bytes=num_bytes_of(views)):
            self._backend.write(path, views)

    def create(self, path: str, data: Data) -> None:
        """Store one object only if there is none of that name, atomic and durable.

        Of any number of concurrent callers in any processes exactly one succeeds. A success whose answer was lost is
        recognised when the request is repeated: on ``s3://`` by a mark in the object's metadata, elsewhere by equal
        content, so that two callers who store the same bytes may then both succeed. After ``Transient``,
        ``Throttled`` or ``Stalled`` the object may be there or not.

        Raises:
            AlreadyExists: There is one; it is untouched.
            Unsupported: This kind of storage cannot do it.
        """
        check_object(path)
        views = as_views(data)
        with self._operation("create", path, num_bytes=num_bytes_of(views)):
            self._backend.create(path, views)

    def writer(self, path: str, header_bytes: int = 0) -> Writer:
        """Begin to stream one object, whose first ``header_bytes`` bytes are given last.

        It replaces an object of that name when closed, and is invisible before.
        """
        check_object(path)
        if header_bytes < 0:
            raise BadRequest(f"header_bytes is {header_bytes}: it must be at least 0")
        with self._operation("writer", path):
            return Writer(self._backend, path, self._full(path), header_bytes)

    def open(self, path: str) -> BinaryIO:
        """A seekable read-only binary file, for libraries that want one."""
        check_object(path)
        with self._operation("open", path):
            return self._backend.open(path)

    def local_path(self, path: str) -> Path | None:
        """Path of an object on this machine's file system, whether or not it exists; None for a remote store."""
        return self._backend.local_path(check_prefix(path))

    def list_dirs(self, prefix: str = "") -> list[str]:
        """Names of the directories directly in a directory, sorted. Empty if there is no such directory."""
        prefix = check_prefix(prefix)
        with self._operation("list_dirs", prefix):
            return sorted(self._backend.list_dirs(prefix), key=byte_order)

    def list(self, prefix: str = "") -> list[FileStat]:
        """All objects below a directory, at any depth, sorted by the bytes of their paths.

        Empty if there is no such directory. Unfinished writes are never listed.
        """
        prefix = check_prefix(prefix)
        with self._operation("list", prefix) as current:
            found = sorted(self._backend.list_objects(prefix), key=lambda one: byte_order(one.path))
            current.annotate(num_objects=len(found))
            return found

    def stat(self, path: str) -> FileStat:
        """Size and tag of one object.

        Raises:
            NotFound: There is none (a directory is none).
        """
        check_object(path)
        with self._operation("stat", path):
            return self._backend.stat(path)

    def exists(self, path: str) -> bool:
        """Whether there is an object of that name; a directory is none. Other failures are raised."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: str) -> None:
        """Remove one object. That there is none is no error, so that a repeated call is none."""
        check_object(path)
        with self._operation("delete", path):
            self._backend.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below a directory, leftovers of killed writers included. Not atomic.

        Delete first whatever object makes the rest meaningful. That there is nothing is no error.

        Raises:
            UnsafePath: The root of the store.
        """
        prefix = check_prefix(prefix)
        if not prefix:
            raise UnsafePath(f"{self._url}: refusing to delete a whole store: name a directory in it")
        with self._operation("delete_tree", prefix):
            self._backend.delete_tree(prefix)

    def sub(self, path: str) -> "Store":
        """The store rooted at a directory of this one. Shares connections; the directory need not exist."""
        path = check_prefix(path)
        below = object.__new__(Store)
        below._url = self._full(path)
        below._backend = self._backend.sub(path)
        return below

    def _full(self, path: str) -> str:
        return join(self._url, path)

    def _read_job(self, job: Sequence[Run], current: SpanHandle) -> None:
        with _counting_retries(current):
            for run in job:
                self._read_run(run)

    def _read_run(self, run: Run) -> None:
        try:
            num_read = self._backend.read_range(run.whole)
        except Exception as error:
            classified = self._backend.classify(error, self._full(run.whole.path))
            if classified is None:
                raise
            try:
                raise classified from error
            finally:
                del classified
        for wanted, num_found in run.deliver(num_read):
            if num_found != wanted.into.nbytes:
                raise Corrupt(
                    self._full(wanted.path),
                    f"bytes {wanted.start}..{wanted.end} wanted, the object ends at {wanted.start + num_found}"
                    if num_found
                    else f"bytes {wanted.start}..{wanted.end} wanted, the object ends before them",
                )

    @contextmanager
    def _operation(self, name: str, path: str, **attributes: object) -> Iterator[SpanHandle]:
        """A span around one operation on one object, with errors classified."""
        full = self._full(path)
        with span(f"storage.{name}", path=full, **attributes) as current:
            try:
                with _counting_retries(current):
                    yield current
            except Exception as error:
                classified = self._backend.classify(error, full)
                if classified is None or classified is error:
                    raise
                try:
                    raise classified from error
                finally:
                    del classified


@contextmanager
def _counting_retries(current: SpanHandle) -> Iterator[None]:
    """Add to a span the retries that this thread makes."""
    before = num_retries()
    try:
        yield
    finally:
        if num := num_retries() - before:
            current.count(num_retries=num)


def _open_backend(url: str, storage_options: dict[str, object], retrier: Retrier) -> Backend:
    if is_local(url):
        if storage_options:
            raise BadRequest(
                f"{url}: storage_options {sorted(storage_options)} mean nothing for a local path"
            )
        return RetryingBackend(LocalBackend(local_root(url)), url, retrier)
    from storage.remote import open_remote  # drivers load only when a remote URL is used

    return open_remote(url, storage_options, retrier)


def _destinations(
    ranges: Sequence[tuple[str, int, int]], into: "Sequence[Buffer] | None"
) -> "list[memoryview]":
    if into is not None and len(into) != len(ranges):
        raise BadRequest(f"{len(into)} buffers for {len(ranges)} ranges: give one each")
    views = []
    for index, (path, start, end) in enumerate(ranges):
        check_object(path)
        if not 0 <= start <= end:
            raise BadRequest(f"range {start}..{end} of {path!r}: 0 <= start <= end must hold")
        buffer = new_memory(end - start) if into is None else into[index]
        views.append(writable_view(buffer, end - start))
    return views
