"""The DataConstructor role: payload of a plan in, finished lanes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from omniload.loader import Payload
from omniload.mixture import Mixture
from omniload.planner import Plan
from omniload.recycler import Recycler

IGNORE = -100
"""Target of a position that does not count in the loss; what torch's cross entropy ignores by default."""


class PayloadSource(Protocol):
    """Where the constructor gets tokens from: the runtime, in front of the source loaders."""

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        """The tokens of ``pieces``, all of one source, in order."""


LaneArrays = dict[str, np.ndarray | int]
"""One lane of ``m`` packs of ``S`` tokens.

- ``input_ids``: ``int64[m, S]``, 0 where there is no token.
- ``targets``: ``int64[m, S]``, the next token of the same sample, `IGNORE` where there is none (``labels: shifted``).
- ``labels``: ``int64[m, S]``, the token itself, `IGNORE` at the first of each segment (``labels: hf``).
- ``position_ids``: ``int64[m, S]``, position in the segment.
- ``segment_ids``: ``int32[m, S]``: 1, 2, … for the pieces of a pack, 0 for padding.
- ``cu_seqlens``: ``int32[k + 1]``, bounds of the segments in the ``m * S`` tokens laid end to end; padding is one too.
- ``max_seqlen``: longest segment, padding included.
"""


class DataConstructor:
    """Builds lanes: gathers tokens, pads, derives targets, positions and segments.

    Args:
        mixture: the mixture.
        source: where tokens come from.
    """

    def __init__(self, mixture: Mixture, source: PayloadSource) -> None:
        self._seq_len = mixture.seq_len
        self._shifted = mixture.labels == "shifted"
        self._source = source
        self._positions = np.arange(mixture.seq_len)
        self._recycler = Recycler()

    def build(self, plan: Plan, lanes: Sequence[int]) -> list[LaneArrays]:
        """The given lanes of a plan, in the order given. They share memory: one allocation holds all of a kind."""
        pieces = np.concatenate([plan.pieces[plan.lane_slice(lane)] for lane in lanes])
        payload = self._gather(pieces)
        seq_len, num_packs = self._seq_len, plan.packs_per_lane
        # The packs of all lanes laid end to end; a lane is a run of num_packs of them.
        pack = np.concatenate(
            [plan.pack_of_piece(lane) + (i - lane) * num_packs for i, lane in enumerate(lanes)]
        )
        length = pieces["length"].astype(np.int64)
        starts, bounds, is_piece = _segments(pack, length, len(lanes) * num_packs, seq_len)
        arrays = self._fill(pack, starts, starts + length, bounds, is_piece, payload)

        built: list[LaneArrays] = []
        lane_tokens = num_packs * seq_len
        for begin in range(0, len(lanes) * lane_tokens, lane_tokens):
            part = slice(begin, begin + lane_tokens)
            first, last = np.searchsorted(bounds, (part.start, part.stop))
            cu_seqlens = bounds[first : last + 1] - begin
            built.append(
                {
                    **{key: array[part].reshape(num_packs, seq_len) for key, array in arrays.items()},
                    "cu_seqlens": cu_seqlens.astype(np.int32),
                    "max_seqlen": int(np.diff(cu_seqlens).max()),
                }
            )
        return built

    def _fill(
        self,
        pack: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        bounds: np.ndarray,
        is_piece: np.ndarray,
        payload: Payload,
    ) -> dict[str, np.ndarray]:
        """The token-wise arrays of all packs laid end to end."""
        total = int(bounds[-1])
        input_ids = self._recycler.empty(total, np.int64)
        wanted = self._recycler.empty(total, np.int64)
        position_ids = self._recycler.empty(total, np.int64)
        segment_ids = self._recycler.empty(total, np.int32)
        padding = []
        tokens, numbers = iter(payload.tokens), iter((_rank_in_group(pack) + 1).tolist())
        # One slice a segment: on documents of usual length this beats whole-array passes of repeat and subtract.
        for (start, end), piece in zip(pairwise(bounds.tolist()), is_piece.tolist(), strict=True):
            if piece:
                input_ids[start:end] = next(tokens)[: end - start]
                segment_ids[start:end] = next(numbers)
            else:
                input_ids[start:end] = 0
                segment_ids[start:end] = 0
                padding.append(slice(start, end))
            position_ids[start:end] = self._positions[: end - start]
        if self._shifted:
            key = "targets"
            _shift_targets(wanted, input_ids, starts, ends, payload)
        else:
            key = "labels"
            _copy_labels(wanted, input_ids, starts, ends, payload)
        for part in padding:
            wanted[part] = IGNORE
        return {"input_ids": input_ids, key: wanted, "position_ids": position_ids, "segment_ids": segment_ids}

    def _gather(self, pieces: np.ndarray) -> Payload:
        """The payload of pieces of several sources, in their order."""
        tokens: list[np.ndarray] = [_NOTHING] * len(pieces)
        masks: list[np.ndarray | None] = [None] * len(pieces)
        for source in np.unique(pieces["source"]).tolist():
            where = np.flatnonzero(pieces["source"] == source)
            payload = self._source.payload(source, pieces[where])
            for i, piece, mask in zip(where.tolist(), payload.tokens, payload.loss_mask, strict=True):
                tokens[i], masks[i] = piece, mask
        return Payload(tokens=tokens, loss_mask=masks)


_NOTHING = np.empty(0, np.uint16)


def _segments(
    pack: np.ndarray, length: np.ndarray, num_packs: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pieces lie when the packs are laid end to end.

    Args:
        pack: ``int64[n]`` pack of each piece, ascending.
        length: ``int64[n]`` tokens of each piece.
        num_packs: number of packs.
        seq_len: tokens of a pack.

    Returns:
        ``int64[n]`` first token of each piece; ``int64[k + 1]`` bounds of the segments, which are the pieces and a
        padding segment for each pack with room left; ``bool[k]`` whether a segment is a piece.
    """
    used = np.bincount(pack, weights=length, minlength=num_packs).astype(np.int64)
    before = np.cumsum(length) - length
    pack_before = np.concatenate([[0], np.cumsum(used)[:-1]])
    starts = before + (np.arange(num_packs) * seq_len - pack_before)[pack]
    short = np.flatnonzero(used < seq_len)
    bounds = np.concatenate([starts, short * seq_len + used[short]])
    is_piece = np.arange(len(bounds)) < len(starts)
    order = np.argsort(bounds, kind="stable")
    return starts, np.concatenate([bounds[order], [num_packs * seq_len]]), is_piece[order]


def _rank_in_group(group: np.ndarray) -> np.ndarray:
    """0, 1, 2, … inside every run of equal values of an ascending array."""
    index = np.arange(len(group))
    return index - np.searchsorted(group, group)


def _shift_targets(
    targets: np.ndarray, input_ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, payload: Payload
) -> None:
    """Fill in the next token of the same sample, `IGNORE` where there is none or it does not count."""
    targets[:-1] = input_ids[1:]
    # The last token of a piece: the token that follows in its document, if the document goes on.
    targets[ends - 1] = [
        tokens[count] if len(tokens) > count else IGNORE
        for tokens, count in zip(payload.tokens, (ends - starts).tolist(), strict=True)
    ]
    for i, mask in enumerate(payload.loss_mask):
        if mask is not None:
            # mask[j] says whether token j may be a target; token j is the target of position j - 1.
            targets[starts[i] : starts[i] + len(mask) - 1][~mask[1:]] = IGNORE


def _copy_labels(
    labels: np.ndarray, input_ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, payload: Payload
) -> None:
    """Fill in the token itself, `IGNORE` at the first of each piece and where it does not count."""
    labels[:] = input_ids
    labels[starts] = IGNORE
    for i, mask in enumerate(payload.loss_mask):
        if mask is not None:
            labels[starts[i] : ends[i]][~mask[: ends[i] - starts[i]]] = IGNORE
