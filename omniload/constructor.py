"""The DataConstructor role: payload of a plan in, finished lanes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from omniload.fill import Layout, TokenArrays, fill
from omniload.loader import Payload
from omniload.mixture import Mixture
from omniload.planner import Plan
from omniload.recycler import Recycler


class PayloadSource(Protocol):
    """Where the constructor gets tokens from: the runtime, in front of the source loaders."""

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        """The tokens of ``pieces``, all of one source, in order."""


_TOKEN_WISE = ("input_ids", "targets", "labels", "position_ids", "segment_ids")

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
        layout = _lay_out(pack, pieces["length"].astype(np.int64), len(lanes) * num_packs, seq_len)
        arrays = self._new_arrays(len(lanes) * num_packs * seq_len)
        fill(payload.tokens, payload.loss_mask, layout, arrays)
        named = {name: array for name in _TOKEN_WISE if (array := getattr(arrays, name)) is not None}
        bounds = np.sort(np.concatenate([layout.starts, layout.padding_starts, [len(arrays.input_ids)]]))

        built: list[LaneArrays] = []
        lane_tokens = num_packs * seq_len
        for begin in range(0, len(lanes) * lane_tokens, lane_tokens):
            part = slice(begin, begin + lane_tokens)
            first, last = np.searchsorted(bounds, (part.start, part.stop))
            cu_seqlens = bounds[first : last + 1] - begin
            built.append(
                {
                    **{key: array[part].reshape(num_packs, seq_len) for key, array in named.items()},
                    "cu_seqlens": cu_seqlens.astype(np.int32),
                    "max_seqlen": int(np.diff(cu_seqlens).max()),
                }
            )
        return built

    def _new_arrays(self, length: int) -> TokenArrays:
        new = self._recycler.empty
        return TokenArrays(
            input_ids=new(length, np.int64),
            targets=new(length, np.int64) if self._shifted else None,
            labels=None if self._shifted else new(length, np.int64),
            position_ids=new(length, np.int64),
            segment_ids=new(length, np.int32),
        )

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


def _lay_out(pack: np.ndarray, length: np.ndarray, num_packs: int, seq_len: int) -> Layout:
    """Where the pieces lie when the packs are laid end to end.

    Args:
        pack: ``int64[n]`` pack of each piece, ascending.
        length: ``int64[n]`` tokens of each piece.
        num_packs: number of packs.
        seq_len: tokens of a pack.
    """
    used = np.bincount(pack, weights=length, minlength=num_packs).astype(np.int64)
    before = np.cumsum(length) - length
    pack_before = np.concatenate([[0], np.cumsum(used)[:-1]])
    short = np.flatnonzero(used < seq_len)
    return Layout(
        starts=before + (np.arange(num_packs) * seq_len - pack_before)[pack],
        lengths=length,
        numbers=_rank_in_group(pack) + 1,
        padding_starts=short * seq_len + used[short],
        padding_lengths=seq_len - used[short],
    )


def _rank_in_group(group: np.ndarray) -> np.ndarray:
    """0, 1, 2, … inside every run of equal values of an ascending array."""
    index = np.arange(len(group))
    return index - np.searchsorted(group, group)
