"""The compiled loops do what the Python ones say, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.fill import Layout, TokenArrays, fill, fill_in_python
from omniload.joining import join_parts, join_parts_in_python
from omniload.kernels import KERNELS
from omniload.payload import Payload
from omniload.planner.packing import best_fit_decreasing
from omniload.planner.packing.decreasing import best_fit_in_python
from omniload.planner.packing.first_fit import first_fit, first_fit_in_python, tournament
from omniload.planner.packing.workload import place, place_in_python
from omniload.sources.mds_encodings import Flat
from omniload.sources.mds_lists import join_lists, join_lists_in_python

needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no C compiler was there at installation")
seeds = st.integers(0, 2**32)


def test_the_kernels_are_built_wherever_the_tests_run() -> None:
    """Or nothing below compares anything."""
    assert KERNELS is not None


@needs_kernels
@settings(max_examples=1000)
@given(seeds, st.integers(0, 300), st.integers(40, 90), st.sampled_from([None, 1, 60, 300]))
def test_best_fit_places_every_piece_where_the_python_one_does(
    seed: int, size: int, capacity: int, patch_capacity: int | None
) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 41, size)
    patches = None if patch_capacity is None else generator.integers(0, patch_capacity + 1, size)
    order, pack = best_fit_decreasing(lengths, capacity, patches, patch_capacity or 0)
    expected = np.empty(size, np.int64)
    images = None if patches is None else patches[order]
    best_fit_in_python(lengths[order], capacity, images, patch_capacity or 0, expected)
    assert np.array_equal(pack, expected)


@needs_kernels
@pytest.mark.parametrize("patch_capacity", [0, 3000])
def test_best_fit_agrees_on_a_step_of_many_thousand_documents(patch_capacity: int) -> None:
    """So many open packs that blocks of them are split, emptied and used again."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 8193, 20_000)
    patches = generator.integers(0, patch_capacity + 1, 20_000)
    order, pack = best_fit_decreasing(lengths, 8192, patches, patch_capacity)
    expected = np.empty(len(lengths), np.int64)
    best_fit_in_python(lengths[order], 8192, patches[order], patch_capacity, expected)
    assert pack.max() > 5_000
    assert np.array_equal(pack, expected)


@needs_kernels
@settings(max_examples=1000)
@given(seeds, st.integers(0, 200), st.integers(40, 90), st.sampled_from([0.0, 0.5, 1.0]))
def test_first_fit_places_every_part_where_the_python_one_does(
    seed: int, size: int, capacity: int, share: float
) -> None:
    generator = np.random.default_rng(seed)
    cuttable = generator.random(size) < share
    lengths = np.where(cuttable, generator.integers(1, 3 * capacity, size), generator.integers(1, 41, size))
    got = first_fit(lengths, capacity, cuttable)
    expected = first_fit_in_python(lengths, tournament(lengths, capacity), cuttable)
    for array, other in zip(got, expected, strict=True):
        assert np.array_equal(array, other)


@needs_kernels
@settings(max_examples=1000)
@given(seeds, st.integers(0, 100), st.integers(1, 9), st.integers(1, 3))
def test_documents_are_placed_by_workload_where_the_python_way_does(
    seed: int, size: int, num_packs: int, num_loads: int
) -> None:
    generator = np.random.default_rng(seed)
    load, cost = generator.integers(0, 10, (num_loads, size)), generator.integers(0, 30, size)
    cap = generator.integers(9, 60, num_loads)
    expected = place_in_python(load, cost, num_packs, cap)
    assert np.array_equal(place(load, cost, num_packs, cap), expected)


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
    ends = layout.lengths + rng.integers(0, 2, len(layout.lengths))
    places = np.stack([rng.integers(0, 3, len(ends)), rng.integers(0, 9, len(ends)), ends])
    places[2] += places[1]
    size = int(places[2].max(initial=0)) + 3
    masks = [rng.random(size) < 0.5 if data.draw(st.booleans()) else None for _ in range(3)]
    values = [rng.integers(0, 70, size).astype(dtype) for _ in range(3)]
    payload = Payload(values=values, masks=masks, places=places)
    got, expected = arrays(total, wanted, others), arrays(total, wanted, others)
    fill(payload, layout, got)
    fill_in_python(payload, layout, expected)
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
        fill(Payload.of([np.array([1.0, 2.0])], [None]), layout, arrays(2, "", False))


@needs_kernels
@settings(max_examples=300)
@given(seeds, st.integers(1, 4), st.integers(0, 40), st.sampled_from(["u1", "u2", "<i4", "i8", "?"]))
def test_parts_of_arrays_are_laid_end_to_end_as_the_python_one_does(
    seed: int, num_arrays: int, size: int, dtype: str
) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.integers(0, 2, generator.integers(0, 30)).astype(dtype) for _ in range(num_arrays)]
    array = generator.integers(0, num_arrays, size)
    room = np.array([len(one) for one in values], np.int64)[array]
    bounds = np.sort(generator.integers(0, room[:, None] + 1, (size, 2)), axis=1)
    places = np.stack([array, *bounds.T])
    got, expected = (np.empty((bounds[:, 1] - bounds[:, 0]).sum(), dtype) for _ in range(2))
    join_parts(values, places, got)
    join_parts_in_python(values, places, expected)
    assert np.array_equal(got, expected)


def test_parts_of_arrays_of_several_types_come_in_one_that_holds_all() -> None:
    values = [np.array([1, 2, 255], np.uint8), np.array([70_000], np.uint32)]
    got = np.empty(3, np.uint32)
    join_parts(values, np.array([[0, 1], [1, 0], [3, 1]]), got)
    assert got.tolist() == [2, 255, 70_000]


@needs_kernels
@pytest.mark.parametrize(
    "places", [[[1], [0], [1]], [[0], [2], [1]], [[0], [0], [4]], [[0], [-1], [1]], [[0], [0], [2]]]
)
def test_parts_outside_their_arrays_are_refused(places: list[list[int]]) -> None:
    out = np.empty(1, np.int64)
    with pytest.raises(AssertionError):
        join_parts([np.arange(3)], np.array(places), out)


@needs_kernels
@settings(max_examples=500)
@given(
    seeds,
    st.integers(0, 20),
    st.integers(1, 3),
    st.sampled_from(["|u1", "<u2", "<i4", "<i8"]),
    st.integers(0, 3),
)
def test_lists_in_samples_are_found_and_joined_as_the_python_one_does(
    seed: int, num_samples: int, num_columns: int, dtype: str, num_damaged: int
) -> None:
    """Of whole samples and of such in which bytes are other than they were."""
    generator = np.random.default_rng(seed)
    column = int(generator.integers(num_columns))
    has_shape, num_items = [(True, None), (False, None), (False, 3)][generator.integers(3)]
    item_bytes = np.dtype(dtype).itemsize
    fixed = [None if generator.integers(2) else int(generator.integers(1, 9)) for _ in range(num_columns)]
    fixed[column] = None if num_items is None else num_items * item_bytes
    samples = [
        _sample(generator, fixed, column, item_bytes, has_shape=has_shape, width=int(generator.integers(3)))
        for _ in range(num_samples)
    ]
    data = np.frombuffer(b"".join(samples), np.uint8).copy()
    for _ in range(num_damaged if len(data) else 0):
        data[generator.integers(len(data))] = generator.choice([0, 1, 2, 4, 5, 6, 7, 255])
    flat = Flat(dtype=np.dtype(dtype), has_shape=has_shape, num_items=num_items)
    bounds = np.cumsum([0, *map(len, samples)])
    bounds[1:-1] -= (
        generator.integers(0, 2, max(num_samples - 1, 0)) * (num_damaged == 3) * (bounds[1:-1] > 0)
    )
    bounds = np.maximum.accumulate(bounds)
    got = join_lists(data, bounds, fixed, column, flat)
    expected = join_lists_in_python(data, bounds, fixed, column, flat)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    if not num_damaged:
        assert not got[1].any()


def _sample(
    generator: np.random.Generator,
    fixed: Sequence[int | None],
    column: int,
    item_bytes: int,
    *,
    has_shape: bool,
    width: int,
) -> bytes:
    """A sample of an MDS shard; a ``column`` of whose values is a list of items."""
    values = [generator.bytes(int(generator.integers(9)) if size is None else size) for size in fixed]
    if fixed[column] is None:
        num_items = int(generator.integers(9))
        shape = bytes([1 << 2 | width]) + num_items.to_bytes(1 << width, "little") if has_shape else b""
        values[column] = shape + generator.bytes(num_items * item_bytes)
    sizes = [len(value) for value, size in zip(values, fixed, strict=True) if size is None]
    return np.array(sizes, "<u4").tobytes() + b"".join(values)


@needs_kernels
@pytest.mark.parametrize("bounds", [[-1, 4], [0, 9], [4, 0, 4]])
def test_samples_outside_their_bytes_are_refused(bounds: list[int]) -> None:
    flat = Flat(dtype=np.dtype("<u2"), has_shape=False)
    with pytest.raises(AssertionError):
        join_lists(np.zeros(8, np.uint8), np.array(bounds), [None], 0, flat)


def test_sizes_that_no_shard_has_make_samples_bad() -> None:
    """Also such that their sum is what 64 bits hold of it."""
    data = np.zeros(8, np.uint8)
    for fixed in ([10**30], [2**62] * 4, [2**63, 2**63, 8]):
        flat = Flat(dtype=np.dtype("<u2"), has_shape=False, num_items=10**30)
        for join in (join_lists, join_lists_in_python):
            _, bad, items = join(data, np.array([0, 8]), fixed, 0, flat)
            assert bad.all()
            assert not len(items)
