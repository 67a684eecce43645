"""Lanes as flat arrays for the way from rank to rank, and back.

Tokens travel in the narrowest unsigned type that holds them. Of targets there is a bit per token, whether it has one,
and per run the token after its last one; positions and segments follow from the plan. The receiver derives them
faster than it could receive them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from omniload.connecting.circles import View
from omniload.connecting.runs import Runs, Segments
from omniload.constructor import DERIVED, LaneArrays
from omniload.fill import IGNORE
from omniload.payload import narrowest
from omniload.placing import Needs
from omniload.planner import Plan
from omniload.recycler import Recycler

Arrays = dict[str, np.ndarray]
_TOKEN_WISE = ("input_ids", *DERIVED)
_EXTRA = "extra"


class LanePacker:
    """Packs the lanes of one step, for one view after the other.

    Args:
        plan: of the step.
        numbers: the lanes by number.
        lanes: these, whole.
    """

    def __init__(self, plan: Plan, numbers: Sequence[int], lanes: Sequence[LaneArrays]) -> None:
        self._lanes = lanes
        self._bounds = [_array(lane, "cu_seqlens") for lane in lanes]
        self._segments = Segments(plan, numbers, self._bounds)
        self._target = next((key for key in ("targets", "labels") if key in lanes[0]), None)
        self._tokens: np.ndarray | None = None
        self._kept: np.ndarray | None = None

    def pack(self, view: View) -> Arrays:
        """What a receiver needs to make its lanes: see `unpack`."""
        arrays: Arrays = {
            "cu_seqlens": np.concatenate(self._bounds),
            "num_bounds": np.array([len(bounds) for bounds in self._bounds], np.int64),
        }
        if view.needs == Needs.LAYOUT:
            return arrays
        runs = self._segments.runs(view)
        chosen = slice(None) if view.num_parts == 1 else runs.tokens()
        arrays["tokens"] = self._narrow()[chosen]
        if Needs.TARGETS in view.needs and self._target is not None:
            arrays["kept"] = np.packbits(self._bits(self._target)[chosen])
            if self._target == "targets":
                arrays["following"] = self._following(runs)
        if Needs.INPUTS in view.needs:
            for i, lane in enumerate(self._lanes):
                for key in _extras(lane):
                    arrays[f"{_EXTRA}/{i}/{key}"] = _array(lane, key)
        return arrays

    def cut(self, view: View) -> list[LaneArrays]:
        """The lanes as a rank with this view gets them, from the whole ones."""
        if view == View():
            return list(self._lanes)
        runs = self._segments.runs(view)
        chosen, first, begin = runs.tokens(), 0, 0
        cut: list[LaneArrays] = []
        for lane, whole, shape in zip(self._lanes, self._segments.sizes, runs.shapes, strict=True):
            size = shape[0] * shape[1]
            here = chosen[first : first + size] - begin
            first, begin = first + size, begin + whole
            cut.append(
                {
                    key: _array(lane, key).reshape(-1)[here].reshape(shape) if key in _TOKEN_WISE else value
                    for key, value in lane.items()
                    if view.needs.holds(key)
                }
            )
        return cut

    def _narrow(self) -> np.ndarray:
        """``unsigned[n]``: the tokens of all lanes."""
        if self._tokens is None:
            most = max(int(_array(lane, "input_ids").max()) for lane in self._lanes)
            self._tokens = self._joined("input_ids", narrowest(most))
        return self._tokens

    def _bits(self, target: str) -> np.ndarray:
        """``bool[n]``: the tokens of all lanes that have a target."""
        if self._kept is None:
            self._kept = self._joined(target, bool, lambda values: values != IGNORE)
        return self._kept

    def _following(self, runs: Runs) -> np.ndarray:
        """``unsigned[k]``: the target of the last token of each run, 0 where there is none."""
        last = runs.begin + runs.length - 1
        edges = np.cumsum([0, *self._segments.sizes])
        lane_of = np.searchsorted(edges, last, side="right") - 1
        following = np.zeros(len(last), np.int64)
        for i, lane in enumerate(self._lanes):
            here = lane_of == i
            following[here] = _array(lane, "targets").reshape(-1)[last[here] - edges[i]]
        np.maximum(following, 0, out=following)
        return following.astype(narrowest(int(following.max(initial=0))))

    def _joined(
        self,
        key: str,
        dtype: type[np.generic] | type[bool],
        change: Callable[[np.ndarray], np.ndarray] = lambda values: values,
    ) -> np.ndarray:
        joined = np.empty(sum(self._segments.sizes), dtype)
        at = 0
        for lane in self._lanes:
            values = _array(lane, key).reshape(-1)
            joined[at : at + len(values)] = change(values)
            at += len(values)
        return joined


def unpack(
    arrays: Mapping[str, np.ndarray],
    plan: Plan,
    numbers: Sequence[int],
    view: View,
    derived: Collection[str],
    recycler: Recycler,
) -> list[LaneArrays]:
    """The lanes of a view, byte for byte those that `LanePacker.cut` gives.

    Args:
        arrays: as `LanePacker.pack` made them for this view; extra arrays of the lanes are views of these.
        plan: of the step.
        numbers: the lanes by number.
        view: the view.
        derived: which of `omniload.constructor.DERIVED` the lanes have; of targets, those that came.
        recycler: where memory comes from.
    """
    bounds = np.split(arrays["cu_seqlens"], np.cumsum(arrays["num_bounds"])[:-1])
    runs = Segments(plan, numbers, bounds).runs(view)
    size = runs.num_tokens

    named: Arrays = {}
    if Needs.INPUTS in view.needs:
        named["input_ids"] = recycler.empty(size, np.int64)
        named["input_ids"][:] = arrays["tokens"]
    if "kept" in arrays:
        key = "targets" if "following" in arrays else "labels"
        named[key] = recycler.empty(size, np.int64)
        _fill_targets(named[key], arrays, runs)
    if "position_ids" in derived:
        named["position_ids"] = recycler.empty(size, np.int64)
        runs.fill_positions(named["position_ids"])
    if "segment_ids" in derived:
        named["segment_ids"] = recycler.empty(size, np.int32)
        runs.fill_segments(named["segment_ids"])

    extras: list[Arrays] = [{} for _ in numbers]
    for key, value in arrays.items():
        kind, _, rest = key.partition("/")
        if kind == _EXTRA:
            i, _, name = rest.partition("/")
            extras[int(i)][name] = value
    lanes: list[LaneArrays] = []
    at = 0
    for cu_seqlens, (rows, width), extra in zip(bounds, runs.shapes, extras, strict=True):
        part = slice(at, at + rows * width)
        at = part.stop
        lanes.append(
            {
                **{key: array[part].reshape(rows, width) for key, array in named.items()},
                "cu_seqlens": cu_seqlens,
                "max_seqlen": int(np.diff(cu_seqlens).max()),
                **extra,
            }
        )
    return lanes


def _fill_targets(out: np.ndarray, arrays: Mapping[str, np.ndarray], runs: Runs) -> None:
    tokens, following = arrays["tokens"], arrays.get("following")
    if following is None:
        out[:] = tokens
    else:
        out[:-1] = tokens[1:]
        out[runs.ends - 1] = following
    kept = np.unpackbits(arrays["kept"], count=len(out)).view(bool)
    np.copyto(out, IGNORE, where=~kept)


def _extras(lane: LaneArrays) -> list[str]:
    """The arrays of a lane that its transforms declare."""
    return [key for key in lane if key not in (*_TOKEN_WISE, "cu_seqlens", "max_seqlen")]


def _array(lane: LaneArrays, key: str) -> np.ndarray:
    value = lane[key]
    assert isinstance(value, np.ndarray)
    return value
