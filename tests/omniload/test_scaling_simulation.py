"""The model that the benchmark of scaling runs: exact where it can be told by hand, and the same every time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import registry
from benchmarks.definition import Settings
from benchmarks.planning import loading_model
from benchmarks.planning.loading_model import NAMES, Trainer


@pytest.mark.parametrize(
    ("busy_s", "compute_s", "iteration_s"), [(1.0, 3.0, 3.0), (3.0, 1.0, 3.0), (2.0, 2.0, 2.0)]
)
def test_what_takes_longer_sets_the_pace(busy_s: float, compute_s: float, iteration_s: float) -> None:
    trainer = Trainer()
    waits = [trainer.step({"a": busy_s, "b": 0.5}, compute_s)[0] for _ in range(10)]
    assert waits[0] == busy_s
    assert waits[1:] == [max(0.0, busy_s - compute_s)] * 9
    assert trainer.now == busy_s + compute_s + 9 * iteration_s


def test_what_is_prepared_ahead_hides_one_slow_step_but_not_three() -> None:
    trainer = Trainer()
    for _ in range(5):
        trainer.step({"a": 0.5}, 2.0)
    assert trainer.step({"a": 3.0}, 2.0)[0] == 0
    assert [trainer.step({"a": 3.0}, 2.0)[0] for _ in range(3)] != [0.0, 0.0, 0.0]


def test_costs_are_of_the_samples_whoever_trains_on_them() -> None:
    planned, shuffled = (
        loading_model.steps_of(0, 4, strategy)
        for strategy in (None, "benchmarks.planning.strategies:random_order")
    )
    for one, other in zip(planned, shuffled, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.cpu_s == pytest.approx(other.cpu_s, rel=1e-12)
        assert one.of_rank.sum() == pytest.approx(one.cpu_s.sum(), rel=1e-12)
        assert one.of_rank != pytest.approx(other.of_rank, rel=1e-3)
        assert one.compute_s < other.compute_s


def test_profiles_are_what_the_steps_cost() -> None:
    steps = loading_model.steps_of(0, 48, None)
    by_profile = sum(step.tokens for step in steps) * [
        one.cpu_s_per_token for one in loading_model.profiles()
    ]
    measured = np.sum([step.cpu_s for step in steps], axis=0)
    for kind in ("text", "image", "video"):
        of_kind = [name.startswith(kind) for name in NAMES]
        assert by_profile[of_kind].sum() == pytest.approx(measured[of_kind].sum(), rel=0.1)


def test_scaling_keeps_up_with_a_shift_that_a_fixed_partition_does_not() -> None:
    steps = loading_model.steps_of(0, 48, None)
    fixed, scaled = (loading_model.scaled(steps, follow=follow) for follow in (False, True))
    floor, each = loading_model.even(steps), loading_model.in_each_rank(steps)
    assert fixed.iteration_s > 1.2 * floor.iteration_s, "the shift is hard"
    assert scaled.num_actors > fixed.num_actors
    assert scaled.iteration_s < 1.05 * floor.iteration_s
    assert floor.memory_bytes <= fixed.memory_bytes < scaled.memory_bytes < each.memory_bytes


def test_the_same_values_every_time() -> None:
    benchmark = registry.find("loader_scaling")
    values = []
    for _ in range(2):
        with benchmark.contenders(Settings(quick=True)) as contenders:
            values.append([(one.measure, one.name, one.run()) for one in contenders])
        loading_model.steps_of.cache_clear()
    assert values[0] == values[1]
    named = [(measure, name) for measure, name, _ in values[0]]
    assert len(set(named)) == len(named)
    for measure in benchmark.measures:
        assert (measure.name, measure.reference) in named
        assert not measure.timed


def test_a_step_is_made_of_numbers() -> None:
    [step, *_] = loading_model.steps_of(0, 4, None)
    assert step.compute_s > 0
    assert sum(step.look.now.values()) == pytest.approx(1.0)
    assert dataclasses.astuple(loading_model.even([step]))[0] == step.compute_s
