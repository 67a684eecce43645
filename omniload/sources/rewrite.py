"""Compressed files written again so that they can be entered in the middle: a frame for each run of whole rows.

What the file holds stays the same to the byte, for any tool, and so do its name and the ids of its rows. Its compressed
bytes and so its fingerprint change: rewrite before a run, not between a run and its resume.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import xxhash

from omniload.errors import CorruptSource
from omniload.sources.compressed import CompressedFiles, compress_frame, decompressed, packing_of
from omniload.sources.frames import MAX_CONTENT_BYTES, encode_frames, find_frames
from omniload.sources.protocol import FileEntry
from omniload.sources.sidecar import beside
from storage import FileStat, Store

FRAME_BYTES = 1 << 20
"""Bytes after which the next row begins a frame."""

Cut: TypeAlias = Callable[[Iterator[bytes]], Iterator[bytes]]
"""Joins and cuts the decompressed chunks of a file to runs of whole rows."""


def is_rewritten(store: Store, entry: FileEntry) -> bool:
    """Whether a compressed file has frames of whole rows already.

    Raises:
        CorruptSource: the table of its frames is damaged.
    """
    packing = packing_of(entry.path)
    assert packing is not None
    return find_frames(store, entry, packing) is not None


def rewrite(store: Store, entry: FileEntry, cut: Cut) -> None:
    """Put a file with frames in the place of a compressed one.

    The new file is written beside the old one, in a folder ``.omniload``, read back and compared with the old one, all
    of it, and only then takes its place: atomically, and with the old one's permissions if it is local. If anything
    goes wrong before, the old one is untouched.

    Args:
        store: holds the file.
        entry: the file.
        cut: says where frames begin.

    Raises:
        CorruptSource: the old file is damaged, has a row that is too long for a frame, or changed meanwhile.
        StorageError: it could not be written.
    """
    before = _version(store, entry)
    new = beside(entry.path, f".rewrite{_ending(entry.path)}")
    try:
        digest = xxhash.xxh3_128()
        _write(store, entry, new, cut(_digesting(decompressed(store, entry), digest)))
        if _digest_of(store, new) != digest.digest():
            raise CorruptSource(
                f"{entry.url}: what was rewritten does not read back the same; it is left as it was"
            )
        if _version(store, entry) != before:
            raise CorruptSource(
                f"{entry.url}: changed while it was rewritten; it is left as it is, try again"
            )
        _move(store, new, entry.path)
    finally:
        store.delete(new)


def cut_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Runs of whole lines of about `FRAME_BYTES`; the last line may have no newline."""
    held = bytearray()
    searched = 0
    for chunk in chunks:
        held += chunk
        while len(held) > FRAME_BYTES:
            end = held.find(b"\n", max(FRAME_BYTES, searched)) + 1
            searched = 0 if end else len(held)
            if not end and len(held) <= MAX_CONTENT_BYTES:
                break
            end = end or len(held)
            yield bytes(held[:end])
            del held[:end]
    if held:
        yield bytes(held)


def cut_at(offsets: Iterable[int]) -> Cut:
    """A function that cuts a file at some of its offsets, which are ascending, and nowhere else."""

    def cut(chunks: Iterator[bytes]) -> Iterator[bytes]:
        held = bytearray()
        start = 0
        wanted = iter(offsets)
        at = next(wanted, None)
        for chunk in chunks:
            held += chunk
            while at is not None and start + len(held) >= at:
                if at > start:
                    yield bytes(held[: at - start])
                    del held[: at - start]
                    start = at
                at = next(wanted, None)
        if held:
            yield bytes(held)

    return cut


def _write(store: Store, entry: FileEntry, path: str, runs: Iterator[bytes]) -> None:
    packing = packing_of(entry.path)
    assert packing is not None
    sizes = []
    with store.writer(path) as writer:
        for run in runs:
            if len(run) > MAX_CONTENT_BYTES:
                raise CorruptSource(
                    f"{entry.url}: has a row of over {MAX_CONTENT_BYTES >> 30} GiB, too long for a frame; it is left"
                    " as it was"
                )
            frame = compress_frame(run, packing)
            writer.write(frame)
            sizes.append((len(frame), len(run)))
        writer.write(encode_frames(sizes, packing))


def _digest_of(store: Store, path: str) -> bytes:
    """Digest of what a rewritten file holds, read by its frames."""
    stat = store.stat(path)
    entry = FileEntry(path=path, url=f"{store.url}/{path}", size=stat.size, find_digest=str)
    files = CompressedFiles(store, [entry])
    digest = xxhash.xxh3_128()
    for block in range(files.num_blocks(0)):
        data, _ = files.read_block(0, block)
        digest.update(data)
    return digest.digest()


def _digesting(chunks: Iterator[bytes], digest: xxhash.xxh3_128) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _version(store: Store, entry: FileEntry) -> tuple[FileStat, int]:
    local = store.local_path(entry.path)
    return store.stat(entry.path), local.stat().st_mtime_ns if local else 0


def _move(store: Store, source: str, target: str) -> None:
    local = store.local_path(source)
    if local is not None:
        destination = store.local_path(target)
        assert destination is not None
        shutil.copymode(destination, local)
        local.replace(destination)
        return
    with store.open(source) as reading, store.writer(target) as writing:
        while chunk := reading.read(FRAME_BYTES):
            writing.write(chunk)


def _ending(path: str) -> str:
    return path[path.rindex(".") :]
