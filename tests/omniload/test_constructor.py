"""Lanes against a reference that builds them token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.constructor import DERIVED, DataConstructor, LaneArrays, gather, pieces_of
from omniload.fill import IGNORE
from omniload.mixture import Mixture
from omniload.payload import Payload
from omniload.pieces import PIECE
from omniload.planner import Plan

SEQ_LEN = 12


class Tokens:
    """Payload by piece: token j of source s is 100·s + j, with a loss mask for odd sources."""

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        tokens, masks = [], []
        for piece in pieces:
            goes_on = int(piece["row"])  # the test puts here whether the document goes on after the piece
            count = int(piece["length"]) + goes_on
            ids = (100 * source + int(piece["start"]) + np.arange(count)).astype(np.uint16)
            tokens.append(ids)
            masks.append(ids % 3 != 0 if source % 2 else None)
        return Payload.of(tokens, masks)


def mixture(labels: str, packing: str = "best_fit") -> Mixture:
    return Mixture.load(
        {
            "seq_len": SEQ_LEN,
            "packing": packing,
            "packs": 4,
            "lanes": 2,
            "labels": labels,
            "sources": {"a": {"path": "x", "weight": 1}},
        }
    )


def build(
    mixture: Mixture, plan: Plan, lanes: Sequence[int], derived: Sequence[str] = DERIVED
) -> list[LaneArrays]:
    payload = gather(pieces_of(plan, lanes), Tokens())
    return DataConstructor(mixture, derived).build(plan, lanes, payload)


def reference(plan: Plan, lane: int, labels: str, packing: str = "best_fit") -> dict[str, Any]:
    """The lane, one token at a time, straight from the definitions."""
    packs, width = plan.packs_of(lane), SEQ_LEN
    m = len(packs)
    if packing == "none":
        width = int(plan.pieces[plan.lane_slice(lane)]["length"].max())
    out = {
        "input_ids": np.zeros((m, width), int),
        "targets": np.full((m, width), IGNORE),
        "labels": np.full((m, width), IGNORE),
        "position_ids": np.zeros((m, width), int),
        "segment_ids": np.zeros((m, width), int),
    }
    bounds = [0]
    for row, pack in enumerate(packs):
        at = 0
        for number, piece in enumerate(plan.pieces[plan.offsets[pack] : plan.offsets[pack + 1]]):
            part = Tokens().payload(int(piece["source"]), np.array([piece]))
            ids, mask = part.tokens[0], part.loss_mask[0]
            for j in range(int(piece["length"])):
                out["input_ids"][row, at] = ids[j]
                out["position_ids"][row, at] = j
                out["segment_ids"][row, at] = number + 1
                if j + 1 < len(ids) and (mask is None or mask[j + 1]):
                    out["targets"][row, at] = ids[j + 1]
                if j > 0 and (mask is None or mask[j]):
                    out["labels"][row, at] = ids[j]
                at += 1
            bounds.append(row * width + at)
        if at < width:
            out["position_ids"][row, at:] = np.arange(width - at)
            bounds.append((row + 1) * width)
    del out["targets" if labels == "hf" else "labels"]
    return {**out, "cu_seqlens": np.array(bounds), "max_seqlen": int(np.diff(bounds).max())}


pack_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(
    lambda lengths: sum(lengths) <= SEQ_LEN
)


@pytest.mark.parametrize("labels", ["shifted", "hf"])
@settings(deadline=None)
@given(st.lists(pack_lengths, min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_lanes_equal_the_reference(labels: str, packs: list[list[int]], random: Any) -> None:
    rows = [
        (random.randrange(4), 0, 0, 0, random.randrange(2), 0, random.randrange(50), length, 0, 0, 0, 0)
        for lengths in packs
        for length in lengths
    ]
    plan = Plan(
        step=0,
        lane_offsets=np.array([0, 2, 4]),
        pieces=np.array(rows, PIECE),
        offsets=np.cumsum([0, *map(len, packs)]),
    )
    for lane, built in zip([1, 0], build(mixture(labels), plan, [1, 0]), strict=True):
        expected = reference(plan, lane, labels)
        assert built.keys() == expected.keys()
        for key, value in expected.items():
            assert np.array_equal(built[key], value), key


@pytest.mark.parametrize("labels", ["shifted", "hf"])
@given(st.lists(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=5), min_size=1, max_size=4))
def test_unpacked_lanes_are_as_wide_as_their_longest_sample(labels: str, lanes: list[list[int]]) -> None:
    rows = [(0, 0, 0, 0, i, 0, i, length, 0, 0, 0, 0) for i, length in enumerate(itertools.chain(*lanes))]
    plan = Plan(
        step=0,
        lane_offsets=np.cumsum([0, *map(len, lanes)]),
        pieces=np.array(rows, PIECE),
        offsets=np.arange(len(rows) + 1),
    )
    chosen = list(reversed(range(len(lanes))))
    built = build(mixture(labels, "none"), plan, chosen)
    for lane, arrays in zip(chosen, built, strict=True):
        assert arrays["input_ids"].shape == (len(lanes[lane]), max(lanes[lane]))  # type: ignore[union-attr]
        for key, value in reference(plan, lane, labels, "none").items():
            assert np.array_equal(arrays[key], value), key


def test_only_the_arrays_asked_for_are_made() -> None:
    plan = Plan(
        step=0,
        lane_offsets=np.array([0, 2, 4]),
        pieces=np.array([(0, 0, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0)] * 4, PIECE),
        offsets=np.arange(5),
    )
    [whole] = build(mixture("shifted"), plan, [0])
    [some] = build(mixture("shifted"), plan, [0], ["segment_ids", "labels"])
    assert some.keys() == {"input_ids", "segment_ids", "cu_seqlens", "max_seqlen"}
    for key, value in some.items():
        assert np.array_equal(value, whole[key])


def test_dtypes_are_what_models_and_kernels_want() -> None:
    plan = Plan(
        step=0,
        lane_offsets=np.array([0, 2, 4]),
        pieces=np.array([(0, 0, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0)] * 4, PIECE),
        offsets=np.arange(5),
    )
    [lane] = build(mixture("shifted"), plan, [0])
    assert lane["input_ids"].dtype == lane["targets"].dtype == lane["position_ids"].dtype == np.int64
    assert lane["segment_ids"].dtype == lane["cu_seqlens"].dtype == np.int32
