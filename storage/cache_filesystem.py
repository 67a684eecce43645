"""An fsspec file system that reads through a ``BlockCache``, for libraries that take one."""

from functools import partial
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem

from storage.buffers import new_memory
from storage.cache import BlockCache
from storage.cache_block import Version
from storage.cache_reader import CacheReader, OneVersion, strong_tag
from storage.errors import StorageError, classify
from storage.parallel import run_all
from storage.range_file import open_ranges

__all__ = ["CachedFileSystem"]

_TAGS = ("ETag", "etag", "generation", "blob_id")
"""Keys under which drivers report a tag of the content. Times are none: two writes may share one."""


class CachedFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Another fsspec file system, read through a cache; all else is passed on to it.

    Files for which it reports a tag (``ETag``, ``etag``, ``generation``, ``blob_id``) are cached, others read from it
    every time. What is changed through this object is noticed at once, what others do within the ``recheck_s`` of
    the cache. A file that is open for reading shows one version, or raises ``Corrupt`` when that is gone.

    It is synchronous, and may be pickled if ``fs`` may.

    Args:
        fs: The file system, for example ``s3fs.S3FileSystem(...)``.
        cache: Where blocks are kept.
    """

    cachable = False  # instances are told apart by their arguments, and those of this one have no stable text

    def __init__(self, fs: AbstractFileSystem, cache: BlockCache) -> None:
        super().__init__(fs, cache)
        self.fs = fs
        self.protocol = fs.protocol
        self.root_marker = fs.root_marker
        self.sep = fs.sep
        # Class methods in fsspec, so that the base class calls them on itself.
        self._strip_protocol = fs._strip_protocol
        self._parent = fs._parent
        self._reader = CacheReader(cache, _FileSystemSource(fs))

    def __repr__(self) -> str:
        return f"CachedFileSystem({type(self.fs).__name__})"

    # -- reading, through the cache

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> BinaryIO:
        if mode != "rb":
            self._reader.never_trust(path)
            return self.fs.open(path, mode, **kwargs)  # type: ignore[no-any-return]
        version = self._reader.version(path)
        if version is None:
            return self.fs.open(path, mode, **kwargs)  # type: ignore[no-any-return]
        return open_ranges(OneVersion(self._reader, version), path, version.url)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """All of a file or a slice of it; bounds as in Python."""
        path = self._strip_protocol(path)
        version = self._reader.version(path)
        if version is None or kwargs:
            return bytes(self.fs.cat_file(path, start=start, end=end, **kwargs))
        if start is None and end is None:
            return self._reader.read_all(path)
        first, stop, _ = slice(start, end).indices(version.size)
        buffer = new_memory(max(0, stop - first))
        num_read = self._reader.read_range(path, first, buffer)
        return bytes(buffer[:num_read])

    def cat_ranges(
        self,
        paths: list[str],
        starts: "list[int | None] | int | None",
        ends: "list[int | None] | int | None",
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Many slices at once; each is its bytes, or with ``on_error="return"`` the exception."""
        firsts = starts if isinstance(starts, list) else [starts] * len(paths)
        stops = ends if isinstance(ends, list) else [ends] * len(paths)
        found: list[Any] = [None] * len(paths)

        def read(index: int, path: str, first: int | None, stop: int | None) -> None:
            try:
                found[index] = self.cat_file(path, first, stop, **kwargs)
            except Exception as error:
                if on_error != "return":
                    raise
                found[index] = error

        wanted = zip(range(len(paths)), paths, firsts, stops, strict=True)
        run_all([partial(read, *one) for one in wanted], f"{len(paths)} ranges")
        return found

    # -- writing, past the cache

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Passed on."""
        self._change(path, self.fs.pipe_file, path, value, mode=mode, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        """Passed on."""
        self._change(rpath, self.fs.put_file, lpath, rpath, **kwargs)

    def put(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self._change(None, self.fs.put, lpath, rpath, *args, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Passed on."""
        self._change(path2, self.fs.cp_file, path1, path2, **kwargs)

    def copy(self, path1: Any, path2: Any, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self._change(None, self.fs.copy, path1, path2, *args, **kwargs)

    def mv(self, path1: str, path2: str, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self._change(None, self.fs.mv, path1, path2, *args, **kwargs)

    def touch(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self._change(path, self.fs.touch, path, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        """Passed on."""
        self._change(path, self.fs.rm_file, path)

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self._change(None, self.fs.rm, path, *args, **kwargs)

    def mkdir(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self.fs.mkdir(path, *args, **kwargs)

    def makedirs(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Passed on."""
        self.fs.makedirs(path, *args, **kwargs)

    def rmdir(self, path: str) -> None:
        """Passed on."""
        self._change(None, self.fs.rmdir, path)

    # -- names and facts

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Passed on."""
        return self.fs.ls(path, detail=detail, **kwargs)  # type: ignore[no-any-return]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Passed on."""
        return self.fs.info(path, **kwargs)  # type: ignore[no-any-return]

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Passed on."""
        return self.fs.find(path, *args, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Passed on."""
        return bool(self.fs.exists(path, **kwargs))

    def isdir(self, path: str) -> bool:
        """Passed on."""
        return bool(self.fs.isdir(path))

    def isfile(self, path: str) -> bool:
        """Passed on."""
        return bool(self.fs.isfile(path))

    def created(self, path: str) -> Any:
        """Passed on."""
        return self.fs.created(path)

    def modified(self, path: str) -> Any:
        """Passed on."""
        return self.fs.modified(path)

    def ukey(self, path: str) -> Any:
        """Passed on."""
        return self.fs.ukey(path)

    def checksum(self, path: str) -> Any:
        """Passed on."""
        return self.fs.checksum(path)

    def sign(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Passed on."""
        return self.fs.sign(path, *args, **kwargs)

    def unstrip_protocol(self, name: str) -> str:
        """Passed on."""
        return str(self.fs.unstrip_protocol(name))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Ask for versions and listings again; blocks stay, as they are bound to versions."""
        self._reader.forget(None if path is None else self._strip_protocol(path))
        self.fs.invalidate_cache(path)

    def _change(self, path: str | None, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        finally:
            self._reader.forget(None if path is None else self._strip_protocol(path))


class _FileSystemSource:
    """An fsspec file system as the source of a cache."""

    def __init__(self, fs: AbstractFileSystem) -> None:
        self._fs = fs

    def look_up(self, path: str) -> Version | None:
        self._fs.invalidate_cache(path)  # the driver may remember a listing
        info = self._fs.info(path)
        tag = next((tag for tag in (strong_tag(info.get(key)) for key in _TAGS) if tag), None)
        if tag is None or info["type"] != "file":
            return None
        return Version(url=str(self._fs.unstrip_protocol(path)), etag=tag, size=int(info["size"]))

    def fetch(self, path: str, start: int, into: memoryview) -> int:
        data = self._fs.cat_file(path, start=start, end=start + into.nbytes)
        into[: len(data)] = data
        return len(data)

    def fetch_all(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(path))

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        return classify(error, path)
