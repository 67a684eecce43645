"""Any file system that fsspec has a driver for.

Reading works with all of them. Writing only with those whose objects appear whole: ``pipe_file`` of SFTP, SMB or
WebDAV drivers shows a file while it grows, so they are refused rather than trusted.
"""

import inspect
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from storage.backend import FileStat, RangeRead
from storage.buffers import as_bytes
from storage.errors import StorageError, Unsupported, classify
from storage.paths import join
from storage.range_file import open_ranges

__all__ = ["FsspecBackend"]

_ATOMIC: Final = frozenset({"memory", "gs", "gcs", "az", "abfs", "abfss", "hf"})
"""Protocols whose single upload is seen whole or not at all."""

_EXCLUSIVE: Final = frozenset({"memory", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols that can refuse an upload when the name is taken, if their driver knows ``mode="create"``."""

_memory_lock = (
    threading.Lock()
)  # memory:// is shared by the threads of this process and checks before it stores


class FsspecBackend:
    """Backend over a synchronous fsspec file system.

    Args:
        filesystem: Made by fsspec.
        root: Path in it.
    """

    range_bytes = 8 << 20
    ranges_per_call = 1

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root
        protocol = filesystem.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)

    def read(self, path: str) -> bytes:
        """In one request, or as the driver does it."""
        return bytes(self._filesystem.cat_file(self._full(path)))

    def read_range(self, wanted: RangeRead) -> int:
        """One request; the driver's bytes are copied to the caller's memory."""
        data = self._filesystem.cat_file(self._full(wanted.path), start=wanted.start, end=wanted.end)
        wanted.into[: len(data)] = data
        return len(data)

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """One upload of everything."""
        self._require(_ATOMIC, path, "objects that appear whole")
        self._filesystem.pipe_file(self._full(path), as_bytes(views))

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """One conditional upload."""
        self._require(_EXCLUSIVE, path, "create-if-absent")
        upload = getattr(self._filesystem, "_pipe_file", self._filesystem.pipe_file)
        if "mode" not in inspect.signature(upload).parameters:
            raise Unsupported(
                self._full(path), "this version of the driver has no create-if-absent: update it"
            )
        with _memory_lock:
            self._filesystem.pipe_file(self._full(path), as_bytes(views), mode="create")

    def sink(self, path: str, header_bytes: int) -> "_MemorySink":
        """Collect the object in memory: drivers have no common way to upload the start last."""
        self._require(_ATOMIC, path, "objects that appear whole")
        return _MemorySink(self, path, header_bytes)

    def open(self, path: str) -> BinaryIO:
        """A file that reads ranges."""
        return open_ranges(self, path, self._full(path))

    def list_objects(self, prefix: str) -> list[FileStat]:
        """Freshly listed, whatever the driver had cached."""
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.find(self._full(prefix), detail=True)
        except FileNotFoundError:
            return []
        below = self._full(prefix).rstrip("/") + "/"
        return [
            _stat(join(prefix, name.removeprefix(below)), info)
            for name, info in found.items()
            if info["type"] == "file" and name.startswith(below)
        ]

    def list_dirs(self, prefix: str) -> list[str]:
        """Freshly listed, whatever the driver had cached."""
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(self._full(prefix), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory"]

    def stat(self, path: str) -> FileStat:
        """Size, and tag if the driver gives one."""
        self._filesystem.invalidate_cache()
        info = self._filesystem.info(self._full(path))
        if info["type"] != "file":
            raise FileNotFoundError("is a directory")
        return _stat(path, info)

    def delete(self, path: str) -> None:
        """Remove it if it is there."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._full(path))

    def delete_tree(self, prefix: str) -> None:
        """Whatever the driver does to remove a directory."""
        self._filesystem.invalidate_cache()
        if self._filesystem.isdir(self._full(prefix)):
            self._filesystem.rm(self._full(prefix), recursive=True)

    def sub(self, path: str) -> "FsspecBackend":
        """Another root in the same file system."""
        return FsspecBackend(self._filesystem, self._full(path))

    def local_path(self, path: str) -> Path | None:
        """None."""
        return None

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """By builtin class, errno or HTTP status."""
        return classify(error, path)

    def _full(self, path: str) -> str:
        return join(self._root, path)

    def _require(self, capable: frozenset[str], path: str, guarantee: str) -> None:
        if not self._protocols & capable:
            names = "/".join(sorted(self._protocols))
            raise Unsupported(
                self._full(path), f"{names} does not give {guarantee}: write to {sorted(capable)} or s3"
            )


class _MemorySink:
    """An object collected in memory and uploaded at once."""

    def __init__(self, backend: FsspecBackend, path: str, header_bytes: int) -> None:
        self._backend = backend
        self._path = path
        self._content = bytearray(header_bytes)

    def append(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._content += view

    def commit(self, header: bytes) -> None:
        self._content[: len(header)] = header
        self._backend.write(self._path, [memoryview(self._content)])

    def abort(self) -> None:
        self._content = bytearray()


def _stat(path: str, info: dict[str, Any]) -> FileStat:
    etag = info.get("ETag") or info.get("etag")
    return FileStat(path=path, size=int(info["size"]), etag=str(etag).strip('"') if etag else None)
