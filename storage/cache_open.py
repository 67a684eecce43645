"""Blocks that this process has open, so that what it verified once it need not verify again.

A file of the cache is written before it gets its name and never after; whoever removes one empties it first. A process
verifies the pages that it reads of a block when it first reads them, through a descriptor that it then keeps. Through
that same descriptor a later read takes the bytes by one ``preadv`` and trusts them if a look at the file *afterwards*
shows that it still has a name and was not written since it was opened. So

- a file that a power cut left torn or that decayed while nobody had it open is found out by digest, as is one that
  somebody overwrote or cut short, whenever that was: its time of change differs, and it is verified anew;
- a file that was evicted or replaced is let go of at its next use, and takes no room on the disk before that either,
  because it is empty; one that was removed by somebody else is let go of then too, but takes its room until then;
- what remains is a disk that delivers other bytes than moments ago, without any write, for a page that the system had
  dropped from memory meanwhile. That is found out when the descriptor is made anew: in another process, or when
  ``MAX_OPEN`` other blocks were read since.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from storage.buffers import new_memory
from storage.cache_block import PAGE_BYTES, Block, BlockPart, data_start, read_digests
from storage.local_file import pread_into

__all__ = ["MAX_OPEN", "OPEN_BLOCKS", "OpenBlock", "OpenBlocks"]

MAX_OPEN: Final = 128
"""Descriptors that a process keeps: few against the 1,024 that it may have by default."""

_RUN_BYTES: Final = 4 * PAGE_BYTES
"""Read by one call and then hashed: many enough to make calls rare, few enough to be in the processor's cache still."""

_TOUCH_AFTER_NS: Final = 10**9  # finer than that, the order of last use is not worth a change of the inode


class OpenBlock:
    """The file of one block, open, verified as far as it was read. Safe to use from many threads and after a fork.

    It is closed when nobody refers to it any more, so that no reader ever meets another file under its number.

    Args:
        path: Of the file.
        block: What it should hold.

    Raises:
        OSError: It is not there or cannot be opened.
    """

    __slots__ = ("_data_start", "_digests", "_fd", "_verified", "_written_ns")

    def __init__(self, path: str, block: Block) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._written_ns = os.fstat(self._fd).st_mtime_ns  # before any of it is read
        self._digests = read_digests(self._fd, block)
        self._data_start = data_start(block)
        # Bit i: page i is verified. Threads that set bits at the same time may lose some: verified once more then.
        self._verified = 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, parts: Sequence[BlockPart]) -> bool:
        """Read parts of the block, verify those of its pages that were not, and look at the file afterwards.

        Returns:
            Whether the file is of that block and sound as far as it was read. If not, all of ``into`` is undefined.

        Raises:
            OSError: As ``preadv`` does.
        """
        return all(map(self._read, parts)) and self._is_unchanged()

    def _read(self, part: BlockPart) -> bool:
        begin, num_bytes = part.begin, part.into.nbytes
        pages = (1 << -(-(begin + num_bytes) // PAGE_BYTES)) - (1 << begin // PAGE_BYTES)
        if self._verified & pages == pages:
            return pread_into(self._fd, part.into, self._data_start + begin) == num_bytes
        if not self._read_and_verify(part):
            return False
        # Before the look at the file, without harm: if it was changed, every later look at it will say so too.
        self._verified |= pages
        return True

    def _read_and_verify(self, part: BlockPart) -> bool:
        if self._digests is None:
            return False
        end = part.begin + part.into.nbytes
        for start, stop in _runs(part.begin, end, part.block.num_bytes):
            wanted = part.into[max(start, part.begin) - part.begin : min(stop, end) - part.begin]
            is_whole = wanted.nbytes == stop - start
            view = wanted if is_whole else new_memory(stop - start)
            if pread_into(self._fd, view, self._data_start + start) != view.nbytes:
                return False
            for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)):
                at = page * PAGE_BYTES - start
                if xxhash.xxh3_64_digest(view[at : at + PAGE_BYTES]) != self._digests[page]:
                    return False
            if not is_whole:
                begin = max(start, part.begin) - start
                wanted[:] = view[begin : begin + wanted.nbytes]
        return True

    def _is_unchanged(self) -> bool:
        """Whether the file has a name and was not written, and if so note that it was used."""
        facts = os.fstat(self._fd)
        if not facts.st_nlink or facts.st_mtime_ns != self._written_ns:
            return False
        now_ns = time.time_ns()
        if now_ns - facts.st_atime_ns > _TOUCH_AFTER_NS:
            with suppress(OSError):  # a read-only file system, or another user's file
                os.utime(self._fd, ns=(now_ns, self._written_ns))
        return True


class OpenBlocks:
    """The blocks that were read last, by the paths of their files. Safe to use from many threads.

    Args:
        max_open: Most that are kept. Threads that are reading may have one more each.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._blocks: dict[str, OpenBlock] = {}  # the one used last comes last

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, path: str) -> OpenBlock | None:
        """The block whose file was opened at ``path``, if it is still kept."""
        with self._lock:
            found = self._blocks.pop(path, None)
            if found is not None:
                self._blocks[path] = found
            return found

    def keep(self, path: str, opened: OpenBlock) -> None:
        """Keep a block, and let go of the one that was not used for longest if there are too many."""
        with self._lock:
            self._blocks.pop(path, None)
            self._blocks[path] = opened
            while len(self._blocks) > self._max_open:
                del self._blocks[next(iter(self._blocks))]

    def drop(self, path: str, opened: OpenBlock) -> None:
        """Let go of a block, unless another is kept in its place already."""
        with self._lock:
            if self._blocks.get(path) is opened:
                del self._blocks[path]

    def drop_below(self, directory: str) -> None:
        """Let go of all blocks whose files lie in a directory."""
        with self._lock:
            for path in [path for path in self._blocks if path.startswith(f"{directory}/")]:
                del self._blocks[path]

    def after_fork(self) -> None:
        """Begin anew with the lock, which a thread that a forked child lacks may hold."""
        self._lock = threading.Lock()


OPEN_BLOCKS: Final = OpenBlocks(MAX_OPEN)
"""Those of this process: one bound however many caches it uses, copies that came by pickle included."""

os.register_at_fork(after_in_child=OPEN_BLOCKS.after_fork)


def _runs(begin: int, end: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a block into runs of pages that are wanted whole, and single pages of which a part is wanted."""
    whole_end = end if end == num_bytes else end - end % PAGE_BYTES
    at = begin
    while at < end:
        start = at - at % PAGE_BYTES
        stop = min(start + PAGE_BYTES, num_bytes)
        if start == at < whole_end:
            stop = min(start + _RUN_BYTES, whole_end)
        yield start, stop
        at = stop
