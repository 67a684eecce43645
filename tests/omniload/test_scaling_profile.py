"""Profiles are measured on the samples that a run would read, and change nothing of what it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omniload.errors import PlanError, SourceError
from omniload.pieces import Cursor
from omniload.scaling import SourceProfile, profile_source
from tests.omniload.loading import byte_tokenizer, chunks, loader_of
from tests.omniload.scaling import profile

ROWS = {"f": [{"input_ids": [1, 2, 3, 4, 5]} for _ in range(40)]}


def test_a_profile_says_what_the_samples_are() -> None:
    loader = loader_of(ROWS)
    [first, *_] = loader.payload(next(chunks(loader)).pieces).tokens
    found = profile_source(loader_of(ROWS), seconds=0.05)
    assert found.name == "memory"
    assert found.tokens_per_sample == pytest.approx(5.0, rel=1e-12)
    assert found.bytes_per_sample == first.nbytes == 5 * first.itemsize
    assert found.resident_bytes > 0
    assert found.open_s > 0
    assert found.cpu_s_per_token == pytest.approx(found.prepare_s_per_sample / 5, rel=1e-12)


def test_text_is_tokenised_for_it_and_samples_are_counted_after_transforms() -> None:
    rows = {"f": [{"text": f"{'ab' * (i % 2)}c"} for i in range(30)]}
    found = profile_source(loader_of(rows, tokenizer=byte_tokenizer(), eos="<eos>"), max_samples=30)
    assert found.tokens_per_sample == pytest.approx(3.0, rel=1e-12)
    third = [{"input_ids": [i, i]} for i in range(30)]
    kept = profile_source(
        loader_of({"f": third}, transforms=["tests.omniload.loading:keep_even"]), max_samples=15
    )
    assert kept.tokens_per_sample == pytest.approx(2.0, rel=1e-12)


def test_a_source_whose_first_windows_give_nothing_is_read_on() -> None:
    rows = [{"input_ids": [1]} for _ in range(60)] + [{"input_ids": [2] * 4} for _ in range(6)]
    loader = loader_of({"f": rows}, transforms=["tests.omniload.loading:keep_even"], shuffle="none")
    assert profile_source(loader, max_samples=6).tokens_per_sample == pytest.approx(4.0, rel=1e-12)


def test_reading_stops_at_the_number_of_samples_and_small_sources_are_read_again() -> None:
    loader = loader_of(ROWS)
    read: list[Cursor] = []

    class Counting:
        name = loader.name
        failures = loader.failures
        buffered_bytes = 1

        def read(self, cursor: Cursor, most: int) -> Any:
            read.append(cursor)
            return loader.read(cursor, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(loader, name)

    profile_source(Counting(), max_samples=100, seconds=60)  # type: ignore[arg-type]
    assert {cursor.epoch for cursor in read} == {0, 1, 2}
    assert read[0] == Cursor()


def test_a_profile_leaves_the_stream_as_it_was() -> None:
    loader, other = loader_of(ROWS, overflow="split", seq_len=3), loader_of(ROWS, overflow="split", seq_len=3)
    profile_source(loader, max_samples=7)
    for mine, theirs in zip(chunks(loader), chunks(other), strict=True):
        assert mine.pieces.tolist() == theirs.pieces.tolist()


def test_a_source_that_gives_nothing_is_named() -> None:
    rows = {"f": [{"input_ids": [1]} for _ in range(9)]}
    with pytest.raises(SourceError, match="source 'memory' gave no token in a whole pass") as error:
        profile_source(loader_of(rows, transforms=["tests.omniload.loading:keep_even"]))
    assert "\n" not in str(error.value)
    with pytest.raises(SourceError, match="gave no token in a whole pass"):
        profile_source(loader_of({"f": [{"input_ids": [1] * 9}]}, overflow="drop", seq_len=8))


def test_a_source_that_is_too_slow_for_the_time_given_is_named() -> None:
    rows = {"f": [{"input_ids": [1]} for _ in range(9000)]}
    with pytest.raises(SourceError, match="no token within 1e-09 s"):
        profile_source(loader_of(rows, transforms=["tests.omniload.loading:keep_even"]), seconds=1e-9)


def test_a_profile_survives_json() -> None:
    found = profile_source(loader_of(ROWS), max_samples=10)
    assert SourceProfile.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_s", 0.0),
        ("samples_per_s", float("nan")),
        ("prepare_s_per_sample", -1.0),
        ("resident_bytes", float("inf")),
    ],
)
def test_a_profile_of_no_numbers_is_refused(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"profile of source 'a': {field} is"):
        SourceProfile(**{**profile().to_json(), field: value})
