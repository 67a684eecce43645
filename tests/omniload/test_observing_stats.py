"""Numbers of a job as values, and how long calls took."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.observing.stats import from_json, to_json
from omniload.observing.timing import Timing
from tests.omniload.observing import actor, job, source


def test_numbers_survive_json() -> None:
    stats = job(actors=(actor(sources=("web", "数据", 'q"')), actor(name="b")))
    text = json.dumps(to_json(stats), allow_nan=False)
    assert from_json(json.loads(text)) == stats


def test_what_is_not_known_is_null_in_json_and_nan_again_after() -> None:
    stats = job(imbalance=math.nan, actors=(actor(fetch_p99_ms=math.nan),))
    plain = json.loads(json.dumps(to_json(stats), allow_nan=False))
    assert plain["imbalance"] is None
    assert plain["actors"][0]["fetch_p99_ms"] is None
    back = from_json(plain)
    assert math.isnan(back.imbalance)
    assert math.isnan(back.actors[0].fetch_p99_ms)


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.pop("step"),
        lambda plain: plain["clients"][0].pop("rank"),
        lambda plain: plain["actors"][0].update(role="cook"),
        lambda plain: plain.update(step="many"),
        lambda plain: plain.update(sources=None),
        lambda plain: plain.update(at=[]),
    ],
)
def test_numbers_of_another_shape_are_refused(damage: Any) -> None:
    plain = to_json(job())
    damage(plain)
    with pytest.raises(ValueError):
        from_json(plain)


def test_numbers_of_a_newer_version_may_say_more() -> None:
    plain = to_json(job())
    plain["weather"] = "fine"
    plain["actors"][0]["mood"] = 3
    assert from_json(plain) == job()


@pytest.mark.parametrize(
    ("declared", "realised", "drift"),
    [
        (0.5, 0.75, 0.5),
        (0.5, 0.25, -0.5),
        (0.0, 0.0, math.nan),
        (0.0, 0.1, math.inf),
        (0.5, math.nan, math.nan),
    ],
)
def test_drift_is_relative_to_the_declared_ratio(declared: float, realised: float, drift: float) -> None:
    found = source(declared_ratio=declared, realised_ratio=realised).drift
    assert found == drift or (math.isnan(found) and math.isnan(drift))


@given(st.lists(st.integers(0, 800).map(lambda n: n / 8), min_size=1, max_size=40), st.integers(1, 16))
def test_quantiles_are_those_of_the_last_durations(durations: list[float], window: int) -> None:
    timing = Timing(window)
    for duration in durations:
        timing.record(duration)
    assert timing.p50_ms == np.quantile(durations[-window:], 0.5) * 1e3
    assert timing.p99_ms == np.quantile(durations[-window:], 0.99) * 1e3
    assert timing.count == len(durations)
    assert timing.total_s == sum(durations)


def test_quantiles_of_nothing_are_not_known() -> None:
    timing = Timing()
    assert math.isnan(timing.p50_ms)
    assert math.isnan(timing.p99_ms)
    assert (timing.count, timing.total_s) == (0, 0)


def test_a_block_is_measured_even_if_it_raises() -> None:
    timing = Timing()
    with timing.measure():
        threading.Event().wait(0.011)
    assert timing.p50_ms >= 11
    with pytest.raises(ZeroDivisionError), timing.measure():
        raise ZeroDivisionError
    assert timing.count == 2


def test_no_duration_is_lost_between_threads() -> None:
    timing = Timing(8000)

    def record() -> None:
        for _ in range(1000):
            timing.record(0.5)
            assert timing.p99_ms == 500

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert timing.count == 8000
    assert timing.total_s == 4000
