"""What loading would cost without any planning: decode, and decode + copy, in plain pyarrow and numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.loading.corpus import Corpus

_WINDOW_BLOCKS = 4
"""Row groups shuffled together, as many as the loader's default."""
_IGNORE = -100


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
    return sum(len(lane) for lane, _ in packed_lanes(corpus, lane_tokens))


def decode_and_build(corpus: Corpus, lane_tokens: int) -> int:
    """`decode_and_copy`, and derive what a lane of the loader has besides: targets, positions, segments.

    Returns:
        Tokens in full lanes.
    """
    total = 0
    for lane, bounds in packed_lanes(corpus, lane_tokens):
        edges = np.array(bounds)
        lengths = np.diff(edges)
        targets = np.empty_like(lane)
        targets[:-1] = lane[1:]
        targets[edges[1:] - 1] = _IGNORE
        positions = np.arange(len(lane))
        positions -= np.repeat(edges[:-1], lengths)
        np.repeat(np.arange(1, len(edges), dtype=np.int32), lengths)
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


def packed_lanes(corpus: Corpus, lane_tokens: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Decode, shuffle and copy.

    Yields:
        A full lane, ``int64[lane_tokens]``, and the bounds of the documents and parts of documents in it, from 0 to
        ``lane_tokens``.
    """
    lane, bounds, used = np.empty(lane_tokens, np.int64), [0], 0
    for document in _shuffled_documents(corpus):
        while (room := lane_tokens - used) <= len(document):
            lane[used:] = document[:room]
            yield lane, ([*bounds, lane_tokens] if room else bounds)
            lane, bounds, used, document = np.empty(lane_tokens, np.int64), [0], 0, document[room:]
        if len(document):
            lane[used : used + len(document)] = document
            used += len(document)
            bounds.append(used)
