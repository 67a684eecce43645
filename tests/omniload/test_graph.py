"""Planning a step on a graph: whatever the ways of packing and balancing, each token is placed once, or waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import MixtureError, PlanError
from omniload.mixture import Mixture
from omniload.pieces import PIECE
from omniload.planner.balancing import METHODS, Infeasible, Items
from omniload.planner.checks import check_plan
from omniload.planner.graph import DGraph, NotEnough
from omniload.planner.plan import Placement, Plan
from omniload.planner.rules import StepRules
from omniload.planner.strategies import declared, load_strategy

SEQ_LEN = 16
STEP = 5
NAMES = ["code", "web"]


def mixture(**keys: Any) -> Mixture:
    sources = {name: {"path": "x", "weight": 1} for name in NAMES}
    return Mixture.load({"seq_len": SEQ_LEN, "packs": 6, "lanes": 3, "sources": sources, **keys})


def pieces(
    lengths: Sequence[int], *, born: int = STEP, first_row: int = 0, patches: Sequence[int] = ()
) -> np.ndarray:
    """Whole documents, trained on from the second token."""
    table = np.zeros(len(lengths), PIECE)
    table["length"], table["targets"] = lengths, np.array(lengths, np.int64) - 1
    table["row"] = np.arange(len(lengths)) + first_row
    table["source"] = table["row"] % 2
    table["born"] = born
    if patches:
        table["patches"] = patches
    return table


def graph_of(spec: Mixture, carried: np.ndarray, supply: Sequence[int] = ()) -> DGraph:
    """A graph whose sources hold documents of these lengths."""
    rest = list(supply)

    def draw(candidates: np.ndarray, tokens: int, num_pieces: int, _: object) -> np.ndarray:
        drawn: list[int] = []
        have = int(candidates["length"].sum())
        while rest and have + sum(drawn) < tokens and len(candidates) + len(drawn) < num_pieces:
            drawn.append(rest.pop(0))
        return pieces(drawn, first_row=len(candidates) + 1000)

    return DGraph(step=STEP, rules=StepRules.of(spec), carried=carried, draw=draw)


def tokens_of(table: np.ndarray) -> list[tuple[int, int]]:
    """Every token of some pieces, by row and place."""
    return [
        (row, start + i)
        for row, start, length in zip(*(table[k].tolist() for k in ("row", "start", "length")), strict=True)
        for i in range(length)
    ]


lengths_drawn = st.lists(st.integers(1, SEQ_LEN), max_size=60)


@pytest.mark.parametrize("labels", ["shifted", "hf"])
@pytest.mark.parametrize("packing", ["best_fit", "first_fit", "concatenate", "workload", "none"])
@settings(max_examples=1000)
@given(
    carried=st.lists(st.integers(1, SEQ_LEN), max_size=8),
    supply=lengths_drawn,
    balance=st.sampled_from(sorted(METHODS)),
    delay=st.sampled_from([None, {"thresholds": [12], "max_steps": 2}, {"thresholds": [8, 14]}]),
    born=st.integers(0, STEP - 1),
)
def test_each_token_is_placed_once_or_waits_and_lanes_are_as_declared(
    packing: str, labels: str, carried: list[int], supply: list[int], balance: str, delay: Any, born: int
) -> None:
    spec = mixture(packing=packing, balance=balance, delay=delay, labels=labels)
    graph = graph_of(spec, pieces(carried, born=born), supply)
    try:
        plan = declared(graph)
    except NotEnough:
        if packing != "none":  # BFD and FFD fill all packs but one by half at least
            assert sum(carried) + sum(supply) < 6 * SEQ_LEN * 2
        assert len(graph.candidates) == len(carried) + len(supply), "nothing is left to draw"
        return
    left = graph.carried()
    assert sorted(tokens_of(plan.pieces) + tokens_of(left)) == sorted(tokens_of(graph.candidates))
    check_plan(plan, STEP, graph.candidates, left, graph.rules, "test:it")
    tokens = np.add.reduceat(plan.pieces["length"].astype(np.int64), plan.offsets[:-1])
    assert tokens.max() <= (SEQ_LEN if packing != "workload" else 6 // 3 * SEQ_LEN * 3 // 2)
    assert np.diff(plan.lane_offsets).tolist() == [1 if packing == "workload" else 2] * 3
    if packing == "concatenate" and (labels == "hf" or SEQ_LEN not in graph.candidates["length"]):
        # With shifted labels a document as long as a pack might go on after it, and is not cut.
        assert tokens.tolist() == [SEQ_LEN] * 6, "no padding"
    # Documents are of trained tokens only, so what is no target are first or last tokens of documents or parts.
    for table in (plan.pieces, left):
        length, start = table["length"].astype(np.int64), table["start"].astype(np.int64)
        whole = graph.candidates["length"][np.searchsorted(graph.candidates["row"], table["row"])]
        ends = start + length == whole
        expected = length - ends if labels == "shifted" else length - 1
        assert table["targets"].tolist() == expected.tolist()


@given(lengths=st.lists(st.integers(1, SEQ_LEN), min_size=40, max_size=60), data=st.data())
@settings(max_examples=1000)
def test_caps_hold_in_every_lane_or_are_named(lengths: list[int], data: st.DataObject) -> None:
    patches = data.draw(st.lists(st.integers(0, 8), min_size=len(lengths), max_size=len(lengths)))
    packing = data.draw(st.sampled_from(["best_fit", "first_fit", "workload", "none"]))
    cap = data.draw(st.integers(8, 60))
    plain_text_follows = data.draw(st.booleans())
    spec = mixture(
        packing=packing, balance=data.draw(st.sampled_from(sorted(METHODS))), caps={"patches": cap}
    )
    graph = graph_of(
        spec, pieces(lengths, born=STEP - 1, patches=patches), [8] * 1000 if plain_text_follows else []
    )
    try:
        plan = declared(graph)
    except PlanError as error:
        message = str(error)
    except NotEnough:
        assert not plain_text_follows, "there is enough that fits"
        return
    else:
        first = plan.offsets[plan.lane_offsets[:-1]]
        assert np.add.reduceat(plan.pieces["patches"].astype(np.int64), first).max() <= cap
        return
    assert f"caps.patches {cap}" in message
    assert packing == "none", "which takes the oldest, whatever they bring"


def test_more_is_drawn_where_no_choice_of_packs_fits_the_caps() -> None:
    heavy = pieces([16] * 8, born=STEP - 1, patches=[8] * 8)
    spec = mixture(packing="first_fit", caps={"patches": 9})
    with pytest.raises(NotEnough):
        declared(graph_of(spec, heavy))
    graph = graph_of(spec, heavy, [16] * 40)
    plan = declared(graph)
    assert np.add.reduceat(plan.pieces["patches"], plan.offsets[plan.lane_offsets[:-1]]).tolist() == [8] * 3
    assert [edge.name for edge in graph.lineage].count("mix") > 1


def test_a_delayed_outlier_waits_for_one_per_lane_and_others_take_its_place() -> None:
    spec = mixture(delay={"thresholds": [15], "max_steps": 3})
    graph = graph_of(spec, pieces([16, 16], born=STEP - 1), [4] * 100)
    plan = declared(graph)
    assert 16 not in plan.pieces["length"]
    assert graph.carried()["length"].tolist().count(16) == 2
    together = graph_of(spec, pieces([16, 16], born=STEP - 1), [16, *[4] * 100])
    plan = declared(together)
    assert (
        np.add.reduceat(plan.pieces["length"] == 16, plan.offsets[plan.lane_offsets[:-1]]).tolist() == [1] * 3
    )
    overdue = graph_of(spec, pieces([16, 16], born=STEP - 3), [4] * 100)
    assert declared(overdue).pieces["length"].tolist().count(16) == 2
    at_the_end = graph_of(spec, pieces([16] * 2, born=STEP - 1), [8] * 8)
    assert declared(at_the_end).pieces["length"].tolist().count(16) == 2, "nothing is left to wait for"


def lost(plan: Plan) -> Plan:
    return dataclasses.replace(
        plan, pieces=plan.pieces[:-1], offsets=np.append(plan.offsets[:-1], plan.offsets[-1] - 1)
    )


def twice(plan: Plan) -> Plan:
    doubled = plan.pieces.copy()
    doubled[0] = doubled[-1]
    return dataclasses.replace(plan, pieces=doubled)


def foreign(plan: Plan) -> Plan:
    other = plan.pieces.copy()
    other["row"][3] += 50_000
    return dataclasses.replace(plan, pieces=other)


def shorter(plan: Plan) -> Plan:
    other = plan.pieces.copy()
    other["length"][3] -= 1
    return dataclasses.replace(plan, pieces=other)


def changed(name: str) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        other = plan.pieces.copy()
        other[name][3] += 1
        return dataclasses.replace(plan, pieces=other)

    return change


def cut_in_two(plan: Plan) -> Plan:
    parts = np.repeat(plan.pieces, [2, *[1] * (len(plan.pieces) - 1)])
    parts["length"][:2], parts["targets"][:2], parts["start"][1] = 2, [2, 1], 2
    return dataclasses.replace(plan, pieces=parts, offsets=np.append(0, plan.offsets[1:] + 1))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (changed("targets"), "tokens 0 … 4.* is changed"),
        (changed("patches"), "is changed"),
        (changed("born"), "is changed"),
        (cut_in_two, "cut though it may not be"),
        (lost, r"a piece of source '(code|web)' \(epoch 0, file 0, block 0, row \d+, tokens 0 … 4\) is lost"),
        (twice, "is lost|is there twice"),
        (foreign, "is lost|of another step"),
        (shorter, "is lost|is there twice"),
        (lambda plan: None, "returned NoneType and no Plan; end it with graph.plan"),
        (lambda plan: dataclasses.replace(plan, step=7), "returned the plan of step 7"),
        (lambda plan: dataclasses.replace(plan, lane_offsets=np.array([0, 3, 6])), "made 2 lanes"),
        (lambda plan: dataclasses.replace(plan, lane_offsets=np.array([0, 0, 3, 6])), "a lane is empty"),
        (
            lambda plan: dataclasses.replace(plan, lane_offsets=np.array([0, 1, 4, 6])),
            "unequal numbers of packs",
        ),
        (
            lambda plan: dataclasses.replace(plan, offsets=np.array([0, 5, *plan.offsets[2:]])),
            "pack 0 has 20 tokens, over seq_len 16",
        ),
    ],
)
def test_a_strategy_that_breaks_a_law_is_caught_and_named(
    tamper: Callable[[Plan], Any], message: str
) -> None:
    graph = graph_of(mixture(), pieces([4] * 40, born=STEP - 1, patches=[1] * 40))
    plan = declared(graph)
    check_plan(plan, STEP, graph.candidates, graph.carried(), graph.rules, "mine:plan")
    with pytest.raises(PlanError, match=f"strategy mine:plan: step 5: .*({message})"):
        check_plan(tamper(plan), STEP, graph.candidates, graph.carried(), graph.rules, "mine:plan")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros(6), r"balance 'mine': gave float64\[6\]; return the lane of each pack, int64\[6\]"),
        (np.zeros(5, int), r"gave int64\[5\]"),
        (np.array([0, 0, 1, 1, 2, 3]), r"gave lanes 0 … 3; there are 0 … 2"),
        (np.array([0, 0, 0, 1, 2, 2]), "gave lane 0 3 packs; give every lane 2"),
    ],
)
def test_a_balance_function_that_breaks_a_rule_is_named(answer: np.ndarray, message: str) -> None:
    def mine(_: Any) -> np.ndarray:
        return answer

    graph = graph_of(mixture(), pieces([8] * 40)).mix().pack()
    with pytest.raises(PlanError, match=message):
        graph.balance(mine)


def test_a_balance_function_may_say_that_it_finds_no_lanes() -> None:
    def gives_up(_: Items) -> np.ndarray:
        raise Infeasible("too few of a kind", cap=None, needed=3, bound=2)

    graph = graph_of(mixture(), pieces([8] * 40)).mix().pack()
    with pytest.raises(PlanError, match="step 5: balance 'gives_up': too few of a kind"):
        graph.balance(gives_up)


def test_a_pack_function_says_which_pack_each_candidate_goes_to_and_which_wait() -> None:
    def in_pairs(lengths: np.ndarray, capacity: int) -> np.ndarray:
        assert capacity == SEQ_LEN
        pack = np.arange(len(lengths)) // 2
        pack[-1] = -1
        return pack

    graph = graph_of(mixture(), pieces([8] * 15))
    plan = graph.mix().pack(in_pairs).balance("none").plan()
    assert plan.pieces["row"].reshape(6, 2).tolist() == [[i, i + 1] for i in (0, 6, 2, 8, 4, 10)]
    assert graph.carried()["row"].tolist() == [12, 13, 14]
    for wrong, message in [
        (lambda n, _: np.zeros(3, int), r"gave int64\[3\]; return the pack of each candidate, int64\[15\]"),
        (lambda n, _: np.zeros(len(n), int), "a pack has 120 tokens, over seq_len 16"),
    ]:
        with pytest.raises(PlanError, match=message):
            graph_of(mixture(), pieces([8] * 15)).mix().pack(wrong)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: g.balance(), "no packs yet; call mix"),
        (lambda g: g.mix().pack().plan(), "the packs are not balanced"),
        (lambda g: g.mix().pack("best"), "pack: 'best' is none of best_fit"),
        (lambda g: g.mix().pack("none"), "pack 'none': makes rows of other lengths .*; set it to none"),
        (lambda g: g.mix().pack("workload"), "pack 'workload': makes rows of other .*; set it to workload"),
        (lambda g: g.distribute("dq"), "placement: there is no axis 'dq'; "),
        (lambda g: g.broadcast_at("cp", "tq"), "placement: there is no axis 'tq'; known are: dp"),
        (lambda g: g.mix().pack().balance("ltp"), "balance: there is no 'ltp'; did you mean 'lpt'"),
        (lambda g: g.mix().cost(lambda n, p, f: n * np.nan).pack().balance(), "cost .*nan"),
        (lambda g: g.mix().cost(lambda n, p, f: -n).pack().balance(), "cost .*-"),
        (lambda g: g.delay((12, 8), max_steps=2), r"thresholds \[12, 8\] do not ascend"),
        (lambda g: g.delay((12,)), "max_steps 0 lets no piece wait"),
        (lambda g: g.distribute("dp", module="imgae"), "no module 'imgae'; did you mean 'image'"),
        (lambda g: g.view("video").broadcast_at("cp"), "no module 'video'"),
    ],
)
def test_a_strategy_written_wrong_says_what_is_missing(build: Callable[[DGraph], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build(graph_of(mixture(), pieces([8] * 40)))


def test_a_view_sees_what_an_encoder_works_on_and_placement_is_part_of_the_plan() -> None:
    table = pieces([8] * 15, patches=[0, 4, 8] * 5)
    plain = declared(graph_of(mixture(), table))
    graph = graph_of(mixture(), table).mix().pack().balance()
    view = graph.view("image")
    assert view.samples.tolist() == [i for i in range(15) if i % 3]
    assert view.lengths.tolist() == [4, 8] * 5
    graph.distribute("dp").broadcast_at("cp", "tp")
    view.distribute("world", 2)
    plan = graph.plan()
    assert dict(plan.placement) == {
        "backbone": Placement(axis="dp", broadcast=("cp", "tp")),
        "image": Placement(axis="world", group_size=2),
    }
    assert plan != plain
    assert plain == declared(graph_of(mixture(), table))
    assert [edge.name for edge in graph.lineage] == ["mix", "pack best_fit", "balance lpt"]


def test_what_a_strategy_is_shown_it_cannot_change() -> None:
    graph = graph_of(mixture(), pieces([8] * 15)).mix()
    with pytest.raises(ValueError, match="read-only"):
        graph.candidates["length"][0] = 1


def test_a_pack_function_that_lets_all_wait_is_named_while_sources_go_on_for_ever() -> None:
    draws: list[int] = []

    def draw(candidates: np.ndarray, tokens: int, num_pieces: int, _: object) -> np.ndarray:
        missing = max(tokens - int(candidates["length"].sum()), 0)
        draws.append(missing)
        return pieces([8] * -(-missing // 8))

    graph = DGraph(step=STEP, rules=StepRules.of(mixture()), carried=pieces([]), draw=draw)
    with pytest.raises(
        PlanError, match=r"pack 'none_yet': makes fewer than 6 packs of .* enough for 64 steps"
    ):
        graph.mix().pack(none_yet)
    assert len(draws) < 20


def none_yet(lengths: np.ndarray, capacity: int) -> np.ndarray:
    return np.full(len(lengths), -1)


def test_packs_that_need_more_than_was_asked_for_are_drawn_for() -> None:
    """Rows are counted in documents, which are here packed several in a row."""
    graph = graph_of(mixture(packing="none"), pieces([2] * 30, born=STEP - 1), [2] * 60)
    plan = graph.mix(pieces=40).pack("best_fit").balance().plan()
    assert plan.num_packs == 6
    assert len(graph.candidates) > 40


def test_lanes_filled_by_a_budget_are_packed_in_no_other_way() -> None:
    spec = mixture(packing="none", packs=None, lane_tokens=32)
    with pytest.raises(PlanError, match="pack 'best_fit': lane_tokens fills lanes by 'none' only"):
        graph_of(spec, pieces([8] * 40)).mix().pack("best_fit")


@pytest.mark.parametrize(
    ("caps", "amount", "packing"),
    [
        *(
            ({"patches": 5}, "6 patches", way)
            for way in ("best_fit", "first_fit", "concatenate", "workload", "none")
        ),
        *(({"cost": 100}, r"\d+ cost", way) for way in ("best_fit", "first_fit", "concatenate", "none")),
    ],
)
def test_a_piece_that_no_lane_may_hold_is_named_and_waits_not_for_ever(
    caps: dict[str, int], amount: str, packing: str
) -> None:
    table = pieces([8] * 60, patches=[0] * 59 + [6])
    message = rf"a piece of source '(code|web)' \(.*\) has {amount}, over caps\.\w+ \d+ a lane"
    with pytest.raises(PlanError, match=message):
        declared(graph_of(mixture(packing=packing, caps=caps), table))


def test_caps_make_a_pack_wait_that_has_not_waited_before_one_that_has() -> None:
    table = pieces([SEQ_LEN] * 6, patches=[15, 8, 8, 8, 0, 0])
    table["born"][0] = STEP - 3
    spec = mixture(packs=4, lanes=2, caps={"patches": 16})
    plan = declared(graph_of(spec, table))
    assert sorted(plan.pieces["patches"].tolist()) == [0, 8, 8, 15], "15 and three times 8 fit no two lanes"


def test_a_cap_beyond_any_lane_is_no_cap() -> None:
    table = pieces([8] * 15, patches=[1] * 15)
    free, capped = (mixture(**keys) for keys in ({}, {"caps": {"patches": 2**61}}))
    assert declared(graph_of(free, table)).num_packs == declared(graph_of(capped, table)).num_packs
    with pytest.raises(MixtureError, match=r"caps\.tokens: input should be less than"):
        mixture(caps={"tokens": 2**70})


def test_a_strategy_is_found_by_its_name() -> None:
    assert load_strategy(None) is declared
    assert load_strategy("omniload.planner.strategies:declared") is declared
    with pytest.raises(MixtureError, match="strategy: nowhere:plan cannot be imported"):
        load_strategy("nowhere:plan")
    for name in ("", "strategies", ":plan", "strategies:"):
        with pytest.raises(
            MixtureError, match=f"strategy: '{name}' is not of the form package.module:function"
        ):
            load_strategy(name)
    with pytest.raises(MixtureError, match=r"strategy: omniload\.errors:__doc__ is not a function"):
        load_strategy("omniload.errors:__doc__")


def test_two_levels_are_given_by_a_strategy() -> None:
    graph = graph_of(mixture(packs=12, lanes=6), pieces([16] * 20)).mix().pack()
    assert graph.balance("two_level", levels=3).plan().num_lanes == 6
    for method, levels in [("lpt", 3), ("two_level", 0)]:
        with pytest.raises(PlanError, match="are of 'two_level'; remove it"):
            graph.balance(method, levels=levels)
