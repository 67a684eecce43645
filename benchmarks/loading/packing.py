"""A plain numpy packer: documents laid end to end in lanes, in the order they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

_IGNORE = -100


def pack(documents: Iterable[np.ndarray], lane_tokens: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Copy documents into lanes, cut where a lane is full.

    Args:
        documents: ``integer[n]`` each, n >= 0.
        lane_tokens: tokens per lane.

    Yields:
        A full lane, ``int64[lane_tokens]``, and the bounds of the documents and parts of documents in it, from 0 to
        ``lane_tokens``. What does not fill a lane at the end is left out.
    """
    lane, bounds, used = np.empty(lane_tokens, np.int64), [0], 0
    for document in documents:
        while (room := lane_tokens - used) <= len(document):
            lane[used:] = document[:room]
            yield lane, ([*bounds, lane_tokens] if room else bounds)
            lane, bounds, used, document = np.empty(lane_tokens, np.int64), [0], 0, document[room:]
        if len(document):
            lane[used : used + len(document)] = document
            used += len(document)
            bounds.append(used)


def derive(lane: np.ndarray, bounds: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a lane of the loader has besides its tokens, a pass over whole arrays for each.

    Args:
        lane: ``int64[n]`` tokens.
        bounds: of the documents in it, from 0 to n.

    Returns:
        ``int64[n]`` targets, ``int64[n]`` positions, ``int32[n]`` segments.
    """
    edges = np.array(bounds)
    lengths = np.diff(edges)
    targets = np.empty_like(lane)
    targets[:-1] = lane[1:]
    targets[edges[1:] - 1] = _IGNORE
    positions = np.arange(len(lane))
    positions -= np.repeat(edges[:-1], lengths)
    return targets, positions, np.repeat(np.arange(1, len(edges), dtype=np.int32), lengths)
