"""A bounded cache of remote data on a local disk, shared by the processes of a machine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from storage.cache_block import Block, BlockPart, file_bytes, write_block
from storage.cache_open import OPEN_BLOCKS, OpenBlock
from storage.cache_space import Space
from storage.errors import BadRequest, classify
from storage.file_lock import locked
from storage.spans import span

__all__ = ["BlockCache"]

_FETCH_TIMEOUT_S: Final = 30.0
"""Longest wait for another process that fetches the same block; then it is fetched twice."""


class BlockCache:
    """Blocks of remote objects in a local directory.

    Give one to ``Store(url, cache=...)`` or ``CachedFileSystem``. Any number of them, in any processes of the
    machine, may use one directory: what one has fetched the others read, and their files together never exceed
    ``max_bytes``. When room is wanted, the blocks that were not read for longest go.

    The cache never makes a read fail and never gives wrong bytes. Each block names the exact version of the object
    that it came from, is verified by digest when a process first reads it, and is fetched again if it is missing,
    damaged or unreadable. Killing a process or cutting the power at any time leaves nothing to repair. A full disk or
    a read-only directory only means that blocks are not kept. The directory may be removed at any time.

    Of the blocks read last a process keeps up to 128 files open and does not verify again what it verified through
    them; ``storage.cache_open`` says what that means and why it is safe. ``release`` closes them.

    Args:
        directory: On a local disk; made if missing.
        max_bytes: Bound on what all its files take; at least 16 blocks.
        block_bytes: Bytes fetched and kept at once. Larger blocks mean fewer requests, smaller ones less that nobody
            asked for. Blocks of different sizes share a directory, but not their content.
        recheck_s: How long the version of an object is trusted before the server is asked for it again, in seconds. An
            object that somebody else replaces may be read as it was for that long; 0 asks before every read.

    Raises:
        BadRequest: Sizes that cannot work.
        StorageError: The directory cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int,
        *,
        block_bytes: int = 4 << 20,
        recheck_s: float = 10.0,
    ) -> None:
        if block_bytes < 4096:
            raise BadRequest(f"block_bytes is {block_bytes}: it must be at least 4096")
        if max_bytes < 16 * block_bytes:
            raise BadRequest(
                f"max_bytes is {max_bytes}: it must hold at least 16 blocks of {block_bytes} bytes"
            )
        if recheck_s < 0:
            raise BadRequest(f"recheck_s is {recheck_s}: it must be at least 0 seconds")
        self._root = Path(directory).absolute()
        self._locks = self._root / "locks"
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            classified = classify(error, str(self._root))
            assert classified is not None
            try:
                raise classified from error
            finally:
                del classified
        self._space = Space(self._root, max_bytes)
        self.block_bytes = block_bytes
        self.recheck_s = recheck_s

    def __repr__(self) -> str:
        return f"BlockCache({str(self._root)!r})"

    def num_bytes(self) -> int:
        """Bytes that the files of the cache take now (counts them)."""
        return self._space.count()

    def release(self) -> None:
        """Close the files of the cache that this process has open, for example to unmount its disk.

        The cache stays usable: what is read again is opened and verified again.
        """
        OPEN_BLOCKS.drop_below(str(self._root))

    def load(self, *parts: BlockPart) -> bool:
        """Read parts of one block if it is here and sound; otherwise their memory is undefined."""
        block = parts[0].block
        path = self._space.path(block.name)
        held = OPEN_BLOCKS.get(path)
        if held is not None:
            if _read(held, parts):
                return True
            OPEN_BLOCKS.drop(path, held)  # evicted, replaced or written to
        try:
            opened = OpenBlock(path, block)
        except OSError:
            return False
        if _read(opened, parts):
            OPEN_BLOCKS.keep(path, opened)
            return True
        self._space.remove(block.name)
        return False

    def store(self, block: Block, data: memoryview) -> None:
        """Keep a block if that is possible. ``data`` must be its verified content."""
        # The span notes an error that is not passed on: a cache that cannot be written must not stop the reader.
        with suppress(OSError), span("storage.cache_store", path=block.url, num_bytes=data.nbytes):
            made = self._space.make(file_bytes(block))
            if made is None:
                return
            fd, path = made
            try:
                write_block(fd, block, data)
                self._space.publish(path, block.name)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    @contextmanager
    def fetching(self, block: Block) -> Iterator[None]:
        """Held while a block is fetched and stored, so that others wait for it instead of fetching it too."""
        with suppress(OSError):
            self._locks.mkdir(parents=True, exist_ok=True)
        with locked(self._locks / block.name[:3], _FETCH_TIMEOUT_S):
            yield


def _read(opened: OpenBlock, parts: Sequence[BlockPart]) -> bool:
    num_bytes = sum(part.into.nbytes for part in parts)
    try:
        with span("storage.cache_hit", path=parts[0].block.url, num_bytes=num_bytes) as current:
            if opened.read(parts):
                return True
            current.annotate(usable=False, num_bytes=0)
    except OSError:
        pass  # cannot be read: as good as damaged
    return False
