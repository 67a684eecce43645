"""Partitions: every source is read, budgets hold, more budget is never worse, and what is lacking is said."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.scaling import (
    ActorLimits,
    ActorSpec,
    Budget,
    Partition,
    Reader,
    SourceProfile,
    partition,
    resized,
)
from omniload.scaling.grouping import grouped
from omniload.scaling.layout import UTILISATION
from tests.omniload.scaling import MIB, profile, profiles

PLENTY = Budget(cpus=1e9, memory_bytes=1 << 60)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[SourceProfile], dict[str, float], float, ActorLimits]:
    sources = draw(profiles())
    weights = [draw(st.sampled_from([0.0, 0.1, 1.0, 30.0])) for _ in sources]
    total = sum(weights) or 1.0
    shares = {one.name: weight / total for one, weight in zip(sources, weights, strict=True)}
    limits = ActorLimits(
        workers=draw(st.integers(1, 6)), memory_bytes=draw(st.integers(256, 8192)) * MIB, base_bytes=128 * MIB
    )
    # Up to a hundred readers of the slowest.
    slowest = min((one.tokens_per_s / (shares[one.name] or 1) for one in sources), default=1.0)
    return sources, shares, slowest * draw(st.floats(0.01, 100)), limits


budgets = st.builds(
    Budget, cpus=st.floats(0.01, 200), memory_bytes=st.integers(1, 200).map(lambda x: x << 29)
)


def check(plan: Partition, sources: list[SourceProfile], limits: ActorLimits) -> None:
    """What holds for every partition."""
    primaries = [actor for actor in plan.actors if not actor.shadow]
    for one in sources:
        hosts = [actor for actor in primaries if one.name in actor.sources]
        readers = [reader for actor in hosts for reader in actor.readers if reader.source == one.name]
        assert sorted(reader.index for reader in readers) == list(range(readers[0].of))
        assert {reader.of for reader in readers} == {len(readers)}
        assert len(hosts) == len(readers), "an actor has one reader of a source at most"
        assert all(reader.memory_bytes == one.resident_bytes for reader in readers)
    assert {name for actor in primaries for name in actor.sources} == {one.name for one in sources}
    assert len({actor.name for actor in plan.actors}) == len(plan.actors)
    for actor in primaries:
        assert 1 <= actor.workers <= min(limits.workers, len(actor.readers))
        assert actor.memory_bytes <= limits.memory_bytes or len(actor.readers) == 1


@given(problems(), budgets, st.booleans())
def test_every_source_is_read_and_budgets_hold(
    problem: tuple[list[SourceProfile], dict[str, float], float, ActorLimits], budget: Budget, shadows: bool
) -> None:
    sources, shares, demand, limits = problem
    plan = partition(sources, shares, demand, budget, limits=limits, shadows=shadows)
    check(plan, sources, limits)
    assert plan.cpus <= budget.cpus
    least = {one.resource: one.least for one in plan.shortfalls}
    assert plan.memory_bytes <= budget.memory_bytes or plan.memory_bytes == least["memory_bytes"]
    assert bool(plan.shortfalls) == (plan.tokens_per_s < demand)
    for one in sources:
        gives = plan.num_actors()[one.name] * UTILISATION * one.tokens_per_s
        assert shares[one.name] * plan.tokens_per_s <= gives * (1 + 1e-9)
    event(f"short of {sorted(least)}")
    event(f"several readers: {max(plan.num_actors().values()) > 1}")
    event(f"rate 0: {plan.tokens_per_s == 0}")


@given(problems(), budgets, st.floats(1, 10), st.floats(1, 10), st.booleans())
def test_more_budget_is_never_worse(
    problem: tuple[list[SourceProfile], dict[str, float], float, ActorLimits],
    budget: Budget,
    cpus: float,
    memory: float,
    shadows: bool,
) -> None:
    sources, shares, demand, limits = problem
    more = Budget(cpus=budget.cpus * cpus, memory_bytes=int(budget.memory_bytes * memory))
    before, after = (
        partition(sources, shares, demand, each, limits=limits, shadows=shadows) for each in (budget, more)
    )
    assert before.tokens_per_s <= after.tokens_per_s
    event(f"better: {before.tokens_per_s < after.tokens_per_s}")


@given(problems(), budgets, st.randoms())
def test_the_order_of_the_sources_does_not_matter(
    problem: tuple[list[SourceProfile], dict[str, float], float, ActorLimits],
    budget: Budget,
    random: Random,
) -> None:
    sources, shares, demand, limits = problem
    shuffled = sources.copy()
    random.shuffle(shuffled)
    again = {one.name: shares[one.name] for one in shuffled}
    assert partition(shuffled, again, demand, budget, limits=limits) == partition(
        sources, shares, demand, budget, limits=limits
    )


@given(problems(), budgets)
def test_what_is_lacking_is_exactly_what_would_do(
    problem: tuple[list[SourceProfile], dict[str, float], float, ActorLimits], budget: Budget
) -> None:
    sources, shares, demand, limits = problem
    plan = partition(sources, shares, demand, budget, limits=limits)
    needed = {one.resource: one.needed for one in plan.shortfalls}
    enough = Budget(
        cpus=needed.get("cpus", budget.cpus) * (1 + 1e-9),
        memory_bytes=int(needed.get("memory_bytes", budget.memory_bytes)),
    )
    assert partition(sources, shares, demand, enough, limits=limits).shortfalls == ()
    if "memory_bytes" in needed:
        less = replace(enough, memory_bytes=enough.memory_bytes - 1)
        [short] = partition(sources, shares, demand, less, limits=limits).shortfalls
        assert (short.resource, short.needed, short.available) == (
            "memory_bytes",
            enough.memory_bytes,
            less.memory_bytes,
        )


def test_a_heavy_source_has_actors_of_its_own_and_cheap_ones_share() -> None:
    sources = [profile("video", 100.0), *(profile(f"text{i}", 1e6) for i in range(9))]
    shares = {one.name: 0.1 for one in sources}
    plan = partition(sources, shares, 8000.0, PLENTY)
    # 800 tokens/s at 80 each: 10 readers.
    assert [actor.sources for actor in plan.actors[:-1]] == [("video",)] * 10
    assert [actor.readers[0].index for actor in plan.actors[:-1]] == list(range(10))
    assert plan.actors[-1].sources == tuple(f"text{i}" for i in range(9))
    assert [actor.workers for actor in plan.actors] == [1] * 10 + [4]
    assert plan.num_actors()["video"] == 10
    assert plan.cpus == pytest.approx(8 + 9 * 800 / 1e6)
    assert plan.tokens_per_s == 8000.0
    assert plan.memory_bytes == (11 * 128 + 19 * 100) * MIB


def test_a_budget_that_is_too_small_says_of_what_and_how_much() -> None:
    sources = [profile("a", 100.0), profile("b", 100.0)]
    shares = {"a": 0.5, "b": 0.5}
    plan = partition(sources, shares, 3200.0, Budget(cpus=8.0, memory_bytes=1 << 40))
    [short] = plan.shortfalls
    assert (short.resource, short.available) == ("cpus", 8.0)
    assert short.needed == pytest.approx(32.0)
    assert str(short) == "32.00 processors are needed, 24.00 more than there are"
    assert 0.94 * 800 <= plan.tokens_per_s <= 800
    plan = partition(sources, shares, 3200.0, Budget(cpus=100.0, memory_bytes=200 * MIB))
    [short] = plan.shortfalls
    # 40 actors of one reader; at rate 0 one of two.
    assert short.needed == 40 * (100 + 128) * MIB
    assert short.least == plan.memory_bytes == (2 * 100 + 128) * MIB
    assert plan.tokens_per_s == 0
    assert str(short).endswith(
        "8,920 MiB more than there are; one reader for each source alone takes 328 MiB"
    )


def test_shadows_double_the_memory_and_take_no_processors() -> None:
    sources, shares = [profile("a", 100.0), profile("b", 1e6)], {"a": 0.5, "b": 0.5}
    plain, guarded = (partition(sources, shares, 400.0, PLENTY, shadows=shadows) for shadows in (False, True))
    assert guarded.memory_bytes == 2 * plain.memory_bytes
    assert guarded.cpus == plain.cpus
    assert guarded.actors[: len(plain.actors)] == plain.actors
    shadows = guarded.actors[len(plain.actors) :]
    assert [one.name for one in shadows] == ["a#0.shadow", "a#1.shadow", "a#2.shadow", "#0.shadow"]
    assert [one.readers for one in shadows] == [one.readers for one in plain.actors]
    assert {one.shadow for one in shadows} == {True}


@pytest.mark.parametrize("demand", [1e12, 1e300])
def test_a_demand_beyond_all_measure_is_answered(demand: float) -> None:
    plan = partition([profile()], {"a": 1.0}, demand, Budget(cpus=4, memory_bytes=1 << 32))
    assert {one.resource for one in plan.shortfalls} == {"cpus", "memory_bytes"}
    check(plan, [profile()], ActorLimits())


def test_a_source_that_is_not_drawn_from_yet_has_a_reader() -> None:
    plan = partition([profile("a"), profile("b")], {"a": 1.0, "b": 0.0}, 1.0, PLENTY)
    [actor] = plan.actors
    assert actor.sources == ("a", "b")


def test_hundreds_of_sources_take_few_actors() -> None:
    rates = np.random.default_rng(0).lognormal(12, 2, 300)
    sources = [profile(f"s{i:03}", float(rate)) for i, rate in enumerate(rates)]
    plan = partition(
        sources, {one.name: 1 / 300 for one in sources}, 1e6, Budget(cpus=64, memory_bytes=80 << 30)
    )
    check(plan, sources, ActorLimits())
    assert len(plan.actors) < 60


def test_partitions_survive_json() -> None:
    sources = [profile("a", 100.0), profile("é", 1e6)]
    plan = partition(sources, {"a": 0.5, "é": 0.5}, 800.0, Budget(cpus=3, memory_bytes=1 << 30), shadows=True)
    assert plan.shortfalls
    assert any(actor.shadow for actor in plan.actors)
    assert Partition.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert ActorSpec.from_json(json.loads(json.dumps(plan.actors[0].to_json()))) == plan.actors[0]


@given(problems(), st.data())
def test_another_number_of_actors_leaves_all_other_readers_where_they_are(
    problem: tuple[list[SourceProfile], dict[str, float], float, ActorLimits], data: st.DataObject
) -> None:
    sources, shares, demand, limits = problem
    plan = partition(sources, shares, demand, PLENTY, limits=limits, shadows=data.draw(st.booleans()))
    source = data.draw(st.sampled_from(sorted(shares)))
    count = data.draw(st.integers(1, 20))
    between = resized(plan.actors, source, data.draw(st.integers(1, 20)), cpus=6.0)
    after = resized(between, source, count, cpus=6.0)
    check(replace(plan, actors=between), sources, limits)
    check(replace(plan, actors=after), sources, limits)
    of_source = [reader for actor in after for reader in actor.readers if reader.source == source]
    guarded = any(actor.shadow for actor in plan.actors)
    assert sorted(reader.index for reader in of_source) == sorted([*range(count)] * (1 + guarded))
    assert sum(reader.cpus for reader in of_source) == pytest.approx(6.0 * (1 + guarded))

    def others(actors: tuple[ActorSpec, ...]) -> dict[str, list[Reader]]:
        kept = {actor.name: [one for one in actor.readers if one.source != source] for actor in actors}
        return {name: readers for name, readers in kept.items() if readers}

    assert others(after) == others(plan.actors)
    stays = min(count, sum(actor.sources == (source,) for actor in between) // (1 + guarded))
    mine = [
        [actor.name for actor in actors if actor.sources == (source,) and not actor.shadow]
        for actors in (between, after)
    ]
    assert mine[0][:stays] == mine[1][:stays]


@given(
    st.lists(st.tuples(*[st.floats(0, 1.2)] * 2), max_size=30).map(
        lambda rows: np.array(rows, np.float64).reshape(-1, 2)
    )
)
def test_groups_hold_every_item_once_and_none_is_overfilled(load: np.ndarray) -> None:
    groups = grouped(load)
    assert sorted(i for group in groups for i in group) == list(range(len(load)))
    for group in groups:
        assert group
        assert load[group].sum(axis=0).max() <= 1 or len(group) == 1


BAD = {
    "no profiles": ([], {}, 1.0, "no profiles"),
    "twice": ([profile("a"), profile("a")], {"a": 1.0}, 1.0, "'a' has several profiles"),
    "no share": ([profile("a"), profile("b")], {"a": 1.0}, 1.0, "no share for source 'b'"),
    "unknown": ([profile("code")], {"code": 1.0, "cods": 0.1}, 1.0, "did you mean 'code'"),
    "negative share": ([profile()], {"a": -1.0}, 1.0, "the share of 'a' is -1.0"),
    "share that is no number": ([profile()], {"a": float("nan")}, 1.0, "the share of 'a' is nan"),
    "no demand": ([profile()], {"a": 1.0}, 0.0, "a demand of 0.0"),
    "endless demand": ([profile()], {"a": 1.0}, float("inf"), "a demand of inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_partitioned_is_refused_in_one_line(case: str) -> None:
    sources, shares, demand, message = BAD[case]
    with pytest.raises(PlanError, match=message) as error:
        partition(sources, shares, demand, PLENTY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("cpus", "memory"), [(0.0, 1), (float("nan"), 1), (1.0, 0), (float("inf"), 1)])
def test_a_budget_of_nothing_is_refused(cpus: float, memory: int) -> None:
    with pytest.raises(PlanError, match="budget: "):
        Budget(cpus=cpus, memory_bytes=memory)


@pytest.mark.parametrize("keys", [{"workers": 0}, {"base_bytes": 1 << 40}, {"base_bytes": -1}])
def test_limits_that_allow_no_actor_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="limits: "):
        ActorLimits(**keys)
