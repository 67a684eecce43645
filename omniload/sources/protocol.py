"""What the loader asks of a dataset: a list of files, each a list of blocks, each a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from omniload.lazy import lazy

OPEN_END = 2**32
"""Number of blocks of a source whose end is found by reading; see `Source.num_blocks`."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a source."""

    path: str
    """Path relative to the source's root: the name that order, split and fingerprint depend on."""
    url: str
    """Full path or URL, for messages."""
    size: int
    """Bytes."""
    find_digest: Callable[[], str] = field(repr=False, compare=False)
    """Finds `digest`."""

    @lazy
    def digest(self) -> str:
        """The server's etag, or a digest of the last bytes, read when asked for; may be empty where files are many."""
        return self.find_digest()

    @property
    def content(self) -> str:
        """What tells the file from others whatever its name; rows are held out by it."""
        return f"{self.size}-{self.digest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """Stands for a row whose bytes cannot be read as a row."""

    reason: str
    """What is wrong with it, one line."""


Row: TypeAlias = dict[str, Any]


class RawBlock(Protocol):
    """The rows of one block, as stored.

    Implemented by `omniload.sources.table.TableBlock` (columns) and `omniload.sources.lines.LineBlock` (lines, parsed
    when asked for). Row numbers are positions in the block.
    """

    @property
    def num_rows(self) -> int:
        """Rows in the block."""

    @property
    def row_ids(self) -> np.ndarray:
        """``int64[num_rows]``: what identifies each row in its file, whatever the blocks are."""

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""

    @property
    def table(self) -> pa.Table | None:
        """The rows as columns, if they are stored so."""

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` as dicts, which the caller may change."""


class Source(Protocol):
    """A reader of one dataset, in the order of its files and blocks.

    Why: the order of the rows (`omniload.sources.order`), the split and the samples are the same for every format,
    so that a format only has to say how its bytes fall into files, blocks and rows. Implementations: the readers in
    `omniload.sources.formats`, those of installed packages, of torch datasets (`omniload.sources.torch_open`), and
    `omniload.sources.memory.InMemorySource`, the shipped fake. Left out: shuffling, decoding, buffering.

    Guarantees asked for: everything is a pure function of the files' bytes; nothing is read before it is needed, so
    that start-up does not depend on the number of rows; host memory is bounded by one block. An implementation need
    not be thread-safe.
    """

    @property
    def name(self) -> str:
        """Name of the source in the mixture."""

    @property
    def files(self) -> Sequence[FileEntry]:
        """The files in byte order of their paths."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on; a copy on like storage has the same."""

    def num_blocks(self, file: int) -> int:
        """Blocks of a file; reads at most the file's own index.

        `OPEN_END` says that the rows come in sequence and their end is found by reading. There is one file then, in
        whose place addresses have the number of an epoch, and blocks without rows lie behind the end.
        """

    def schema(self, file: int) -> pa.Schema | None:
        """Columns of a file, exact if its blocks are tables, else the keys of its first rows; None if it has none."""

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RawBlock:
        """Read one block, if possible only some of its columns.

        Raises:
            CorruptSource: the file is not what it claims to be.
        """

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: as ``read_block(file, block).row_ids``, for less."""

    def close(self) -> None:
        """Let go of open files; the source can still be used."""
