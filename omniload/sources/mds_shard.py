"""MDS shards: the number of samples, the offset of each and of the end, the writer's settings, the samples.

Number and offsets are ``uint32``; the settings are in the index too, and not read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.errors import CorruptSource
from omniload.recycler import BLOCKS
from omniload.sources.mds_index import Shard
from omniload.sources.mds_unpack import unpack
from omniload.sources.runs import Runs
from storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReader:
    """Reads samples of one shard: their bytes, or all of a shard that is compressed."""

    store: Store
    """Holds the shard."""
    shard: Shard
    """What the index says of it."""
    path: str
    """Its path in the store."""
    url: str
    """Its path or URL, for messages."""

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read some samples, neighbours together.

        Args:
            samples: ``int64[n]`` their numbers, ascending.

        Returns:
            ``uint8`` bytes of the samples one after the other, ``int64[n + 1]`` bounds of each in them.

        Raises:
            CorruptSource: the shard is not what the index says.
        """
        whole = None if self.shard.zip_data is None else self._unpack()
        runs = Runs.of(samples)
        of_offsets = [(4 + 4 * start, 8 + 4 * end) for start, end in zip(runs.starts, runs.ends, strict=True)]
        num_samples, offsets = self._read(whole, [(0, 4)], of_offsets)
        if num_samples.view("<u4")[0] != self.shard.samples:
            raise self.corrupt(
                0, f"{num_samples.view('<u4')[0]} samples, not {self.shard.samples} as in the index"
            )
        bounds = offsets.view("<u4").astype(np.int64)
        wrong = (bounds < self.shard.data_at) | (bounds > self.shard.raw_data.bytes)
        wrong[1:] |= bounds[1:] < bounds[:-1]
        if wrong.any():
            i = int(np.argmax(wrong))
            raise self.corrupt(
                4 + 4 * int(runs.bounds[i]), f"sample {runs.bounds[i]} cannot begin at byte {bounds[i]}"
            )
        last = np.append(runs.first[1:], len(bounds)) - 1
        of_data = zip(bounds[runs.first].tolist(), bounds[last].tolist(), strict=True)
        [data] = self._read(whole, list(of_data))
        if len(last) == 1:
            return data, bounds - bounds[0]
        # Between the end of a run and the next lies nothing wanted.
        sizes = np.delete(np.diff(bounds), last[:-1])
        return data, np.append(0, np.cumsum(sizes))

    def corrupt(self, offset: int, reason: str) -> CorruptSource:
        """The error of something wrong with the shard."""
        return CorruptSource(f"{self.url}: byte {offset}: {reason}; copy or write the dataset again")

    def _unpack(self) -> np.ndarray:
        [packed] = self.store.read_ranges([(self.path, 0, self.shard.stored.bytes)])
        return unpack(packed, self.shard, self.url)

    def _read(self, whole: np.ndarray | None, *groups: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Groups of ranges of the shard, each laid end to end; the shard is a ``whole`` if it was decompressed."""
        if whole is not None:
            return [
                np.concatenate([whole[start:end] for start, end in ranges])
                if len(ranges) > 1
                else whole[slice(*ranges[0])]
                for ranges in groups
            ]
        found, wanted, into = [], [], []
        for ranges in groups:
            ends = np.cumsum([end - start for start, end in ranges]).tolist()
            found.append(BLOCKS.empty(ends[-1], np.uint8))
            wanted += [(self.path, start, end) for start, end in ranges]
            into += [found[-1].data[at:end] for at, end in zip([0, *ends], ends, strict=False)]
        self.store.read_ranges(wanted, into)
        return found
