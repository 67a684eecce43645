"""The files of a source: sorted, named relative to their common root, and fingerprinted."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

import storage
from omniload.errors import SourceNotFound
from omniload.sources.protocol import FileEntry
from storage.errors import NotFound

_TAIL_BYTES = 64 << 10
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of one source."""

    store: storage.Store
    """Store rooted at the common parent of all files; the entries' paths are relative to it."""
    files: tuple[FileEntry, ...]
    """Sorted by the bytes of their paths, so that every host has the same order."""
    fingerprint: str
    """Hex digest of paths, sizes and digests; the root is left out, so that a copy on like storage has the same."""


def list_files(
    name: str, patterns: Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> Listing:
    """List the files that match any of ``patterns``; one that matches several is listed once.

    A file's digest is the server's etag where there is one, else a hash of its last 64 KiB: of formats with a footer
    those describe the whole, and a file that grew or was rewritten differs.

    Args:
        name: name of the source, for messages.
        patterns: paths, globs or URLs.
        storage_options: options of the filesystem.

    Raises:
        SourceNotFound: a pattern matches nothing.
    """
    options = dict(storage_options or {})
    found: dict[str, storage.FileStat] = {}
    for pattern in patterns:
        matches = _glob(pattern, options)
        if not matches:
            raise SourceNotFound(f"source '{name}': nothing matches {pattern}; {_nearest(pattern, options)}")
        found.update({match.path: match for match in matches})
    urls = sorted(found, key=str.encode)
    root = _common_parent(urls)
    store = storage.Store(root, storage_options=options)
    paths = [url[len(root) :].lstrip("/") for url in urls]
    tails = _tails(store, [(path, found[url]) for path, url in zip(paths, urls, strict=True)])
    files = tuple(
        FileEntry(path=path, url=url, size=found[url].size, digest=found[url].etag or tails[path])
        for path, url in zip(paths, urls, strict=True)
    )
    listed = "".join(f"{entry.path}\0{entry.size}\0{entry.digest}\0" for entry in files)
    return Listing(store=store, files=files, fingerprint=xxhash.xxh3_128_hexdigest(listed.encode()))


def _tails(store: storage.Store, files: Sequence[tuple[str, storage.FileStat]]) -> dict[str, str]:
    ranges = [(path, max(0, stat.size - _TAIL_BYTES), stat.size) for path, stat in files if not stat.etag]
    digests = {path: xxhash.xxh3_128_hexdigest(b"") for path, _, _ in ranges}
    wanted = [one for one in ranges if one[2] > one[1]]
    for start in range(0, len(wanted), 256):  # bounds what the tails hold in memory to 16 MiB
        batch = wanted[start : start + 256]
        for (path, _, _), data in zip(batch, store.read_ranges(batch), strict=True):
            digests[path] = xxhash.xxh3_128_hexdigest(data)
    return digests


def _glob(pattern: str, options: dict[str, Any]) -> list[storage.FileStat]:
    try:
        return list(storage.glob(pattern, storage_options=options))
    except NotFound:
        return []


def _common_parent(urls: Sequence[str]) -> str:
    scheme, separator, _ = urls[0].rpartition("://")
    prefix = scheme + separator
    parents = [url[len(prefix) :].split("/")[:-1] for url in urls]
    common = parents[0]
    for parent in parents[1:]:
        shared = 0
        while shared < min(len(common), len(parent)) and common[shared] == parent[shared]:
            shared += 1
        common = common[:shared]
    return prefix + ("/".join(common) or ("" if prefix else "/"))


def _nearest(pattern: str, options: dict[str, Any]) -> str:
    """What lies near a pattern that matched nothing: the entries of its closest folder that exists."""
    scheme, separator, rest = pattern.rpartition("://")
    parts = rest.split("/")
    literal = next((i for i, part in enumerate(parts) if _GLOB_CHARACTERS & set(part)), len(parts) - 1)
    for depth in range(literal, 0, -1):
        folder = scheme + separator + ("/".join(parts[:depth]) or "/")
        files = [match.path.rsplit("/", 1)[-1] for match in _glob(f"{folder}/*", options)]
        entries = files + [f"{d}/" for d in storage.Store(folder, storage_options=options).list_dirs()]
        if entries:
            near = difflib.get_close_matches(parts[depth], entries, n=3, cutoff=0.4) or sorted(entries)[:3]
            return f"{folder} holds {len(entries)} entries, nearest: {', '.join(near)}"
    return "its folder is empty or does not exist: correct the path"
