"""What the planner's benchmarks are made of: lengths, metadata without data, bounds, quantities that are not timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import registry
from benchmarks.definition import Contender, Kind, Measure, Settings
from benchmarks.harness import interleave
from benchmarks.planning import lengths, multimodal
from benchmarks.planning.balance import Job, Way, outcome
from benchmarks.planning.bound import fewest_packs
from benchmarks.planning.metadata import SyntheticMetadata, mixture
from benchmarks.planning.strategies import timed
from omniload.pieces import Cursor
from omniload.planner import Planner, StreamState
from omniload.planner.packing import best_fit_decreasing

RANDOM = Way(name="random order", keys={"strategy": "benchmarks.planning.strategies:random_order"})


def exact(length: list[int], capacity: int) -> int:
    """The fewest packs there can be, by trying everything."""
    best = len(length)

    def place(i: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if i == len(length):
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= length[i]:
                rest = list(rooms)
                rest[rest.index(room)] -= length[i]
                place(i + 1, tuple(rest))
        place(i + 1, (*rooms, capacity - length[i]))

    place(0, ())
    return best


@settings(max_examples=300, deadline=None)
@given(
    st.integers(2, 20).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=7))
    )
)
def test_no_packing_has_fewer_packs_than_the_bound(case: tuple[int, list[int]]) -> None:
    capacity, length = case
    bound = fewest_packs(np.array(length), capacity)
    assert -(-sum(length) // capacity) <= bound <= exact(length, capacity)


def test_the_bound_counts_documents_that_cannot_share_a_pack() -> None:
    assert fewest_packs(np.array([6, 6, 6]), 10) == 3
    assert fewest_packs(np.array([6, 6, 4, 4]), 10) == 2
    assert fewest_packs(np.array([6, 6, 4, 4, 1]), 10) == 3


@pytest.mark.parametrize("context", [4096, 131_072])
def test_lengths_have_a_heavy_tail_up_to_the_context(context: int) -> None:
    drawn = lengths.heavy_tailed(np.random.default_rng(0), 50_000, context)
    assert 16 <= drawn.min() <= 100
    assert drawn.max() == context
    assert 550 < np.median(drawn) < 700
    longest = np.sort(drawn)[-len(drawn) // 20 :]
    assert longest.sum() > 0.17 * drawn.sum(), "one document in twenty holds more than a sixth of the tokens"


@pytest.mark.parametrize("draw", [lengths.with_images, lengths.with_clips])
def test_samples_with_images_fit_the_context(
    draw: Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]],
) -> None:
    tokens, patches = draw(np.random.default_rng(0), 20_000, 4096)
    assert tokens.max() <= 4096
    assert tokens.min() >= 16
    assert not (patches % 4).any()
    assert 0.3 < (patches > 0).mean() < 0.6
    assert ((tokens - patches // 4) >= 16).all(), "the rest is text"


def test_documents_are_cut_at_multiples() -> None:
    assert lengths.cut(np.array([3, 8, 17]), 8).tolist() == [3, 8, 8, 8, 1]


def test_metadata_are_the_same_however_they_are_read() -> None:
    def draw(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return generator.integers(1, 9, count), np.zeros(count, np.int64)

    metadata = SyntheticMetadata(draw=draw, seq_len=8, chunk_samples=10)
    whole = metadata.read(1, Cursor(window=3))
    rest = SyntheticMetadata(draw=draw, seq_len=8, chunk_samples=10).read(
        1, Cursor(window=3, position=3, sub=1)
    )
    assert rest.pieces.tolist() == whole.pieces[4:].tolist()
    assert rest.tokens.tolist() == whole.tokens[4:].tolist()
    assert len(rest.first_piece) == len(rest.tokens) + 1
    assert rest.end == whole.end
    assert metadata.read(0, Cursor(window=3)).tokens.tolist() != whole.tokens.tolist()
    long = whole.pieces["length"] == 8
    assert long.any()
    assert (whole.pieces["targets"] == whole.pieces["length"] - ~long).all()


def test_balancing_is_judged_on_the_same_documents_and_beats_random_order() -> None:
    job = Job(corpus="heavy tail", context=4096, packs=64, lanes=16, mesh="pp=2,dp=4", steps=4, warm_up=1)
    random, even = (outcome(job, way, 0) for way in (RANDOM, Way(name="lpt")))
    assert random.places == even.places, "the packs are the same"
    assert even.over_ranks < random.over_ranks
    assert even.even_time <= even.time < random.time
    assert even.bound >= 1
    assert outcome(job, Way(name="lpt"), 1) != even, "another round is of other lengths"


def test_stages_are_timed_and_the_plan_is_that_of_the_mixture() -> None:
    def draw(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return lengths.heavy_tailed(generator, count, 512), np.zeros(count, np.int64)

    plans = []
    for strategy in ("benchmarks.planning.strategies:timed", None):
        timed.clear()
        planner = Planner(
            mixture(3, seq_len=512, packs=16, lanes=4, strategy=strategy),
            SyntheticMetadata(draw=draw, seq_len=512),
            StreamState.initial(3),
        )
        plans.append([planner.next() for _ in range(3)])
        if strategy:
            assert set(timed.seconds) == {"mix", "pack", "cost", "balance", "freeze"}
            assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in timed.seconds.values())
            assert [plan and len(plan.pieces) for plan in plans[0]] == timed.num_samples
    assert [plan and plan.hash for plan in plans[0]] == [plan and plan.hash for plan in plans[1]]


def test_an_encoder_over_all_ranks_takes_less_time_than_one_beside_the_lanes() -> None:
    beside, spread = (
        multimodal.time_per_token(
            multimodal.CLIPS, multimodal.Way(name="", strategy=None, spread=spread), 4096, 2, 0
        )
        for spread in (False, True)
    )
    assert spread < beside


def test_a_quantity_is_what_a_run_returned_however_long_it_took() -> None:
    measure = Measure(name="ratio", unit="", scale=1e6, higher_is_better=False, reference="one", timed=False)
    one = Contender(name="one", measure="ratio", kind=Kind.OURS, run=lambda: 1_250_000)
    [[sample]] = interleave([one], 1)
    assert measure.value(sample.work, sample.seconds) == 1.25


@pytest.mark.parametrize("name", ["planner_balance", "planner_scale"])
def test_every_measure_has_its_reference_and_no_contender_is_there_twice(name: str) -> None:
    benchmark = registry.find(name)
    with benchmark.contenders(Settings(quick=True)) as contenders:
        named = [(contender.measure, contender.name) for contender in contenders]
        for measure in benchmark.measures:
            assert (measure.name, measure.reference) in named
            assert not measure.timed
        assert len(set(named)) == len(named)
        assert {measure for measure, _ in named} == {measure.name for measure in benchmark.measures}
        shown = [
            one for one in contenders if one.measure in ("plan", "padding, heavy tail, all at once, 32k")
        ]
        assert all(one.run() > 0 for one in shown)
        assert shown


def test_best_fit_is_at_the_bound_on_many_documents() -> None:
    length = lengths.heavy_tailed(np.random.default_rng(0), 4096, 32_768)
    packs = int(best_fit_decreasing(length, 32_768)[1].max()) + 1
    assert fewest_packs(length, 32_768) <= packs <= 1.01 * fewest_packs(length, 32_768)
