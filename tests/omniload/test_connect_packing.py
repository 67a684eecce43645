"""What travels between ranks gives lanes byte for byte: whole, as slices, or as parts for the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omniload.errors
from omniload.connecting.circles import View
from omniload.connecting.messages import StepReader, StepWriter, error_from_json, error_to_json
from omniload.constructor import DERIVED, LaneArrays
from omniload.errors import OmniloadError, SourceNotFound, TooManyFailures
from omniload.fill import IGNORE
from omniload.pieces import PIECE, Failure
from omniload.placing import Needs
from omniload.placing.slicing import SLICINGS
from omniload.planner import Plan, StreamState
from omniload.planner.decisions import SetWeights
from omniload.runtime.steps import End, Step
from storage.errors import NotFound
from tests.omniload.test_constructor import SEQ_LEN, build, mixture, pack_lengths

NAMES = ["a", "b", "c", "d"]
ALL = View().needs


def views(num_parts: int, slicing: str, needs: Needs = ALL) -> list[View]:
    if num_parts == 1:
        return [View(needs=needs)]
    return [View(needs=needs, part=i, num_parts=num_parts, slicing=slicing) for i in range(num_parts)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, list[int]]:
    """A step of two lanes with loss masks, documents that go on in the next pack, and extra arrays."""
    labels = draw(st.sampled_from(["shifted", "hf"]))
    packing = draw(st.sampled_from(["best_fit", "none"]))
    packs = draw(st.lists(pack_lengths, min_size=4, max_size=4))
    if packing == "none":
        packs = [[length] for length, *_ in packs]
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    rows = [
        (rng.integers(4), 0, 0, 0, rng.integers(2), 0, rng.integers(70000), length, 0, 0, 0, 0)
        for lengths in packs
        for length in lengths
    ]
    plan = Plan(
        step=3,
        lane_offsets=np.array([0, 2, 4]),
        pieces=np.array(rows, PIECE),
        offsets=np.cumsum([0, *map(len, packs)]),
    )
    numbers = draw(st.sampled_from([[0], [1, 0], [0, 1]]))
    derived = draw(st.sampled_from([DERIVED, ("targets", "labels"), ("segment_ids",), ()]))
    lanes = build(mixture(labels, packing), plan, numbers, derived)
    for lane in lanes:
        lane["pixel_values"] = rng.random((int(rng.integers(3)), 5)).astype(np.float32)
    state = StreamState.initial(4)
    due = SetWeights(step=3, weights={"a": 0.5})
    later = SetWeights(step=9, weights={"a": 0.25})
    before = StreamState(
        step=3, sources=state.sources, deficits=(1, 2, 3, 4), carried=plan.pieces[:2], decisions=(due, later)
    )
    after = StreamState(step=4, sources=state.sources, deficits=(4, 3, 2, 1), carried=plan.pieces[1:])
    step = Step(plan=plan, before=before, after=after, lanes=lanes, quarantined=())
    return step, numbers


def travelled(step: Step, numbers: list[int], view: View) -> tuple[Step, Step]:
    """The step as the source cuts it for a view, and as a receiver makes it from the message."""
    written = StepWriter(NAMES, numbers).write(step, [view], view)
    derived = [key for key in DERIVED if any(key in lane for lane in step.lanes)]
    reader = StepReader(NAMES, numbers, view, derived)
    [message] = written.messages
    buffer = reader.buffer(len(message))
    buffer[:] = message
    received = reader.read(buffer, step.before)
    assert isinstance(written.item, Step)
    assert isinstance(received, Step)
    return written.item, received


def assert_same(one: list[LaneArrays], other: list[LaneArrays]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            if isinstance(value, np.ndarray):
                assert isinstance(right[key], np.ndarray)
                assert (value.dtype, value.shape) == (right[key].dtype, right[key].shape), key  # type: ignore[union-attr]
                assert value.tobytes() == right[key].tobytes(), key  # type: ignore[union-attr]
            else:
                assert value == right[key], key


@given(steps(), st.integers(1, 5), st.sampled_from(list(SLICINGS)), st.sampled_from([*Needs, ALL]))
@settings(max_examples=100)
def test_a_receiver_makes_of_a_message_what_the_source_has(
    case: tuple[Step, list[int]], cp: int, slicing: str, needs: Needs
) -> None:
    step, numbers = case
    for view in views(cp, slicing, needs | Needs.LAYOUT):
        cut, received = travelled(step, numbers, view)
        assert_same(cut.lanes, received.lanes)
        assert received.plan == step.plan
        assert received.after.to_json(NAMES) == step.after.to_json(NAMES)
        assert received.before.decisions == step.before.decisions[:1], (
            "those of this step, as the source knew them"
        )
        if view.needs == Needs.LAYOUT:
            assert all(
                lane.keys() <= {"cu_seqlens", "max_seqlen", "position_ids", "segment_ids"}
                for lane in received.lanes
            )


@given(steps(), st.integers(2, 5), st.sampled_from(list(SLICINGS)))
@settings(max_examples=100)
def test_the_slices_of_a_lane_are_the_lane(case: tuple[Step, list[int]], cp: int, slicing: str) -> None:
    step, numbers = case
    parts = [travelled(step, numbers, view)[1].lanes for view in views(cp, slicing)]
    for i, lane in enumerate(step.lanes):
        rows, width = lane["input_ids"].shape  # type: ignore[union-attr]
        bounds = np.asarray(lane["cu_seqlens"], np.int64)
        for row in range(rows):
            here = bounds[(bounds >= row * width) & (bounds <= (row + 1) * width)] - row * width
            slices = SLICINGS[slicing](here, cp)
            for key in {"input_ids", *DERIVED} & lane.keys():
                whole = np.full(width, -(2**31))
                for part in range(cp):
                    whole[slices.of(part)] = parts[part][i][key][row]  # type: ignore[index]
                assert np.array_equal(whole, lane[key][row]), key  # type: ignore[index]


@given(steps())
def test_tokens_travel_in_the_narrowest_type_and_a_middle_stage_is_sent_none(
    case: tuple[Step, list[int]],
) -> None:
    step, numbers = case
    writer = StepWriter(NAMES, numbers)
    sizes = {}
    for needs in (Needs.LAYOUT, ALL):
        [message] = writer.write(step, [View(needs=needs)], View()).messages
        sizes[needs] = len(message)
        assert (b'"tokens"' in message.tobytes()) == (needs != Needs.LAYOUT)
    most = max(int(np.max(lane["input_ids"])) for lane in step.lanes)
    [message] = writer.write(step, [View()], View()).messages
    dtype = "|u1" if most < 2**8 else "<u2" if most < 2**16 else "<u4"
    assert f'"tokens", "{dtype}"'.encode() in message.tobytes()
    assert sizes[Needs.LAYOUT] < sizes[ALL]


def test_a_lane_has_targets_that_do_not_follow_from_its_tokens() -> None:
    """The case that the property above rests on: a document that goes on after its piece, and masked tokens."""
    piece = (1, 0, 0, 0, 1, 0, 1, 5, 0, 0, 0, 0)
    plan = Plan(
        step=0, lane_offsets=np.array([0, 1]), pieces=np.array([piece], PIECE), offsets=np.array([0, 1])
    )
    lanes = build(mixture("shifted"), plan, [0])
    targets = np.asarray(lanes[0]["targets"])[0, :5].tolist()
    assert targets == [IGNORE, 103, 104, IGNORE, 106], "106 is in the next piece"
    state = StreamState.initial(4)
    step = Step(plan=plan, before=state, after=state, lanes=lanes, quarantined=())
    for cp in (1, 2, 3, SEQ_LEN):
        for view in views(cp, "zigzag"):
            cut, received = travelled(step, [0], view)
            assert_same(cut.lanes, received.lanes)


FAILURE = Failure(source="a", path="x", row_id=1, epoch=0, window=0, position=1, reason="bad")


class Foreign(Exception):
    """An error of somebody else's code."""


class Talkative(OmniloadError):
    """An error made from other things than its text."""

    def __init__(self, source: str, row: int) -> None:
        super().__init__(f"{source}: row {row} is bad")


@pytest.mark.parametrize(
    "error",
    [
        SourceNotFound("source 'a': x matches no file"),
        TooManyFailures("source 'a': 7 bad rows\tand ü"),
        NotFound("s3://b/x", "no such key"),
        KeyError("b"),
        OSError(5, "Input/output error", "/data"),
        MemoryError(),
    ],
)
def test_an_error_has_the_same_type_and_text_on_every_rank(error: Exception) -> None:
    for item in (error, error_from_json(error_to_json(error))):
        again = error_from_json(error_to_json(item))
        assert type(again) is type(error)
        assert str(again) == str(error)
    received = written_and_read(error)
    assert type(received) is type(error)
    assert str(received) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        Foreign("no\nway"),
        Talkative("a", 3),
        KeyboardInterrupt("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_an_error_that_other_ranks_cannot_make_is_named_in_the_text(error: BaseException) -> None:
    again = error_from_json(error_to_json(error))
    assert type(again) is OmniloadError
    assert str(again).startswith(f"{type(error).__name__}: ")
    assert "\n" not in str(again)


def test_every_error_of_the_package_survives_the_way() -> None:
    kinds = [
        kind
        for kind in vars(omniload.errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        again = error_from_json(error_to_json(kind("what, where, how")))
        assert type(again) is kind
        assert str(again) == "what, where, how"


def test_rows_over_a_budget_are_written_down_by_the_source_alone() -> None:
    received = written_and_read(TooManyFailures("too many", failures=(FAILURE,)))
    assert isinstance(received, TooManyFailures)
    assert received.failures == ()


def test_the_end_of_the_stream_brings_its_state() -> None:
    after = StreamState.initial(4)
    received = written_and_read(End(after=after, quarantined=()))
    assert isinstance(received, End)
    assert received.after.to_json(NAMES) == after.to_json(NAMES)


def written_and_read(item: Any) -> Any:
    [message] = StepWriter(NAMES, [0]).write(item, [View()], View()).messages
    return StepReader(NAMES, [0], View(), DERIVED).read(message, StreamState.initial(4))
