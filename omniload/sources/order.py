"""The order of a source's rows: permuted files, permuted blocks in disjoint windows, permuted rows in a window.

Everything here is a pure function of (seed, source name, epoch) and of the place in the order, in integer arithmetic
of 64 bits: the same on any machine and with any version of any library. No array is longer than a window's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import xxhash

from omniload.sources.protocol import OPEN_END

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ROUNDS = 4

Shuffle: TypeAlias = Literal["none", "window", "global"]
"""``none``: the order of files, blocks and rows as stored; ``window``: rows permuted in windows of permuted blocks of
permuted files; ``global``: rows permuted over all files, of formats whose rows can be read one by one."""


def key64(*parts: int | str) -> int:
    """A 64-bit key from integers and strings; the parts are separated, so ``("a", "bc")`` is not ``("ab", "c")``."""
    return xxhash.xxh3_64_intdigest("".join(f"{type(p).__name__}{len(str(p))}:{p}" for p in parts).encode())


def mix64(key: int, values: np.ndarray) -> np.ndarray:
    """Pseudo-random ``uint64`` for each integer of ``values``; different values never collide under one key.

    The counter-based use of splitmix64 (Steele, Lea, Flood 2014): an odd multiple and a bijective finaliser.
    """
    z = values.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix64_scalar(key: int, value: int) -> int:
    z = (value * _GOLDEN + key) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Feistel:
    """A keyed permutation of ``range(size)``, evaluated at one point in constant time and memory.

    A balanced Feistel network on the next even number of bits, walked along its cycle until it falls inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        size: length of the range, at least 1.
        key: 64-bit key.
    """

    def __init__(self, size: int, key: int) -> None:
        assert size >= 1
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [key64(key, "feistel", r) for r in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Image of ``index``."""
        assert 0 <= index < self._size
        while True:
            left, right = index >> self._half_bits, index & self._half_mask
            for key in self._keys:
                left, right = right, left ^ (_mix64_scalar(key, right) & self._half_mask)
            index = left << self._half_bits | right
            if index < self._size:
                return index

    def of(self, indices: np.ndarray) -> np.ndarray:
        """``int64[n]``: images of ``int64[n]`` indices, as calling it on each gives."""
        images = indices.astype(np.uint64)
        outside = np.arange(len(images))
        bits, mask = np.uint64(self._half_bits), np.uint64(self._half_mask)
        while len(outside):
            left, right = images[outside] >> bits, images[outside] & mask
            for key in self._keys:
                left, right = right, left ^ (mix64(key, right) & mask)
            images[outside] = left << bits | right
            outside = outside[images[outside] >= np.uint64(self._size)]
        return images.astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A run of consecutive blocks of the permuted order, whose rows are permuted together."""

    blocks: tuple[tuple[int, int], ...]
    """(file, block) as stored, in permuted order."""
    next_start: tuple[int, int] | None
    """Where the next window starts, as positions (file, block) in the permuted orders; None: the epoch ends."""
    open_ended: bool = False
    """Whether the epoch ends here, too, if the last block has no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one source."""

    seed: int
    """Seed of the mixture."""
    name: str
    """Name of the source: two sources over the same files differ in order."""
    shuffle: Shuffle
    """How; see `Shuffle`."""
    window_blocks: int
    """Blocks per window."""

    def _permutation(self, size: int, *parts: int | str) -> Callable[[int], int]:
        if self.shuffle == "none":
            return lambda index: index
        return Feistel(size, key64(self.seed, self.name, *parts))

    def window(
        self, epoch: int, file: int, block: int, num_files: int, num_blocks: Callable[[int], int]
    ) -> Window:
        """The window that starts at a place in the permuted orders.

        Args:
            epoch: pass over the source.
            file: position in the permuted order of files.
            block: position in the permuted order of that file's blocks.
            num_files: files of the source.
            num_blocks: blocks of a file as stored; asked only of the files the window touches.
        """
        if self.shuffle == "global":
            return self._of_permuted_rows(epoch, block, num_blocks(epoch))
        blocks: list[tuple[int, int]] = []
        file_order = self._permutation(max(num_files, 1), epoch, "files")
        while file < num_files and len(blocks) < self.window_blocks:
            stored = file_order(file)
            count = num_blocks(stored)
            if count == OPEN_END:
                return self._in_sequence(epoch, block)
            block_order = self._permutation(max(count, 1), epoch, "blocks", stored)
            take = min(self.window_blocks - len(blocks), max(count - block, 0))
            blocks.extend((stored, block_order(position)) for position in range(block, block + take))
            block += take
            if block >= count:
                file, block = file + 1, 0
        return Window(blocks=tuple(blocks), next_start=(file, block) if file < num_files else None)

    def _of_permuted_rows(self, epoch: int, block: int, count: int) -> Window:
        """Of `omniload.sources.shuffled.ShuffledRows`, where an epoch stands in place of a file."""
        end = min(block + self.window_blocks, count)
        return Window(
            blocks=tuple((epoch, one) for one in range(block, end)),
            next_start=(0, end) if end < count else None,
        )

    def _in_sequence(self, epoch: int, block: int) -> Window:
        """Of a source that can only be read from its start: its rows are permuted in windows, if at all."""
        end = block + self.window_blocks
        return Window(
            blocks=tuple((epoch, one) for one in range(block, end)), next_start=(0, end), open_ended=True
        )

    def rows(self, epoch: int, file: int, block: int, size: int) -> np.ndarray | None:
        """Permutation of the rows of the window that starts at (file, block) of the permuted orders.

        Returns:
            ``int64[size]``: stored row (counted over the window's blocks) at each position; None for the identity.
        """
        if self.shuffle != "window":
            return None
        key = key64(self.seed, self.name, epoch, "rows", file, block)
        # No two keys of the sort are equal, so any sorting algorithm gives the same permutation.
        return np.argsort(mix64(key, np.arange(size, dtype=np.uint64)))
