"""Which tokens of some lanes a view has, and what can be said of them without looking at any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.connecting.circles import View
from omniload.placing.slicing import SLICINGS, Slices
from omniload.planner import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The tokens of a view, as runs of neighbours of one segment; a segment is a document or a run of padding.

    Arrays are ``int64[k]``, in the order in which the tokens lie: by lane, by pack, by place in it.
    """

    begin: np.ndarray
    """First token of each run, in the whole lanes laid end to end."""
    length: np.ndarray
    """Tokens of each, at least 1."""
    position: np.ndarray
    """Position of its first token in the segment."""
    number: np.ndarray
    """1, 2, … for the documents of a pack, 0 for padding."""
    shapes: tuple[tuple[int, int], ...]
    """Packs of each lane, and tokens that the view has of each of these packs."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.length.sum())

    @property
    def ends(self) -> np.ndarray:
        """``int64[k]``: where each run ends among the tokens of the view."""
        return np.cumsum(self.length)

    def tokens(self) -> np.ndarray:
        """``int64[n]``: the tokens of the view, in the whole lanes laid end to end."""
        tokens = np.empty(self.num_tokens, np.int64)
        _count_up(tokens, self.begin, self.length)
        return tokens

    def fill_positions(self, out: np.ndarray) -> None:
        """Fill ``int64[n]`` with the position of each token in its segment."""
        _count_up(out, self.position, self.length)

    def fill_segments(self, out: np.ndarray) -> None:
        """Fill ``int32[n]`` with the number of each token's segment."""
        out[:] = np.repeat(self.number.astype(np.int32), self.length)


def _count_up(out: np.ndarray, first: np.ndarray, length: np.ndarray) -> None:
    """Count up in each run from what its first token has."""
    # With two large temporary arrays alive at once, the allocator gets fresh memory for them every time.
    out[:] = np.repeat(first - np.cumsum(length) + length, length)
    out += np.arange(len(out))


class Segments:
    """The segments of the packs of some lanes, and the runs that views have of them.

    Args:
        plan: of the step.
        lanes: the lanes.
        cu_seqlens: integer ``[segments + 1]`` of each, as lanes have them.
    """

    def __init__(self, plan: Plan, lanes: Sequence[int], cu_seqlens: Sequence[np.ndarray]) -> None:
        packs = [plan.packs_of(lane) for lane in lanes]
        self._num_packs = [len(one) for one in packs]
        self.sizes = [int(bounds[-1]) for bounds in cu_seqlens]
        """Tokens of each lane, padding included."""
        first_token = np.cumsum(self.sizes) - self.sizes
        self._begin = np.concatenate(
            [bounds[:-1].astype(np.int64) + at for bounds, at in zip(cu_seqlens, first_token, strict=True)]
        )
        self._length = np.diff(self._begin, append=sum(self.sizes))
        widths = np.repeat(np.array(self.sizes) // self._num_packs, self._num_packs)
        self._pack_begin = np.cumsum(widths) - widths
        self._first = np.searchsorted(self._begin, np.append(self._pack_begin, sum(self.sizes)))
        num_segments = np.diff(self._first)
        pieces = np.concatenate([np.diff(plan.offsets[one.start : one.stop + 1]) for one in packs])
        place = np.arange(len(self._begin)) - np.repeat(self._first[:-1], num_segments)
        self._number = np.where(place < np.repeat(pieces, num_segments), place + 1, 0)
        self._slices: dict[tuple[str, int], list[Slices]] = {}

    def runs(self, view: View) -> Runs:
        """The runs of a view; of a slice, those of every pack, which is cut for itself."""
        if view.num_parts == 1:
            zeros = np.zeros(len(self._begin), np.int64)
            return self._runs(self._begin, self._length, zeros, self._number)
        begin, length, position, number = [], [], [], []
        for pack, slices in enumerate(self._cut(view.slicing, view.num_parts)):
            part = slice(int(slices.offsets[view.part]), int(slices.offsets[view.part + 1]))
            begin.append(slices.begin[part] + self._pack_begin[pack])
            length.append(slices.length[part])
            position.append(slices.position[part])
            number.append(self._number[slices.document[part] + self._first[pack]])
        return self._runs(*(np.concatenate(column) for column in (begin, length, position, number)))

    def _runs(self, begin: np.ndarray, length: np.ndarray, position: np.ndarray, number: np.ndarray) -> Runs:
        lane_begin = np.cumsum([0, *self.sizes])
        before = np.append(0, np.cumsum(length))[np.searchsorted(begin, lane_begin)]
        tokens = np.diff(before).tolist()
        return Runs(
            begin=begin,
            length=length,
            position=position,
            number=number,
            shapes=tuple((packs, size // packs) for packs, size in zip(self._num_packs, tokens, strict=True)),
        )

    def _cut(self, slicing: str, num_parts: int) -> list[Slices]:
        """The slices of every pack, found once for all parts."""
        key = slicing, num_parts
        if key not in self._slices:
            self._slices[key] = [
                SLICINGS[slicing](np.cumsum(np.append(0, self._length[first:last])), num_parts)
                for first, last in zip(self._first[:-1].tolist(), self._first[1:].tolist(), strict=True)
            ]
        return self._slices[key]
