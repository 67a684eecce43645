"""Side-car indices: where the blocks of a file begin, found once by reading its headers, kept beside it or in a cache.

The index of ``data/x.tar`` is ``data/.omniload/x.tar.index``; where that cannot be written, it lies in
``$OMNILOAD_CACHE``, else ``$XDG_CACHE_HOME/omniload``, else ``~/.cache/omniload``. It holds, little-endian:

- ``b"omniidx1"`` and the XXH3-128 of everything after it;
- ``<I`` and as many bytes of UTF-8: the kind of the index, and size, digest and, of a local file, time of the last
  change in ns of the file, separated by NUL;
- ``int64[n]``: ascending offsets in the file.

An index that is damaged, or of another version of the file, is made again. Any number of processes may do so at once:
they write the same, and each file appears whole or not at all.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from omniload.sources.protocol import FileEntry
from storage import NotFound, StorageError, Store

FOLDER = ".omniload"
"""Name of the folders that hold what we keep beside data."""

_MAGIC = b"omniidx1"
_DIGEST_BYTES = 16
_LENGTH = struct.Struct("<I")

logger = logging.getLogger(__name__)


def load_or_build(store: Store, entry: FileEntry, kind: str, build: Callable[[], np.ndarray]) -> np.ndarray:
    """The index of a file: the one kept, else a new one, which is kept if that is possible at all.

    Args:
        store: holds the file.
        entry: the file.
        kind: what the offsets are; changes with whatever makes ``build`` give others.
        build: finds the ``int64[n]`` ascending offsets, all within the file.
    """
    found = load(store, entry, kind)
    if found is None:
        found = build()
        save(store, entry, kind, found)
    return found


def load(store: Store, entry: FileEntry, kind: str) -> np.ndarray | None:
    """The index that is kept; None if there is none of this kind and this version of the file."""
    identity = _identity(store, entry, kind)
    for place, path in _places(store, entry):
        try:
            data = place.read(path)
        except NotFound:
            continue
        except StorageError as error:  # it can do without
            logger.warning("%s; it is made again", error)
            continue
        offsets = _decode(data, identity, entry.size)
        if offsets is not None:
            return offsets
    return None


def save(store: Store, entry: FileEntry, kind: str, offsets: np.ndarray) -> None:
    """Keep an index at the first place that takes it."""
    body = _identity(store, entry, kind) + offsets.astype("<i8").tobytes()
    data = _MAGIC + xxhash.xxh3_128_digest(body) + body
    reasons = []
    for place, path in _places(store, entry):
        try:
            place.write(path, data)
        except StorageError as error:
            reasons.append(str(error))
        else:
            return
    logger.warning("the index of %s is kept nowhere (%s); set OMNILOAD_CACHE", entry.url, "; ".join(reasons))


def beside(path: str, suffix: str) -> str:
    """Where a thing of ours that belongs to a file lies: in a folder of its own, on the same storage."""
    folder, separator, name = path.rpartition("/")
    return f"{folder}{separator}{FOLDER}/{name}{suffix}"


def _places(store: Store, entry: FileEntry) -> Iterator[tuple[Store, str]]:
    yield store, beside(entry.path, ".index")
    chosen = os.environ.get("OMNILOAD_CACHE")
    cache = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "omniload"
    yield Store(cache.expanduser() / "indices"), f"{xxhash.xxh3_128_hexdigest(entry.url.encode())}.index"


def _identity(store: Store, entry: FileEntry, kind: str) -> bytes:
    # The digest of a local file is that of its end, which a file packed again may share.
    local = store.local_path(entry.path)
    changed_ns = local.stat().st_mtime_ns if local is not None else 0
    text = "\0".join((kind, str(entry.size), entry.digest, str(changed_ns))).encode()
    return _LENGTH.pack(len(text)) + text


def _decode(data: bytes, identity: bytes, size: int) -> np.ndarray | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != _MAGIC + xxhash.xxh3_128_digest(body) or not body.startswith(identity):
        return None
    rest = body[len(identity) :]
    if len(rest) % 8:
        return None
    offsets = np.frombuffer(rest, dtype="<i8").astype(np.int64)
    ascending = len(offsets) > 0 and offsets[0] >= 0 and bool((np.diff(offsets) >= 0).all())
    return offsets if ascending and offsets[-1] <= size else None
