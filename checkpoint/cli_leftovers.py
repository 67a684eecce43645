"""What saves that never committed left in a folder of checkpoints.

A save writes below ``data/<attempt>`` and shows nothing until the manifest names that attempt; one that was killed
leaves its attempt behind, and locally perhaps an unfinished manifest under a hidden name. Nothing on disk says whether
the writer still lives, and attempts are named at random. So the rule is one of silence:

- What the manifest names is never touched: its attempt, and the one that it replaced, which may still be being read.
- Everything else is left over once nothing in it has changed for :data:`SILENCE_S`. A save that lives is silent for a
  few time-outs at most, those of the save before it included (``timeout_s``: 10 minutes unless set), plus the time that
  a file takes. What counts is when the file system saw a change, which a copy that keeps modification times cannot set
  back.
- Where the storage tells no such time (all but local files), nothing counts as left over unless the caller knows that
  nobody saves there.
- What is doubtful stays: below a manifest that cannot be read, or with files in it that no save writes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoint.errors import CheckpointError, NotACheckpoint
from checkpoint.format.manifest import MANIFEST, METADATA_FILES, read_manifest
from checkpoint.format.payload import is_file_name
from storage import Store
from storage.errors import classify
from storage.paths import is_hidden
from storage.tree import MARKER as TREE_MARKER
from storage.tree import remove_attempt

SILENCE_S: Final = 24 * 3600.0
"""How long nothing may have changed in what counts as left over, seconds."""

_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """An attempt that no manifest names, or a file that was to become a manifest.

    Attributes:
        folder: Where it lies: name of a checkpoint's directory in the folder; empty for the folder itself.
        name: What it is there: ``data/<attempt>`` or the hidden name of a file.
        num_files: Files in it, unfinished ones included where they can be seen.
        num_bytes: Their size.
        silence_s: How long nothing has changed in it, seconds; None where the storage does not tell.
        kept: Why it must stay; None if it may go.
    """

    folder: str
    name: str
    num_files: int
    num_bytes: int
    silence_s: float | None
    kept: str | None

    @property
    def path(self) -> str:
        """Relative to the folder that was searched."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    names: frozenset[str]
    num_bytes: int
    changed: float | None  # seconds since the epoch


def find_leftovers(root: Store, now: float, *, nobody_saves: bool = False) -> list[Leftover]:
    """Look for what was left in a folder of checkpoints, and in the folder itself if it is one; nothing is changed.

    Args:
        root: The folder.
        now: Seconds since the epoch.
        nobody_saves: Nobody saves, copies or deletes there: how long something has been silent then does not matter.

    Raises:
        NotACheckpoint: No such folder.
        StorageError: It could not be searched.
    """
    folders = [name for name in root.list_dirs() if not _is_link(root, name)]
    local = root.local_path("")
    exists = bool(folders or root.exists(MANIFEST)) if local is None else local.is_dir()
    if not exists:
        raise NotACheckpoint(f"{root.url}: no such folder of checkpoints; check the path")
    return [
        found
        for folder in ("", *folders)
        for found in _in_folder(root, folder, now, nobody_saves=nobody_saves)
    ]


def remove_leftover(root: Store, leftover: Leftover) -> None:
    """Remove what :func:`find_leftovers` found, unless it has been committed since.

    Raises:
        CheckpointError: What is committed in its folder can no longer be read.
        StorageError: It could not be removed.
    """
    assert leftover.kept is None
    store = root.sub(leftover.folder)
    attempt = leftover.name.removeprefix("data/")
    if attempt == leftover.name:
        directory = store.local_path("")
        assert directory is not None
        with _os_errors(directory / leftover.name):
            (directory / leftover.name).unlink(missing_ok=True)
    elif attempt not in _named(store):
        remove_attempt(store, attempt)


def _in_folder(root: Store, folder: str, now: float, *, nobody_saves: bool) -> Iterator[Leftover]:
    store = root.sub(folder)
    if _is_link(store, "data"):
        return
    attempts = [
        name
        for name in store.list_dirs("data")
        if _ATTEMPT.fullmatch(name) and not _is_link(store, f"data/{name}")
    ]
    # Looked at before the manifest: whatever is committed in between is then seen to be.
    found = {f"data/{attempt}": _contents(store, f"data/{attempt}") for attempt in attempts}
    if attempts or store.exists(MANIFEST):
        found |= _hidden_files(store)
    if not found:
        return
    doubt = None
    named: frozenset[str] = frozenset()
    try:
        named = _named(store)
    except CheckpointError as error:
        doubt = f"the manifest beside it cannot be read ({error})"
    if store.exists(TREE_MARKER):
        doubt = f"{TREE_MARKER} beside it says that this is no checkpoint"
    for name, contents in found.items():
        if name.removeprefix("data/") in named:
            continue
        silence_s = None if contents.changed is None else now - contents.changed
        yield Leftover(
            folder=folder,
            name=name,
            num_files=len(contents.names),
            num_bytes=contents.num_bytes,
            silence_s=silence_s,
            kept=doubt or _foreign(contents) or (None if nobody_saves else _may_live(silence_s)),
        )


def _named(store: Store) -> frozenset[str]:
    """Attempts that the manifest names."""
    try:
        manifest, _ = read_manifest(store)
    except NotACheckpoint:
        return frozenset()
    return frozenset({manifest.attempt, *([manifest.replaces] if manifest.replaces else [])})


def _foreign(contents: _Contents) -> str | None:
    for name in sorted(contents.names):
        if not (is_file_name(name) or name in METADATA_FILES or is_hidden(name)):
            return f"{name!r} in it is not of a save"
    return None


def _may_live(silence_s: float | None) -> str | None:
    if silence_s is None:
        return "the storage does not tell when it was last written to"
    return None if silence_s > SILENCE_S else "a save may be at work on it"


def _contents(store: Store, prefix: str) -> _Contents:
    local = store.local_path(prefix)
    if local is None:
        files = store.list(prefix)
        return _Contents(
            names=frozenset(file.path.removeprefix(f"{prefix}/") for file in files),
            num_bytes=sum(file.size for file in files),
            changed=None,
        )
    entries = _entries(local)
    return _Contents(
        names=frozenset(entries.keys() - {"."}),
        num_bytes=sum(entry.st_size for name, entry in entries.items() if name != "."),
        changed=max(map(_changed, entries.values()), default=0.0),
    )


def _hidden_files(store: Store) -> dict[str, _Contents]:
    """Unfinished files directly in a folder, by name; other storage than local files has none."""
    local = store.local_path("")
    if local is None:
        return {}
    return {
        name: _Contents(names=frozenset({name}), num_bytes=entry.st_size, changed=_changed(entry))
        for name, entry in _entries(local).items()
        if is_hidden(name) and stat.S_ISREG(entry.st_mode)
    }


def _entries(directory: Path) -> dict[str, os.stat_result]:
    """A directory, as ``.``, and what lies in it, hidden names too; nothing if it is gone by now."""
    found = {}
    with _os_errors(directory), suppress(FileNotFoundError):
        found["."] = directory.lstat()
        for path in directory.iterdir():
            with suppress(FileNotFoundError):
                found[path.name] = path.lstat()
    return found


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        classified = classify(error, str(path))
        assert classified is not None
        raise classified from error


def _changed(entry: os.stat_result) -> float:
    return max(entry.st_mtime, entry.st_ctime)


def _is_link(store: Store, prefix: str) -> bool:
    local = store.local_path(prefix)
    return local is not None and local.is_symlink()
