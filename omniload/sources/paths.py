"""What the path of a source names: a file, the matches of a glob, the alternatives of braces, or a folder's files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import bracex

import storage
from omniload.errors import SourceNotFound
from omniload.sources.formats import formats
from omniload.sources.sidecar import FOLDER
from storage.errors import NotFound

_GLOB_CHARACTERS = frozenset("*?[")
_MAX_ALTERNATIVES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """What a path names."""

    files: list[storage.FileStat]
    """With full paths or URLs; at least one."""
    folder: str = ""
    """The folder, if the path is one; its files may be of several kinds."""

    @property
    def top(self) -> set[str]:
        """Names of the files that lie directly in the folder."""
        below = (file.path[len(self.folder) :].lstrip("/") for file in self.files)
        return {name for name in below if "/" not in name}


def find(path: str, storage_options: Mapping[str, Any], where: str) -> Named:
    """Find what a path names.

    Of a format whose files may be named without their ending, or by a companion of theirs, those are found too.

    Args:
        path: a file, a glob (``*``, ``**``, ``?``, ``[...]``), a glob with braces (``x-{000..099}.tar``, ``{a,b}``) of
            which every alternative must be there, or a folder; a local path or a URL.
        storage_options: options of the filesystem.
        where: who asks, for the messages.

    Raises:
        SourceNotFound: nothing, or an alternative is missing.
    """
    options = dict(storage_options)
    by_companion, by_stem = _spellings(path)
    for spelling in by_companion:
        with suppress(SourceNotFound):
            return Named(files=[*_find(spelling, options, where).files, *_glob(path, options)])
    try:
        return _find(path, options, where)
    except SourceNotFound:
        for spelling in by_stem:
            with suppress(SourceNotFound):
                return _find(spelling, options, where)
        raise


def _spellings(path: str) -> tuple[list[str], list[str]]:
    """How the files are named that a path means by a companion of theirs, and without their ending."""
    lenient = [one for one in formats().values() if one.without_ending]
    by_companion = [
        path[: -len(companion)] + ending
        for one in lenient
        for companion in one.companions
        for ending in one.endings
        if path.lower().endswith(companion)
    ]
    return by_companion, [path + ending for one in lenient for ending in one.endings]


def _find(path: str, options: dict[str, Any], where: str) -> Named:
    if files := _glob(path, options):
        return Named(files=files)
    if not _GLOB_CHARACTERS & set(path):
        store = storage.Store(path, storage_options=options)
        folder = store.url.rstrip("/")
        if below := _below(store):
            files = [
                storage.FileStat(path=f"{folder}/{file.path}", size=file.size, etag=file.etag)
                for file in below
            ]
            return Named(files=files, folder=folder)
    alternatives = _alternatives(path, where)
    if len(alternatives) > 1:
        return Named(files=_every(path, alternatives, options, where))
    raise SourceNotFound(f"{where}: nothing matches {path}; {_nearest(path, options)}")


def _alternatives(path: str, where: str) -> list[str]:
    if "{" not in path:
        return [path]
    try:
        return bracex.expand(path, limit=_MAX_ALTERNATIVES)
    except bracex.ExpansionLimitException:
        raise SourceNotFound(
            f"{where}: the braces of {path} stand for more than {_MAX_ALTERNATIVES} files; use a glob"
        ) from None


def _every(path: str, alternatives: list[str], options: dict[str, Any], where: str) -> list[storage.FileStat]:
    """The matches of every alternative, by one listing: there may be thousands."""
    first, last = path.index("{"), path.rindex("}")
    wide = f"{path[:first]}*{path[last + 1 :]}"
    plain = [one for one in alternatives if not _GLOB_CHARACTERS & set(one)]
    if len(plain) < len(alternatives) or "/" in path[first:last]:
        listed: list[storage.FileStat] = []
        for one in alternatives:
            if not (matches := _glob(one, options)):
                raise SourceNotFound(
                    f"{where}: nothing matches {one}, one of {path}; {_nearest(one, options)}"
                )
            listed += matches
        return listed
    depth = path.count("/", first) + 1  # what follows the part that is the same for all

    def tail(one: str) -> str:
        return "/".join(one.split("/")[-depth:])

    by_name = {tail(file.path): file for file in _glob(wide, options)}
    missing = [one for one in alternatives if tail(one) not in by_name]
    if missing:
        raise SourceNotFound(
            f"{where}: {len(missing)} of the {len(alternatives)} files that {path} stands for are missing, the first"
            f" is {missing[0]}; {_nearest(missing[0], options)}"
        )
    return [by_name[tail(one)] for one in alternatives]


def _glob(pattern: str, options: dict[str, Any]) -> list[storage.FileStat]:
    try:
        found = storage.glob(pattern, storage_options=options)
    except NotFound:
        return []
    ours = f"/{FOLDER}/"  # indices that we keep beside data
    return [file for file in found if ours not in file.path or ours in pattern]


def _below(store: storage.Store) -> list[storage.FileStat]:
    try:
        listed = store.list()
    except (NotFound, NotADirectoryError):
        return []
    # As a glob leaves them out too: caches, checksums and the like of other tools.
    return [file for file in listed if not any(part.startswith(".") for part in file.path.split("/"))]


def _nearest(pattern: str, options: dict[str, Any]) -> str:
    """What lies near a pattern that matched nothing: the entries of its closest folder that exists."""
    scheme, separator, rest = pattern.rpartition("://")
    parts = rest.split("/")
    literal = next((i for i, part in enumerate(parts) if _GLOB_CHARACTERS & set(part)), len(parts) - 1)
    is_relative = not separator and parts[0] != ""
    for depth in range(literal, -1 if is_relative else 0, -1):
        folder = scheme + separator + ("/".join(parts[:depth]) or ("." if is_relative else "/"))
        files = [match.path.rsplit("/", 1)[-1] for match in _glob(f"{folder}/*", options)]
        entries = files + [f"{d}/" for d in storage.Store(folder, storage_options=options).list_dirs()]
        if entries:
            near = difflib.get_close_matches(parts[depth], entries, n=3, cutoff=0.4) or sorted(entries)[:3]
            return f"{folder} holds {len(entries)} entries, nearest: {', '.join(near)}"
    return "its folder is empty or does not exist: correct the path"
