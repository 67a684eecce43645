"""The compiled loops do what the Python ones say, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.fill import Layout, TokenArrays, fill, fill_in_python
from omniload.kernels import KERNELS
from omniload.planner.pack import best_fit_decreasing, best_fit_in_python

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no C compiler was there at installation")


def test_the_kernels_are_built_wherever_the_tests_run() -> None:
    """Or nothing below compares anything."""
    assert KERNELS is not None


@needs_kernels
@given(lengths=st.lists(st.integers(1, 40), max_size=200), capacity=st.integers(40, 90))
def test_best_fit_places_every_piece_where_the_python_one_does(lengths: list[int], capacity: int) -> None:
    order, pack = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    expected = np.empty(len(lengths), np.int64)
    best_fit_in_python(np.array(lengths, np.int64)[order], capacity, expected)
    assert np.array_equal(pack, expected)


@needs_kernels
def test_best_fit_agrees_on_a_step_of_many_thousand_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 8193, 20_000)
    order, pack = best_fit_decreasing(lengths, 8192)
    expected = np.empty(len(lengths), np.int64)
    best_fit_in_python(lengths[order], 8192, expected)
    assert pack.max() > 5_000
    assert np.array_equal(pack, expected)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Runs of pieces and padding that tile some tokens."""
    runs = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
    ends = np.cumsum([length for length, _ in runs])
    starts = ends - [length for length, _ in runs]
    is_piece = np.array([piece for _, piece in runs], bool)
    lengths = np.array([length for length, _ in runs], np.int64)
    layout = Layout(
        starts=starts[is_piece],
        lengths=lengths[is_piece],
        numbers=draw(st.permutations(range(1, int(is_piece.sum()) + 1)).map(lambda n: np.array(n, np.int64))),
        padding_starts=starts[~is_piece],
        padding_lengths=lengths[~is_piece],
    )
    return layout, int(ends[-1])


def arrays(total: int, wanted: str, others: bool) -> TokenArrays:
    """Full of a value that nothing writes, so that a position left out shows."""

    def new(dtype: type) -> np.ndarray:
        return np.full(total, 77, dtype)

    return TokenArrays(
        input_ids=new(np.int64),
        targets=new(np.int64) if wanted == "targets" else None,
        labels=new(np.int64) if wanted == "labels" else None,
        position_ids=new(np.int64) if others else None,
        segment_ids=new(np.int32) if others else None,
    )


@needs_kernels
@given(
    tiled=layouts(),
    dtype=st.sampled_from([np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32, np.int64, np.uint64]),
    wanted=st.sampled_from(["targets", "labels", ""]),
    others=st.booleans(),
    data=st.data(),
)
def test_filling_gives_the_same_as_in_python(
    tiled: tuple[Layout, int], dtype: type, wanted: str, others: bool, data: st.DataObject
) -> None:
    layout, total = tiled
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens, masks = [], []
    for length in layout.lengths.tolist():
        goes_on = data.draw(st.booleans())
        tokens.append(rng.integers(0, 70, length + goes_on).astype(dtype))
        masks.append(rng.random(length + goes_on) < 0.5 if data.draw(st.booleans()) else None)
    got, expected = arrays(total, wanted, others), arrays(total, wanted, others)
    fill(tokens, masks, layout, got)
    fill_in_python(tokens, masks, layout, expected)
    for name in TokenArrays.__slots__:
        assert np.array_equal(getattr(got, name), getattr(expected, name))
        assert getattr(got, name) is None or not (getattr(got, name) == 77).any()


@needs_kernels
def test_tokens_of_a_type_that_is_no_integer_are_refused() -> None:
    layout = Layout(
        starts=np.array([0]),
        lengths=np.array([2]),
        numbers=np.array([1]),
        padding_starts=np.empty(0, np.int64),
        padding_lengths=np.empty(0, np.int64),
    )
    with pytest.raises(TypeError, match="buffer format"):
        fill([np.array([1.0, 2.0])], [None], layout, arrays(2, "", False))
