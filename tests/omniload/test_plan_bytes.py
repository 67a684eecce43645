"""Plans as bytes: the same plan comes back, small, and damage is noticed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.pieces import PIECE
from omniload.planner.plan import Placement, Plan
from omniload.planner.plan_bytes import plan_from_bytes, plan_to_bytes

_STEP = 2**20


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    # What the columns hold is drawn by numpy: hypothesis chooses how wide they are.
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    packs_of = random.integers(1, 4, draw(st.integers(1, 4)))
    pieces_of = random.integers(1, 5, packs_of.sum())
    pieces = np.zeros(pieces_of.sum(), PIECE)
    for name in PIECE.names or ():
        most = min(int(np.iinfo(PIECE[name]).max), draw(st.sampled_from([0, 1, 255, 256, 70_000, 2**32 - 1])))
        pieces[name] = random.integers(0, most, len(pieces), endpoint=True)
    lane_costs = np.zeros((0, 0), np.int64)
    if modules := draw(st.integers(0, 2)):
        lane_costs = random.integers(0, 2**62, (modules, len(packs_of)))
    placement = {
        name: Placement(axis=draw(st.sampled_from(["dp", "world"])), group_size=2, broadcast=("cp", "tp"))
        for name in draw(st.sets(st.sampled_from(["audio", "backbone", "image"])))
    }
    return Plan(
        step=draw(st.integers(0, 2**40)),
        pieces=pieces,
        offsets=np.concatenate([[0], np.cumsum(pieces_of)]),
        lane_offsets=np.concatenate([[0], np.cumsum(packs_of)]),
        lane_costs=lane_costs,
        placement=tuple(sorted(placement.items())),
    )


@settings(max_examples=1000)
@given(plans())
def test_a_plan_comes_back_from_its_bytes(plan: Plan) -> None:
    again = plan_from_bytes(plan_to_bytes(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    for name in ("pieces", "offsets", "lane_offsets", "lane_costs"):
        assert np.array_equal(getattr(again, name), getattr(plan, name))
    assert again.placement == plan.placement


@given(plans())
def test_a_plan_is_passed_on_as_it_came(plan: Plan) -> None:
    sent = pickle.dumps(plan)
    assert pickle.dumps(pickle.loads(sent)) == sent


@settings(max_examples=1000)
@given(plans(), st.data())
def test_damaged_bytes_are_noticed(plan: Plan, data: st.DataObject) -> None:
    whole = plan_to_bytes(plan)
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    try:
        again = plan_from_bytes(damaged)
        assert again == plan, "what was damaged says nothing"
        assert np.array_equal(again.lane_costs, plan.lane_costs)
    except PlanError as error:
        messages = str(error).splitlines()
    else:
        return
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("was", "says"),
    [(b'"modules":1', b'"modules":2'), (b'["epoch",2,0,0]', b'["epoch",1,0,0]'), (b"}", b"}?")],
)
def test_damage_that_the_hash_does_not_cover_is_noticed(was: bytes, says: bytes) -> None:
    plan = Plan(
        step=0,
        pieces=np.zeros(2, PIECE),
        offsets=np.arange(3),
        lane_offsets=np.arange(3),
        lane_costs=np.zeros((1, 2), np.int64),
    )
    whole = plan_to_bytes(plan)
    if was == b"}":  # the end of everything
        damaged = whole + says
    else:
        assert whole.count(was) == 1
        damaged = whole.replace(was, says)
    with pytest.raises(PlanError, match="no plan, or damaged"):
        plan_from_bytes(damaged)


def test_columns_that_claim_to_be_long_take_no_memory() -> None:
    plan = Plan(step=0, pieces=np.zeros(1, PIECE), offsets=np.array([0, 1]), lane_offsets=np.array([0, 1]))
    whole = plan_to_bytes(plan)
    at = whole.index(b'["source",1,0,0]')
    claims = whole[:at] + b'["source",9999999999,0,0]'[:16].ljust(16) + whole[at + 16 :]
    with pytest.raises(PlanError, match="no plan, or damaged"):
        plan_from_bytes(claims)


def test_a_large_step_takes_few_bytes_a_sample() -> None:
    generator = np.random.default_rng(0)
    pieces = np.zeros(65_536, PIECE)
    for name, most in [("source", 300), ("file", 100), ("block", 50), ("row", 100_000)]:
        pieces[name] = generator.integers(0, most, len(pieces))
    pieces["length"] = np.minimum(generator.lognormal(6.4, 1.2, len(pieces)) + 1, 8192)
    pieces["targets"] = pieces["length"] - 1
    pieces["born"] = _STEP - generator.integers(0, 3, len(pieces))
    plan = Plan(
        step=_STEP,
        pieces=pieces,
        offsets=np.arange(0, len(pieces) + 1, 8),
        lane_offsets=np.arange(0, len(pieces) // 8 + 1, 2),
        lane_costs=generator.integers(0, 2**40, (1, 4096)),
    )
    assert len(plan_to_bytes(plan)) < 24 * len(pieces)
