"""What loading would cost without any planning: decode, and decode + copy, in plain pyarrow and numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.packing import derive, pack

_WINDOW_BLOCKS = 4
"""Row groups shuffled together, as many as the loader's default."""


def copy_contiguous(tokens: np.ndarray, lane_tokens: int) -> int:
    """Widen ``uint16`` tokens to ``int64``, a lane at a time into the same memory.

    Args:
        tokens: ``uint16[n]``.
        lane_tokens: tokens per lane; what is left over at the end is not copied.

    Returns:
        Tokens copied.
    """
    lane = np.empty(lane_tokens, np.int64)
    num_lanes = len(tokens) // lane_tokens
    for i in range(num_lanes):
        lane[:] = tokens[i * lane_tokens : (i + 1) * lane_tokens]
    return num_lanes * lane_tokens


def decode(paths: Iterable[Path]) -> int:
    """Decode every row group on one thread, and do nothing with it. Returns the tokens decoded."""
    return sum(len(tokens) for tokens, _ in _row_groups(paths))


def decode_side_by_side(corpus: Corpus) -> int:
    """`decode` with a thread for each source. Returns the tokens decoded."""
    with ThreadPoolExecutor(len(corpus.sources)) as pool:
        return sum(pool.map(decode, corpus.sources.values()))


def decode_and_copy(corpus: Corpus, lane_tokens: int) -> int:
    """Decode, and copy the documents in shuffled order into ``int64`` lanes, cut where a lane is full.

    Returns:
        Tokens in full lanes.
    """
    return sum(len(lane) for lane, _ in pack(_shuffled_documents(corpus), lane_tokens))


def decode_and_build(corpus: Corpus, lane_tokens: int) -> int:
    """`decode_and_copy`, and derive what a lane of the loader has besides: targets, positions, segments.

    Returns:
        Tokens in full lanes.
    """
    total = 0
    for lane, bounds in pack(_shuffled_documents(corpus), lane_tokens):
        derive(lane, bounds)
        total += len(lane)
    return total


def _row_groups(paths: Iterable[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``int32[n]`` tokens and ``int32[documents + 1]`` offsets of one row group after the other."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for block in range(file.num_row_groups):
                column = file.read_row_group(block, columns=["input_ids"], use_threads=False).column(0)
                documents = column.combine_chunks() if column.num_chunks > 1 else column.chunk(0)
                yield documents.values.to_numpy(), documents.offsets.to_numpy()


def _shuffled_documents(corpus: Corpus) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    window: list[np.ndarray] = []
    num_blocks = 0
    for tokens, offsets in _row_groups(corpus.files):
        bounds = offsets.tolist()
        window += [tokens[start:end] for start, end in itertools.pairwise(bounds)]
        num_blocks += 1
        if num_blocks == _WINDOW_BLOCKS:
            yield from (window[i] for i in generator.permutation(len(window)).tolist())
            window, num_blocks = [], 0
    yield from (window[i] for i in generator.permutation(len(window)).tolist())
