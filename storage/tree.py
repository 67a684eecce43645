"""A committed tree: a directory of many files that became visible together, by one object created last.

::

    <tree>/
      commit.json              the marker; that it exists is the commit
      data/<attempt>/...       the files; 32 hex digits that no other attempt ever has

What has no marker does not exist, whatever lies below ``data``. Files of an attempt are never changed, so that two
copies of one attempt differ at most in which files they hold.

``commit.json`` is JSON: ``format``, ``version``, ``attempt``, ``files`` as rows of path, size, xxh3-64 and header size,
and last ``digest``, the xxh3-64 of the marker's own bytes with the 16 digits of the digest replaced by zeros. Digests
detect accidents, not attackers. Other formats may have a marker of their own: for tiers it need only be a JSON object
with a key ``attempt``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import xxhash

from storage.buffers import new_memory
from storage.errors import BadRequest, Corrupt, NotFound
from storage.paths import check_object
from storage.store import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MARKER",
    "CommittedTree",
    "FileDigest",
    "TreeFile",
    "attempt_of",
    "check_tree",
    "chunks",
    "data_dir",
    "encode_marker",
    "read_marker",
    "remove_attempt",
    "verify_tree",
]

MARKER: Final = "commit.json"
"""Name of the marker that ``Transaction`` makes."""

ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")
"""What names an attempt."""

_FORMAT: Final = "omniload.tree"
_VERSION: Final = 1
_MAX_MARKER_BYTES: Final = 256 << 20  # two million files
_ZERO: Final = "0" * 16
_TAIL: Final = re.compile(rb'"digest":"([0-9a-f]{16})"\}\n\Z')
_CHUNK_BYTES: Final = 32 << 20
_NUM_THREADS: Final = 4  # files looked at together; each is read by the shared threads


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeFile:
    """One file of a tree.

    Attributes:
        path: Relative to the files of the tree.
        num_bytes: Size.
        xxh3: As ``FileDigest`` gives it, 16 hex digits.
        header_bytes: How many bytes at its start were written last.
    """

    path: str
    num_bytes: int
    xxh3: str
    header_bytes: int = 0


class FileDigest:
    """xxh3-64 of a file that is seen from its start, or whose header is seen last.

    It is taken over the bytes after the header and then the header: a writer knows them in this order.

    Args:
        header_bytes: Size of the header that the first ``update`` calls bring; 0 for a writer, which brings it last.
    """

    def __init__(self, header_bytes: int = 0) -> None:
        self._hash = xxhash.xxh3_64()
        self._header = bytearray()
        self._header_bytes = header_bytes

    def update(self, data: "Buffer") -> None:
        """Go on with the bytes that follow."""
        view = memoryview(data).cast("B")
        missing = self._header_bytes - len(self._header)
        self._header += view[:missing]
        self._hash.update(view[missing:])

    def hexdigest(self) -> str:
        """16 hex digits, most significant first."""
        whole = self._hash.copy()
        whole.update(self._header)
        return str(whole.hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedTree:
    """A tree as its marker describes it.

    Attributes:
        attempt: 32 hex digits.
        files: The files by path.
        data: Where they lie.
    """

    attempt: str
    files: Mapping[str, TreeFile]
    data: Store

    @classmethod
    def open(cls, store: Store) -> Self:
        """The tree that is committed at ``store``.

        Raises:
            NotFound: Nothing is.
            Corrupt: The marker is damaged or of another format.
        """
        marker = read_marker(store)
        if marker is None:
            raise NotFound(f"{store.url}/{MARKER}", "no marker, so nothing is committed here")
        attempt, files = decode_marker(marker, f"{store.url}/{MARKER}")
        return cls(
            attempt=attempt,
            files={file.path: file for file in files},
            data=store.sub(data_dir(attempt)),
        )

    def read(self, path: str) -> bytes:
        """One whole file, verified.

        Raises:
            NotFound: The tree has no such file.
            Corrupt: It is not as it was when it was committed.
        """
        file = self.files.get(path)
        if file is None:
            raise NotFound(f"{self.data.url}/{path}", "not a file of this tree")
        data = self.data.read(path)
        digest = FileDigest(file.header_bytes)
        digest.update(data)
        self._compare(file, len(data), digest)
        return data

    def check(self) -> None:
        """Check that every file is there with its full size: one listing.

        Raises:
            Corrupt: A file is missing or of another size.
        """
        sizes = {one.path: one.size for one in self.data.list()}
        for file in self.files.values():
            where = f"{self.data.url}/{file.path}"
            if file.path not in sizes:
                raise Corrupt(where, "missing, but committed")
            if sizes[file.path] != file.num_bytes:
                raise Corrupt(where, f"{sizes[file.path]} bytes, {file.num_bytes} were committed")

    def verify(self) -> None:
        """Check size and digest of every file: reads everything.

        Raises:
            Corrupt: As ``check``, or the bytes of a file differ.
        """
        self.check()
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="verify") as pool:
            for _ in pool.map(self._verify_file, self.files.values()):
                pass

    def _verify_file(self, file: TreeFile) -> None:
        digest = FileDigest(file.header_bytes)
        for chunk in chunks(self.data, file.path, file.num_bytes):
            digest.update(chunk)
        self._compare(file, file.num_bytes, digest)

    def _compare(self, file: TreeFile, num_bytes: int, digest: FileDigest) -> None:
        if num_bytes != file.num_bytes or digest.hexdigest() != file.xxh3:
            raise Corrupt(
                f"{self.data.url}/{file.path}", f"{num_bytes} bytes that are not those that were committed"
            )


def check_tree(store: Store) -> None:
    """Check by one listing that the tree at ``store`` is committed and whole; see ``CommittedTree.check``."""
    CommittedTree.open(store).check()


def verify_tree(store: Store) -> None:
    """Check that the tree at ``store`` is committed and every byte of it; see ``CommittedTree.verify``."""
    CommittedTree.open(store).verify()


def data_dir(attempt: str) -> str:
    """Directory of the files of an attempt, relative to the tree."""
    return f"data/{attempt}"


def read_marker(store: Store, marker: str = MARKER) -> bytes | None:
    """The marker of the tree at ``store``; None if nothing is committed there.

    Raises:
        Corrupt: Too large to be one.
    """
    try:
        num_bytes = store.stat(marker).size  # looked at first: a huge object is never read
        if num_bytes > _MAX_MARKER_BYTES:
            raise Corrupt(
                f"{store.url}/{marker}", f"{num_bytes} bytes, a marker has {_MAX_MARKER_BYTES} at most"
            )
        return store.read(marker)
    except NotFound:
        return None


def attempt_of(marker: bytes, where: str) -> str:
    """Which attempt a marker of any format commits.

    Args:
        marker: Its bytes.
        where: Its path or URL, for messages.

    Raises:
        Corrupt: It is no JSON object with an attempt.
    """
    try:
        attempt = json.loads(marker)["attempt"]
        if ATTEMPT.fullmatch(attempt):
            return str(attempt)
    except (ValueError, KeyError, TypeError):
        pass
    raise Corrupt(where, "not a marker: no JSON object whose 'attempt' is 32 hex digits")


def encode_marker(attempt: str, files: Sequence[TreeFile]) -> bytes:
    """The bytes of ``commit.json``.

    Raises:
        BadRequest: So many files that it would be too large.
    """
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "attempt": attempt,
        "files": [[file.path, file.num_bytes, file.xxh3, file.header_bytes] for file in files],
        "digest": _ZERO,
    }
    data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    if len(data) > _MAX_MARKER_BYTES:
        raise BadRequest(
            f"{len(files)} files make a marker of {len(data)} bytes, {_MAX_MARKER_BYTES} are allowed"
        )
    return data.replace(_tail(_ZERO), _tail(xxhash.xxh3_64_hexdigest(data)))


def decode_marker(data: bytes, where: str) -> tuple[str, list[TreeFile]]:
    """Check and decode ``commit.json``.

    Args:
        data: Its bytes.
        where: Its path or URL, for messages.

    Returns:
        The attempt and its files.

    Raises:
        Corrupt: Anything that is wrong with it.
    """
    tail = _TAIL.search(data)
    if tail is None:
        raise Corrupt(where, "not a marker of a tree: it does not end with its digest")
    if (
        xxhash.xxh3_64_hexdigest(data[: tail.start(1)] + _ZERO.encode() + data[tail.end(1) :])
        != tail[1].decode()
    ):
        raise Corrupt(where, "digest does not match its bytes: it was changed after the commit")
    attempt = attempt_of(data, where)
    document = json.loads(data)
    if (document.get("format"), document.get("version")) != (_FORMAT, _VERSION):
        raise Corrupt(where, f"not a marker of {_FORMAT} version {_VERSION}")
    try:
        files = [
            TreeFile(path=check_object(path), num_bytes=num_bytes, xxh3=xxh3, header_bytes=header_bytes)
            for path, num_bytes, xxh3, header_bytes in document["files"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(where, f"malformed: {error}") from error
    return attempt, files


def chunks(store: Store, path: str, num_bytes: int) -> Iterator[memoryview]:
    """The bytes of an object of known size from its start, in views that are good until the next one."""
    buffer = new_memory(min(num_bytes, _CHUNK_BYTES))
    for start in range(0, num_bytes, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, num_bytes)
        yield from store.read_ranges([(path, start, end)], into=[buffer[: end - start]])


def remove_attempt(store: Store, attempt: str) -> None:
    """Remove the files of an attempt that is not, or no longer, committed at ``store``."""
    store.delete_tree(data_dir(attempt))
    for directory in map(store.local_path, ("data", "")):
        # Only a local file system has empty directories, and rmdir takes no other: whoever begins another attempt
        # here at this moment loses nothing.
        if directory is not None:
            with suppress(OSError):
                directory.rmdir()


def _tail(digest: str) -> bytes:
    return f'"digest":"{digest}"}}\n'.encode()
