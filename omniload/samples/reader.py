"""What the two ways from blocks to samples have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from omniload.payload import Payload
from omniload.samples.buffer import Buffer
from omniload.samples.run import Found, Rows


class Block(Protocol):
    """A block that was loaded."""

    @property
    def num_rows(self) -> int:
        """Rows in the block."""

    @property
    def num_bytes(self) -> int:
        """Host memory held."""

    @property
    def row_ids(self) -> np.ndarray:
        """``int64[rows]``: identities of the rows in their file."""


B = TypeVar("B", bound=Block)


class SampleReader(Protocol[B]):
    """Finds samples in the rows of blocks and keeps them until they are fetched.

    Why: stored token ids are referred to by the run, without an object per document; everything else is made row by
    row. Implementations: `PretokenisedReader`, `PreparingReader`. Left out: order, split, cutting, addresses.
    """

    @property
    def buffer(self) -> Buffer[Any, Any]:
        """What is kept."""

    def load(self, file: int, block: int) -> B:
        """Read a block.

        Raises:
            CorruptSource: it cannot be read.
        """

    def run_rows(self, num_rows: int, num_bytes: int) -> int:
        """How many positions to look at together in a window of this size."""

    def find(
        self, epoch: int, addresses: Sequence[tuple[int, int]], blocks: Sequence[B], rows: Rows
    ) -> Found:
        """The samples of some rows of blocks; pure in the bytes of the rows, the epoch and the addresses."""

    def hold(
        self,
        epoch: int,
        addresses: Sequence[tuple[int, int]],
        blocks: Sequence[B],
        rows: Rows,
        found: Found,
        pieces_of: np.ndarray,
    ) -> None:
        """Keep the samples found, each until its ``pieces_of`` pieces are released."""

    def fetch(
        self, pieces: np.ndarray, bounds: np.ndarray, current: Sequence[B | None], longest: int
    ) -> Payload:
        """Payload of ``PIECE[p]``, grouped by epoch and block.

        Args:
            pieces: what to fetch.
            bounds: ``int64[groups + 1]`` of each group.
            current: ``[groups]``: the block of each, if the caller has it loaded.
            longest: samples end after this many tokens.
        """

    def release(self, pieces: np.ndarray) -> None:
        """Say that these pieces, of any blocks, will not be asked for again."""
