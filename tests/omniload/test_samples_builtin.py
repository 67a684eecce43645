"""Built-in transforms: found by short names, arguments checked once, wrong rows quarantined."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest

from omniload.errors import MixtureError
from omniload.mixture import TransformSpec
from omniload.samples.builtin import TRANSFORMS
from omniload.samples.sample import BadSample
from omniload.samples.transforms import Transform
from tests.omniload.loading import loader_of, pieces, tokens

ROWS: list[dict[str, Any]] = [
    {"lang": "en", "score": 0.9, "text": "long enough"},
    {"lang": "de", "score": 0.1, "text": "kurz"},
    {"lang": None, "score": None, "text": ""},
]


def transform(call: str, **args: Any) -> Transform:
    return Transform("a", TransformSpec(call=call, args=args))


def kept(**args: Any) -> list[int]:
    keep = transform("filter", **args)
    return [i for i, row in enumerate(ROWS) if keep(dict(row), 0)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"column": "lang", "equals": "en"}, [0]),
        ({"column": "lang", "one_of": ["de", "fr"]}, [1]),
        ({"column": "lang", "none_of": ["de", "fr"]}, [0]),
        ({"column": "score", "at_least": 0.1}, [0, 1]),
        ({"column": "score", "at_least": 0.1, "at_most": 0.5}, [1]),
        ({"column": "score", "at_most": 0}, []),
        ({"column": "text", "min_length": 4}, [0, 1]),
        ({"column": "text", "max_length": 4}, [1, 2]),
        ({"column": "text", "matches": "en|z$"}, [0, 1]),
    ],
)
def test_filter_keeps_what_meets_every_condition_and_no_null(
    args: dict[str, Any], expected: list[int]
) -> None:
    assert kept(**args) == expected


def test_a_filter_by_what_a_row_does_not_have_is_a_bad_row_and_not_a_silent_drop() -> None:
    with pytest.raises(BadSample, match="filter: no column 'score'"):
        transform("filter", column="score", at_least=1)({"text": "x"}, 0)
    with pytest.raises(BadSample, match="filter raised TypeError"):
        transform("filter", column="text", at_least=1)({"text": "x"}, 0)


def test_rename_replaces_what_was_called_so_before() -> None:
    row = {"body": "b", "text": "t", "id": 1}
    [renamed] = transform("rename", columns={"body": "text", "gone": "x"})(row, 0)
    assert renamed == {"text": "b", "id": 1}
    [swapped] = transform("rename", columns={"a": "b", "b": "a"})({"a": 1, "b": 2}, 0)
    assert swapped == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("filter", {"column": "x"}, "filter: no condition"),
        ("filter", {"equals": 1}, "column: Field required"),
        ("filter", {"column": "x", "matches": "("}, "matches: not a regular expression"),
        ("filter", {"column": "x", "at_least": "much"}, "at_least: .* valid number"),
        ("filter", {"column": "x", "atleast": 1}, "takes no argument 'atleast'; it takes column, equals"),
        ("rename", {"columns": {"a": "x", "b": "x"}}, "two get the same name"),
        ("tests.omniload.test_samples_builtin:Scaled", {}, "missing 1 required"),
        ("tests.omniload.test_samples_builtin:Uncallable", {}, "makes something that cannot be called"),
    ],
)
def test_arguments_are_checked_when_the_loader_is_made(call: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message) as error:
        transform(call, **args)
    assert "\n" not in str(error.value)
    assert "source 'a'" in str(error.value)


def test_a_misspelt_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'filter'"):
        TransformSpec(call="fliter")


def test_every_short_name_leads_to_a_class() -> None:
    for path, version in TRANSFORMS.values():
        module, _, name = path.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)
        assert version >= 1


@dataclass
class Scaled:
    """A transform that is made once."""

    factor: int
    made = 0

    def __post_init__(self) -> None:
        Scaled.made += 1

    def __call__(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"input_ids": [one * self.factor for one in row["input_ids"]] + [seed % 2]}


class Uncallable:
    """No transform."""


def test_a_class_is_made_once_and_called_with_rows_and_their_seeds() -> None:
    before = Scaled.made
    call = {"call": "tests.omniload.test_samples_builtin:Scaled", "args": {"factor": 2}}
    loader = loader_of({"x": [{"input_ids": [i]} for i in range(20)]}, transforms=(call,))
    found = tokens(loader, pieces(loader))
    assert sorted(one[0] for one in found) == [2 * i for i in range(20)]
    assert {one[1] for one in found} == {0, 1}
    assert Scaled.made == before + 1


def test_the_fingerprint_of_a_built_in_covers_its_arguments_and_version() -> None:
    prints = [
        transform("filter", column="x", equals=1),
        transform("filter", column="x", equals=2),
        transform("filter", column="y", equals=1),
    ]
    assert len({one.fingerprint for one in prints}) == 3
    assert transform("filter", column="x", equals=1).fingerprint == prints[0].fingerprint
