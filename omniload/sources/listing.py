"""The files of a source: sorted, named relative to their common root, and fingerprinted."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

import storage
from omniload.errors import MixtureError, SourceNotFound
from omniload.lazy import lazy
from omniload.sources.formats import Format, format_of, formats, named
from omniload.sources.paths import Named, find
from omniload.sources.protocol import FileEntry

_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of one source."""

    store: storage.Store
    """Store rooted at the common parent of all files; the entries' paths are relative to it."""
    files: tuple[FileEntry, ...]
    """Sorted by the bytes of their paths, so that every host has the same order."""
    companions: Mapping[str, FileEntry]
    """By path: the files that belong to those (`Format.companions`)."""
    also: str = ""
    """What else the rows depend on; part of the fingerprint."""

    @lazy
    def fingerprint(self) -> str:
        """Hex digest of paths, sizes and digests of files and companions, and of ``also``.

        The root is left out, so that a copy on like storage has the same. Reads the end of every file that has no
        etag, so it is not found before it is asked for.
        """
        entries = (*self.files, *self.companions.values())
        listed = "".join(f"{entry.path}\0{entry.size}\0{entry.digest}\0" for entry in entries)
        return xxhash.xxh3_128_hexdigest(f"{listed}{self.also}".encode())


def list_files(
    name: str,
    paths: Sequence[str],
    storage_options: Mapping[str, Any] | None = None,
    format_name: str | None = None,
) -> tuple[str, Listing]:
    """List the files that ``paths`` name and tell their format; one that several name is listed once.

    A path is a file, a glob (``*``, ``**``, ``?``, ``[...]``), a glob with braces (``x-{000000..000099}.tar``, of which
    every alternative must be there), or a folder, of which all data files below it are meant.

    A file's digest is the server's etag where there is one, else a hash of its last 64 KiB: of formats with a footer
    those describe the whole, and a file that grew or was rewritten differs. Of files that may be too many to open
    (`Format.known_by_size`) it is empty where there is no etag.

    Args:
        name: name of the source, for messages.
        paths: paths or URLs.
        storage_options: options of the filesystem.
        format_name: the format, if it is not to be told from the names.

    Returns:
        Name of the format, and the files.

    Raises:
        SourceNotFound: a path names nothing.
        MixtureError: the format cannot be told, or is not known.
    """
    where, options = f"source '{name}'", dict(storage_options or {})
    found: dict[str, storage.FileStat] = {}
    beside: dict[str, storage.FileStat] = {}
    for path in paths:
        matched = find(path, options, where)
        format_name = format_name or _format_of(matched, where)
        own = {file.path: file for file in _files_of(matched, format_name, options, where)}
        found.update(own)
        beside.update(_companions(own, matched, named(format_name, where), options, where))
    assert format_name is not None, "a source has a path"
    root = _common_parent(sorted(found, key=str.encode))
    store = storage.Store(root, storage_options=options)
    files = _entries(store, root, found, named(format_name, where).known_by_size)
    below = {url: file for url, file in beside.items() if url.startswith(f"{root.rstrip('/')}/")}
    companions = _entries(store, root, below)
    by_path = {entry.path: entry for entry in companions}
    return format_name, Listing(store=store, files=files, companions=by_path)


def _format_of(matched: Named, where: str) -> str:
    if matched.folder:
        for format_name, one in formats().items():
            if matched.top.intersection(one.markers):
                return format_name
    try:
        return format_of([file.path for file in matched.files], of_folder=bool(matched.folder))
    except MixtureError as error:
        raise MixtureError(f"{where}: {error}") from None


def _files_of(
    matched: Named, format_name: str, options: dict[str, Any], where: str
) -> list[storage.FileStat]:
    """The files to read: one that is named whatever its name, of a folder and beside companions only own ones."""
    chosen = named(format_name, where)
    own = [file for file in matched.files if chosen.match(file.path)]
    if chosen.speaks_for_folder and matched.folder:
        own = [file for file in own if file.path.rpartition("/")[0] == matched.folder] or own
    if matched.folder and chosen.leaves_out:
        folder, start = storage.Store(matched.folder, storage_options=options), len(matched.folder) + 1
        out = chosen.left_out(folder, [file.path[start:] for file in matched.files], where)
        own = [file for file in own if file.path[start:] not in out]
    if not matched.folder and (own or not chosen.companions):
        return [file for file in matched.files if not file.path.lower().endswith(chosen.companions)]
    if not own:
        raise SourceNotFound(
            f"{where}: no file of format '{format_name}' in {matched.folder or matched.files[0].path}, which holds"
            f" {matched.files[0].path}; correct path or format"
        )
    return own


def _companions(
    own: Mapping[str, storage.FileStat],
    matched: Named,
    chosen: Format,
    options: dict[str, Any],
    where: str,
) -> dict[str, storage.FileStat]:
    """The files that belong to some: of those in the folder, or of those beside them if they were named one by one."""
    if not chosen.companions:
        return {}
    files = matched.files
    if not matched.folder:
        folders = sorted({path.rpartition("/")[0] for path in own})
        depth = "**/*" if chosen.speaks_for_folder else "*"
        files = [
            file
            for folder in folders
            for file in storage.glob(f"{glob.escape(folder)}/{depth}", storage_options=options)
        ]
    by_stem = [ending for ending in chosen.endings if ending.startswith(".")]
    found: dict[str, storage.FileStat] = {}
    for file in files:
        companion = next((one for one in chosen.companions if file.path.lower().endswith(one)), None)
        if companion is not None:
            stem = file.path[: -len(companion)]
            if not by_stem or any(stem + ending in own for ending in by_stem):
                found[file.path] = file
    for file in () if matched.folder else matched.files:
        if file.path.lower().endswith(chosen.companions) and file.path not in found:
            raise SourceNotFound(
                f"{where}: {file.path} has no {' or '.join(chosen.endings)} beside it; copy that there too, or leave it"
                " out of the path"
            )
    return found


def _entries(
    store: storage.Store,
    root: str,
    found: Mapping[str, storage.FileStat],
    known_by_size: tuple[str, ...] = (),
) -> tuple[FileEntry, ...]:
    """Files sorted and named relative to the root, below which they are."""
    relative = {url[len(root) :].lstrip("/"): url for url in sorted(found, key=str.encode)}
    return tuple(
        FileEntry(
            path=path,
            url=url,
            size=found[url].size,
            find_digest=_digest_of(store, path, found[url], known_by_size),
        )
        for path, url in relative.items()
    )


def _digest_of(
    store: storage.Store, path: str, stat: storage.FileStat, known_by_size: tuple[str, ...]
) -> Callable[[], str]:
    if stat.etag or path.lower().endswith(known_by_size):
        return partial(str, stat.etag or "")
    return partial(_tail_digest, store, path, stat.size)


def _tail_digest(store: storage.Store, path: str, size: int) -> str:
    tail = store.read_ranges([(path, max(0, size - _TAIL_BYTES), size)])[0] if size else b""
    return xxhash.xxh3_128_hexdigest(tail)


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
