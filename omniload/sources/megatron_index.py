"""The ``.idx`` of Megatron's indexed datasets: where in the ``.bin`` the tokens of each document lie.

A header of 34 bytes (magic, version, type of the tokens, number of sequences S, number of document bounds D), then
``int32[S]`` tokens of each sequence, ``int64[S]`` byte of the ``.bin`` it starts at, ``int64[D]`` first sequence of
each document, and S at the end, and of multimodal data ``int8[S]`` mode of each sequence, 0 for text. All is
little-endian, as ``megatron.core.datasets.indexed_dataset`` writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.errors import CorruptSource
from omniload.sources.protocol import FileEntry
from omniload.sources.runs import Runs
from storage import Store

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")  # by code, from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Where the tokens of some documents lie; what is here lies inside the ``.bin``."""

    bounds: np.ndarray
    """``int64[n + 1]``: bounds of each document in the tokens of all, which are those of the sequences in order."""
    pointers: np.ndarray
    """``int64[s]``: byte of the ``.bin`` that each sequence starts at."""
    sizes: np.ndarray
    """``int64[s]``: bytes of each sequence."""


class MegatronIndex:
    """One index; read by parts.

    Args:
        store: holds the files.
        entry: the ``.idx``; its header is read.
        tokens: the ``.bin``.

    Raises:
        CorruptSource: no header, or one that the size of the file contradicts.
    """

    def __init__(self, store: Store, entry: FileEntry, tokens: FileEntry) -> None:
        self._store = store
        self._entry = entry
        self._tokens = tokens
        if entry.size < _HEADER.size:
            raise self._corrupt(entry.size, "ends in the header")
        [header] = store.read_ranges([(entry.path, 0, _HEADER.size)])
        magic, version, code, self._num_sequences, num_bounds = _HEADER.unpack(header)
        if magic != _MAGIC or version != 1:
            raise self._corrupt(0, f"starts with {magic!r}, version {version}, not {_MAGIC!r}, version 1")
        if not 0 < code <= len(_DTYPES):
            raise self._corrupt(17, f"{code} is no type of tokens")
        self.dtype: np.dtype[np.generic] = np.dtype(_DTYPES[code - 1])
        """Type of the tokens."""
        self.num_documents: int = num_bounds - 1
        """Documents in the file."""
        self._pointers_at = _HEADER.size + 4 * self._num_sequences
        self._bounds_at = self._pointers_at + 8 * self._num_sequences
        self._modes_at = self._bounds_at + 8 * num_bounds
        if not num_bounds or entry.size - self._modes_at not in (0, self._num_sequences):
            raise self._corrupt(
                18,
                f"{self._num_sequences} sequences and {num_bounds} bounds of documents take {self._modes_at} bytes, not"
                f" {entry.size}",
            )

    def read(self, rows: np.ndarray) -> Documents:
        """Where the tokens of some documents lie; reads only their part of the index.

        Args:
            rows: ``int64[n]`` numbers of the documents, ascending.

        Raises:
            CorruptSource: something lies outside the ``.bin``, or is not text.
        """
        runs = Runs.of(rows)
        starts, ends = runs.starts, runs.ends
        path, at = self._entry.path, self._bounds_at
        wanted = [(path, at + 8 * start, at + 8 * (end + 1)) for start, end in zip(starts, ends, strict=True)]
        if self._num_sequences == self.num_documents:  # as a rule one each: spares a second request
            wanted += self._ranges(starts, ends)
        data = self._store.read_ranges(wanted)
        bounds, of_sequences = [np.frombuffer(one, "<i8") for one in data[: len(starts)]], data[len(starts) :]
        # Few operations where all is as usual: there is a block to be read for each few megabytes.
        one_each = bool(of_sequences) and np.array_equal(_joined(bounds), runs.bounds)
        firsts, lasts = starts, ends
        if not one_each:
            self._check_bounds(runs.bounds, _joined(bounds))
            firsts, lasts = [int(one[0]) for one in bounds], [int(one[-1]) for one in bounds]
        if not of_sequences or (firsts, lasts) != (starts, ends):
            of_sequences = self._store.read_ranges(self._ranges(firsts, lasts))
        lengths, pointers, modes = (
            _joined([np.frombuffer(one, dtype) for one in of_sequences[kind * len(starts) :][: len(starts)]])
            for kind, dtype in enumerate(("<i4", "<i8", "i1"))
        )
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        tokens_before = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=tokens_before[1:])
        self._check_sequences(list(zip(firsts, lasts, strict=True)), pointers, sizes, modes)
        if not one_each:
            before = np.append(0, np.cumsum(np.concatenate([np.diff(one) for one in bounds])))
            tokens_before = tokens_before[before]
        return Documents(bounds=tokens_before, pointers=pointers, sizes=sizes)

    def _ranges(self, firsts: Sequence[int], lasts: Sequence[int]) -> list[tuple[str, int, int]]:
        """Where lengths, then pointers, then modes of runs of sequences are."""
        path, has_modes = self._entry.path, self._entry.size > self._modes_at
        runs = list(zip(firsts, lasts, strict=True))
        return [
            *((path, _HEADER.size + 4 * first, _HEADER.size + 4 * last) for first, last in runs),
            *((path, self._pointers_at + 8 * first, self._pointers_at + 8 * last) for first, last in runs),
            *(
                (path, self._modes_at + first, self._modes_at + last) if has_modes else (path, 0, 0)
                for first, last in runs
            ),
        ]

    def _check_bounds(self, documents: np.ndarray, values: np.ndarray) -> None:
        """Check the first sequences of documents, ``values``."""
        wrong = (values < 0) | (values > self._num_sequences)
        wrong[1:] |= (values[1:] < values[:-1]) & (documents[1:] == documents[:-1] + 1)
        wrong |= (documents == 0) & (values != 0)
        wrong |= (documents == self.num_documents) & (values != self._num_sequences)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise self._corrupt(
                self._bounds_at + 8 * int(documents[i]),
                f"sequence {values[i]} of {self._num_sequences} cannot be the bound of document {documents[i]}",
            )

    def _check_sequences(
        self, runs: Sequence[tuple[int, int]], pointers: np.ndarray, sizes: np.ndarray, modes: np.ndarray
    ) -> None:
        """Check what the index says of some runs of sequences."""
        room, url = self._tokens.size, self._tokens.url
        # Sizes have 34 bits, so that nothing wraps round where pointers lie inside the file.
        fits = not len(sizes) or (
            sizes.min() >= 0
            and pointers.min() >= 0
            and pointers.max() <= room
            and (pointers + sizes).max() <= room
        )
        num_bytes = sizes.sum(dtype=np.float64)  # a sum of int64 might wrap round
        if fits and num_bytes <= room and not modes.any():
            return
        numbers = np.concatenate([np.arange(*run) for run in runs])
        if not fits:
            wrong = (sizes < 0) | (pointers < 0) | (pointers > room) | (sizes > room - pointers)
            i = int(np.argmax(wrong))
            raise self._corrupt(
                self._pointers_at + 8 * int(numbers[i]),
                f"sequence {numbers[i]} has {sizes[i]} bytes from byte {pointers[i]} on, and {url} ends at {room}",
            )
        if num_bytes > room:
            raise self._corrupt(
                self._pointers_at + 8 * int(numbers[0]),
                f"sequences {numbers[0]} to {numbers[-1] + 1} overlap: they have more bytes than {url}",
            )
        i = int(np.argmax(modes != 0))
        raise self._corrupt(
            self._modes_at + int(numbers[i]),
            f"sequence {numbers[i]} is of mode {modes[i]}, not text",
            remedy="write it in a format that has columns for images",
        )

    def _corrupt(
        self, offset: int, reason: str, remedy: str = "copy or write .idx and .bin again"
    ) -> CorruptSource:
        return CorruptSource(f"{self._entry.url}: byte {offset}: {reason}; {remedy}")


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
