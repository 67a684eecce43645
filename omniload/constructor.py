"""The DataConstructor role: payload of a plan in, finished lanes out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from omniload.fill import Layout, TokenArrays, fill
from omniload.lane_extras import LaneExtras
from omniload.mixture import ROWS_OF_ANY_LENGTH, Mixture
from omniload.payload import Payload
from omniload.pieces import by_source, join_pieces
from omniload.planner import Plan
from omniload.recycler import Recycler


class PayloadSource(Protocol):
    """Where the constructor gets tokens from: the runtime, in front of the source loaders."""

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        """The tokens of ``pieces``, all of one source, in order."""


def pieces_of(plan: Plan, lanes: Sequence[int]) -> np.ndarray:
    """``PIECE[n]``: the pieces of some lanes, one lane after the other."""
    if len(lanes) == plan.num_lanes and list(lanes) == list(range(plan.num_lanes)):
        return plan.pieces
    return join_pieces([plan.pieces[plan.lane_slice(lane)] for lane in lanes])


def gather(pieces: np.ndarray, source: PayloadSource) -> Payload:
    """The payload of ``PIECE[n]`` of several sources, in their order."""
    parts = [(where, source.payload(number, pieces.take(where))) for number, where in by_source(pieces)]
    return parts[0][1] if len(parts) == 1 else Payload.gathered(len(pieces), parts)


DERIVED = ("targets", "labels", "position_ids", "segment_ids")
"""The token-wise arrays of a lane besides ``input_ids``; it has ``targets`` or ``labels``."""

LaneArrays = dict[str, np.ndarray | int]
"""One lane of ``m`` packs of ``S`` tokens; S is ``seq_len``, or with ``packing: none`` and ``workload``, whose packs
are of any length, that of the lane's longest.

- ``input_ids``: ``int64[m, S]``, 0 where there is no token.
- ``targets``: ``int64[m, S]``, the next token of the same sample, `IGNORE` where there is none (``labels: shifted``).
- ``labels``: ``int64[m, S]``, the token itself, `IGNORE` at the first of each segment (``labels: hf``).
- ``position_ids``: ``int64[m, S]``, position in the segment.
- ``segment_ids``: ``int32[m, S]``: 1, 2, … for the pieces of a pack, 0 for padding.
- ``cu_seqlens``: ``int32[k + 1]``, bounds of the segments in the ``m * S`` tokens laid end to end; padding is one too.
- ``max_seqlen``: longest segment, padding included.
- every extra array that the mixture's transforms declare, like ``pixel_values``: those of the samples of the lane end
  to end, in the order they lie in, with no rows where the lane has none.
"""


class DataConstructor:
    """Builds lanes: pads, derives targets, positions and segments.

    Args:
        mixture: the mixture.
        derived: which of `DERIVED` to make.
    """

    def __init__(self, mixture: Mixture, derived: Collection[str] = DERIVED) -> None:
        self._seq_len = mixture.seq_len
        self._full = mixture.packing not in ROWS_OF_ANY_LENGTH
        self._derived = set(derived) - {"labels" if mixture.labels == "shifted" else "targets"}
        self._recycler = Recycler()
        self._extras = LaneExtras(mixture, self._recycler)

    def build(self, plan: Plan, lanes: Sequence[int], payload: Payload) -> list[LaneArrays]:
        """The given lanes of a plan, in the order given. They share memory: one allocation holds all of a kind.

        Args:
            plan: the plan.
            lanes: which of its lanes.
            payload: of their pieces, as `pieces_of` gives them.
        """
        pieces = pieces_of(plan, lanes)
        length = pieces["length"].astype(np.int64)
        # The packs of all lanes laid end to end; a lane is a run of them.
        which = np.asarray(lanes)
        rows = np.diff(plan.lane_offsets)[which]
        first_row = np.cumsum(rows) - rows
        packs = np.repeat(plan.lane_offsets[which] - first_row, rows) + np.arange(rows.sum())
        pieces_in = np.diff(plan.offsets)[packs]
        pack = np.repeat(np.arange(len(packs)), pieces_in)
        widths = self._widths(length, pack, first_row)
        layout = _lay_out(pack, length, np.repeat(widths, rows))
        arrays = self._new_arrays(int(np.dot(widths, rows)))
        fill(payload, layout, arrays)
        named = {"input_ids": arrays.input_ids, **{key: getattr(arrays, key) for key in self._derived}}

        begins = np.cumsum(widths * rows) - widths * rows
        bounds = np.sort(np.concatenate([layout.starts, layout.padding_starts, [len(arrays.input_ids)]]))
        first_bound = np.searchsorted(bounds, begins)
        longest = np.maximum.reduceat(np.diff(bounds), first_bound).tolist()
        bound_ranges = itertools.pairwise([*first_bound.tolist(), len(bounds) - 1])
        piece_ranges = itertools.pairwise(
            np.concatenate([[0], np.cumsum(pieces_in)])[[*first_row, len(packs)]].tolist()
        )

        arrays_of = payload.arrays or []
        built: list[LaneArrays] = []
        for begin, num_rows, width, (first, last), (first_piece, end), max_seqlen in zip(
            begins.tolist(), rows.tolist(), widths.tolist(), bound_ranges, piece_ranges, longest, strict=True
        ):
            part = slice(begin, begin + num_rows * width)
            built.append(
                {
                    **{key: array[part].reshape(num_rows, width) for key, array in named.items()},
                    "cu_seqlens": (bounds[first : last + 1] - begin).astype(np.int32),
                    "max_seqlen": max_seqlen,
                    **self._extras.join(pieces["source"][first_piece:end], arrays_of[first_piece:end]),
                }
            )
        return built

    def _widths(self, length: np.ndarray, pack: np.ndarray, first_row: np.ndarray) -> np.ndarray:
        """``int64[lanes]``: tokens of a row of each lane."""
        if self._full:
            return np.full(len(first_row), self._seq_len)
        tokens = np.add.reduceat(length, np.searchsorted(pack, np.arange(pack[-1] + 1)))
        return np.maximum.reduceat(tokens, first_row)

    def _new_arrays(self, length: int) -> TokenArrays:
        def derived(name: str, dtype: type[np.integer]) -> np.ndarray | None:
            return self._recycler.empty(length, dtype) if name in self._derived else None

        return TokenArrays(
            input_ids=self._recycler.empty(length, np.int64),
            targets=derived("targets", np.int64),
            labels=derived("labels", np.int64),
            position_ids=derived("position_ids", np.int64),
            segment_ids=derived("segment_ids", np.int32),
        )


def _lay_out(pack: np.ndarray, length: np.ndarray, widths: np.ndarray) -> Layout:
    """Where the pieces lie when the packs are laid end to end.

    Args:
        pack: ``int64[n]`` pack of each piece, ascending.
        length: ``int64[n]`` tokens of each piece.
        widths: ``int64[packs]`` tokens that each pack has room for.
    """
    num_packs = len(widths)
    pack_starts = np.cumsum(widths) - widths
    used = np.bincount(pack, weights=length, minlength=num_packs).astype(np.int64)
    before = np.cumsum(length) - length
    pack_before = np.concatenate([[0], np.cumsum(used)[:-1]])
    short = np.flatnonzero(used < widths)
    return Layout(
        starts=before + (pack_starts - pack_before)[pack],
        lengths=length,
        numbers=_rank_in_group(pack) + 1,
        padding_starts=pack_starts[short] + used[short],
        padding_lengths=widths[short] - used[short],
    )


def _rank_in_group(group: np.ndarray) -> np.ndarray:
    """0, 1, 2, … inside every run of equal values of an ascending array."""
    index = np.arange(len(group))
    return index - np.searchsorted(group, group)
