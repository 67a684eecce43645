"""Copying a committed tree to another store, where it is committed in its turn."""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from storage.backend import FileStat
from storage.errors import AlreadyExists, Corrupt, NotFound
from storage.spans import span
from storage.store import Store
from storage.tree import (
    MARKER,
    FileDigest,
    TreeFile,
    attempt_of,
    chunks,
    data_dir,
    decode_marker,
    read_marker,
)

__all__ = ["Stopped", "copy_tree"]

_NUM_FILES: Final = 4
"""Files copied together. Each is read and written in parallel parts, and holds 32 MiB besides those of its writer."""


class Stopped(CancelledError):
    """A copy was asked to stop. What it had copied stays, uncommitted, for the next one to go on with."""


def copy_tree(
    source: Store,
    target: Store,
    *,
    marker: str = MARKER,
    before_commit: Callable[[], None] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Copy the tree that is committed at ``source`` and commit the copy; repeated, it goes on where it was stopped.

    The copy is visible only when it is whole: every file was stored by an atomic write, a listing of the target shows
    all of them with their sizes, and the marker is created last. With a marker made by ``Transaction`` the digest of
    every file is compared on the way, so that a damaged file is not passed on. Several processes may copy one tree.

    Args:
        source: The tree.
        target: Where its copy goes.
        marker: Name of the marker.
        before_commit: Called when the files are there, before the marker is; what it raises stops the commit.
        stopping: Asked between parts of files.

    Raises:
        NotFound: Nothing is committed at ``source``.
        AlreadyExists: Another attempt is committed at ``target``; it is untouched.
        Corrupt: A file is not as it was committed, or is missing.
        Stopped: ``stopping`` said so.
    """
    content = read_marker(source, marker)
    if content is None:
        raise NotFound(f"{source.url}/{marker}", "no marker, so nothing is committed here")
    attempt = attempt_of(content, f"{source.url}/{marker}")
    if _is_committed(target, marker, attempt):
        return
    listed = _committed_files(content, f"{source.url}/{marker}") if marker == MARKER else {}
    files_from, files_to = source.sub(data_dir(attempt)), target.sub(data_dir(attempt))
    wanted = files_from.list()
    there = {one.path: one.size for one in files_to.list()}
    # An object that is there is whole, and of this attempt: nobody else writes below its directory.
    missing = [one for one in wanted if there.get(one.path) != one.size]

    def copy(file: FileStat) -> None:
        _copy_file(files_from, files_to, file, listed.get(file.path), stopping)

    num_bytes = sum(one.size for one in missing)
    with span("storage.copy_tree", path=target.url, num_bytes=num_bytes, num_files=len(missing)):
        with ThreadPoolExecutor(_NUM_FILES, thread_name_prefix="copy") as pool:
            for _ in pool.map(copy, missing):
                pass
        before_commit()
        _require(
            files_to,
            {one.path: one.size for one in wanted} | {path: one.num_bytes for path, one in listed.items()},
        )
        with suppress(AlreadyExists):  # another process has copied it too, or so it is found out next
            target.create(marker, content)
        if not _is_committed(target, marker, attempt):
            raise NotFound(
                f"{target.url}/{marker}", "the marker that was just created is gone: removed by another?"
            )


def _is_committed(target: Store, marker: str, attempt: str) -> bool:
    """Whether the copy is committed.

    Raises:
        AlreadyExists: Another attempt is.
    """
    content = read_marker(target, marker)
    if content is None:
        return False
    found = attempt_of(content, f"{target.url}/{marker}")
    if found != attempt:
        raise AlreadyExists(f"{target.url}/{marker}", f"attempt {found} is committed here, not {attempt}")
    return True


def _committed_files(content: bytes, where: str) -> Mapping[str, TreeFile]:
    return {file.path: file for file in decode_marker(content, where)[1]}


def _copy_file(
    source: Store, target: Store, file: FileStat, committed: TreeFile | None, stopping: Callable[[], bool]
) -> None:
    digest = FileDigest(committed.header_bytes if committed else 0)
    with target.writer(file.path) as writer:
        for chunk in chunks(source, file.path, file.size):
            if stopping():
                raise Stopped(f"{source.url}: the copy to {target.url} was asked to stop")
            digest.update(chunk)
            writer.write(chunk)
        if committed and (file.size != committed.num_bytes or digest.hexdigest() != committed.xxh3):
            raise Corrupt(
                f"{source.url}/{file.path}", f"{file.size} bytes that are not those that were committed"
            )


def _require(target: Store, sizes: Mapping[str, int]) -> None:
    there = {one.path: one.size for one in target.list()}
    for path, num_bytes in sizes.items():
        if there.get(path) != num_bytes:
            raise Corrupt(
                f"{target.url}/{path}", f"{there.get(path, 'no')} bytes, {num_bytes} were committed"
            )
