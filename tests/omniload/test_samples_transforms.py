"""Transforms are pure functions of a row: seeded by its identity, refused when they are not what they claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omniload.errors import MixtureError
from omniload.mixture import TransformSpec
from omniload.pieces import Cursor
from omniload.samples.sample import BadSample
from omniload.samples.transforms import Transform, apply_all
from tests.omniload.loading import loader_of, pieces, tokens

HERE = "tests.omniload.loading"


def transform(name: str, **args: Any) -> Transform:
    return Transform("a", TransformSpec(call=f"{HERE}:{name}", args=args))


def test_none_one_or_several_rows_come_out() -> None:
    row = {"input_ids": [3, 4]}
    assert transform("keep_even")(row, 0) == []
    assert transform("keep_even")({"input_ids": [4]}, 0) == [{"input_ids": [4]}]
    assert len(transform("triple")(row, 0)) == 3


def test_transforms_are_applied_one_after_the_other() -> None:
    both = (transform("triple"), transform("noisy"))
    rows = apply_all(both, {"input_ids": [3]}, 1)
    assert [row["input_ids"][:2] for row in rows] == [[3, 0], [3, 1], [3, 2]]
    assert len({row["input_ids"][2] for row in rows}) == 3  # each has a generator of its own


def test_arguments_are_passed() -> None:
    assert transform("noisy", spread=1)({"input_ids": []}, 5) == [{"input_ids": [0]}]


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("no.such.module:f", {}, "no.such.module:f: cannot be imported"),
        (f"{HERE}:no_such", {}, "cannot be imported"),
        (f"{HERE}:SPECIAL", {}, "is not a function"),
        (f"{HERE}:noisy", {"sprad": 1}, "takes no argument 'sprad'; it takes row, rng, spread"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(call: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message) as error:
        Transform("a", TransformSpec(call=call, args=args))
    assert "source 'a'" in str(error.value)


def test_a_wrong_return_type_is_an_error_of_the_transform_not_of_the_row() -> None:
    with pytest.raises(MixtureError, match="returned int, not None, a dict or a list of dicts"):
        transform("returns_number")({}, 0)


def test_an_exception_quarantines_the_row_but_not_one_of_io() -> None:
    with pytest.raises(BadSample, match="raised KeyError: 'odd'"):
        transform("fails_on_odd")({"input_ids": [1]}, 0)
    with pytest.raises(OSError, match="Input/output"):
        transform("no_disk")({}, 0)
    loader = loader_of({"x": [{"input_ids": [i]} for i in range(6)]}, transforms=(f"{HERE}:fails_on_odd",))
    chunk = loader.read(Cursor(), 100)
    assert sorted(tokens(loader, chunk.pieces)) == [[0], [2], [4]]
    assert chunk.failures.sum() == 3
    assert {failure.row_id for failure in loader.failures} == {1, 3, 5}


def test_one_bad_sample_of_a_row_quarantines_the_row() -> None:
    loader = loader_of({"x": [{"input_ids": [-1]}, {"input_ids": [2]}]}, transforms=(f"{HERE}:triple",))
    assert sorted(tokens(loader, pieces(loader))) == [[2, 0], [2, 1], [2, 2]]


def test_seeds_depend_on_mixture_seed_source_epoch_file_and_row_only() -> None:
    rows = [{"input_ids": [i]} for i in range(9)]
    files = {"x": rows, "y": rows}

    def seeds(epoch: int = 0, **keys: Any) -> dict[tuple[int, ...], int]:
        loader = loader_of(files, transforms=(f"{HERE}:seeded",), **keys)
        found = pieces(loader, Cursor(epoch=epoch))
        rows_of = [(p["file"], loader.row_ids(p["file"], p["block"])[p["row"]]) for p in found]
        return dict(zip(rows_of, (one[0] for one in tokens(loader, found)), strict=True))

    base = seeds()
    assert len(set(base.values())) == 18
    assert seeds(window_blocks=7, block_rows=5, seq_len=99) == base
    for other in (seeds(epoch=1), seeds(seed=6), seeds(name="other")):
        assert not set(other.values()) & set(base.values())


def test_the_fingerprint_covers_name_arguments_and_source_text() -> None:
    prints = [transform("triple"), transform("noisy"), transform("noisy", spread=2), transform("keep_even")]
    assert len({one.fingerprint for one in prints}) == 4
    assert transform("triple").fingerprint == transform("triple").fingerprint


def test_a_row_that_gives_too_many_samples_is_quarantined() -> None:
    loader = loader_of(
        {"x": [{"input_ids": [1]}]}, transforms=("tests.omniload.test_samples_transforms:flood",)
    )
    chunk = loader.read(Cursor(), 10)
    assert len(chunk.pieces) == 0
    assert "more than 65536" in loader.failures[0].reason
    assert np.array_equal(chunk.failures, [1])


def flood(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row] * (2**16 + 1)
