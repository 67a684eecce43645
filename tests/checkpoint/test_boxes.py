"""Boxes: intersection, position in memory, and the check that they tile a tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.boxes import Box, check_tiling, flat_boxes, intersect, runs_within, slices_within
from checkpoint.errors import TilingError

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offsets, lengths = [], []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        offsets.append(start)
        lengths.append(draw(st.integers(1, extent - start)))
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def tilings(draw, max_cuts=12):
    """A shape and boxes that tile it: repeated cuts of a random box along a random dimension, shuffled."""
    shape = draw(shapes)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        first = draw(st.integers(1, box.lengths[dim] - 1))
        low, high = list(box.lengths), list(box.lengths)
        low[dim], high[dim] = first, box.lengths[dim] - first
        offsets = list(box.offsets)
        offsets[dim] += first
        boxes[at] = Box(box.offsets, tuple(low))
        boxes.append(Box(tuple(offsets), tuple(high)))
    return shape, draw(st.permutations(boxes))


def check(shape, boxes):
    ndim = len(shape)
    check_tiling(
        shape,
        np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), ndim),
        np.array([box.lengths for box in boxes], dtype=np.int64).reshape(len(boxes), ndim),
    )


def counts(shape, boxes):
    """How many boxes lie over each element, by painting them."""
    painted = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        painted[slices_within(box, Box.whole(shape))] += 1
    return painted


@given(tilings())
def test_a_tiling_is_accepted_in_any_order(case):
    check(*case)


@given(tilings(), st.data())
def test_every_change_of_a_tiling_is_refused(case, data):
    shape, boxes = case
    at = data.draw(st.integers(0, len(boxes) - 1))
    kind = data.draw(st.sampled_from(["drop", "repeat", "other"] if shape else ["drop", "repeat"]))
    changed = list(boxes)
    if kind == "drop":
        del changed[at]
    elif kind == "repeat":
        changed.append(changed[at])
    else:
        other = data.draw(boxes_in(shape))
        if other == changed[at]:
            return
        changed[at] = other
    with pytest.raises(TilingError):
        check(shape, changed)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=5))))
def test_the_verdict_and_the_named_element_agree_with_painting(case):
    shape, boxes = case
    painted = counts(shape, boxes)
    wrong = np.argwhere(painted != 1)
    if not len(wrong):
        check(shape, boxes)
        return
    first = wrong[0].tolist()
    kind = "gap" if painted[tuple(first)] == 0 else "overlap"
    expected = f"{kind}: element {first} of shape {list(shape)} lies in {painted[tuple(first)]} boxes"
    with pytest.raises(TilingError) as raised:
        check(shape, boxes)
    assert str(raised.value).startswith(expected)


def test_a_tensor_without_elements_has_no_boxes():
    check((3, 0, 2), [])
    with pytest.raises(TilingError, match="is empty in shape"):
        check((3, 0, 2), [Box((0, 0, 0), (3, 0, 2))])


def test_a_scalar_has_one_box():
    check((), [Box((), ())])
    with pytest.raises(TilingError, match="gap: element"):
        check((), [])
    with pytest.raises(TilingError, match="lies in 2 boxes"):
        check((), [Box((), ())] * 2)


@pytest.mark.parametrize(
    ("offsets", "lengths", "message"),
    [
        ([[0, 0]], [[3, 5]], "out of bounds"),
        ([[-1, 0]], [[3, 4]], "out of bounds"),
        ([[0, 0], [2, 0]], [[3, 4], [0, 4]], "box 1 .* is empty"),
        ([[0, 0]], [[-3, 4]], "is empty"),
        ([[1, 0]], [[2**63 - 1, 4]], "out of bounds"),
        ([[2**63 - 1, 0]], [[2**63 - 1, 4]], "out of bounds"),
        ([[0]], [[3]], r"need offsets and lengths of shape \[n, 2\]"),
    ],
)
def test_boxes_that_are_no_part_of_the_tensor_are_refused(offsets, lengths, message):
    with pytest.raises(TilingError, match=message):
        check_tiling((3, 4), np.array(offsets), np.array(lengths))


def test_huge_extents_do_not_overflow():
    extent = 2**62
    check(
        (extent, extent), [Box((0, 0), (extent // 2, extent)), Box((extent // 2, 0), (extent // 2, extent))]
    )
    with pytest.raises(TilingError, match="gap"):
        check((extent, extent), [Box((0, 0), (extent // 2, extent)), Box((extent // 2, 0), (extent // 2, 1))])


@pytest.mark.parametrize("parts", [(200_000,), (450, 450), (60, 60, 60), (11, 11, 11, 12, 13)])
def test_two_hundred_thousand_boxes_are_checked_without_quadratic_work(parts):
    shape = tuple(3 * num + 1 for num in parts)
    starts = [np.append(np.arange(num) * 3, extent) for num, extent in zip(parts, shape, strict=True)]
    low = np.stack(np.meshgrid(*[cut[:-1] for cut in starts], indexing="ij"), -1).reshape(-1, len(parts))
    high = np.stack(np.meshgrid(*[cut[1:] for cut in starts], indexing="ij"), -1).reshape(-1, len(parts))
    order = np.random.default_rng(0).permutation(len(low))
    low, lengths = low[order], (high - low)[order]
    check_tiling(shape, low, lengths)
    lengths[len(low) // 2, -1] -= 1
    with pytest.raises(TilingError, match="gap"):
        check_tiling(shape, low, lengths)


def test_an_irregular_layout_in_absurdly_many_dimensions_is_refused_before_it_is_expanded():
    ndim, num = 40, 2000
    rng = np.random.default_rng(0)
    offsets = rng.integers(0, 50, (num, ndim))
    lengths = rng.integers(1, 50, (num, ndim))
    with pytest.raises(TilingError, match="too irregular"):
        check_tiling((100,) * ndim, offsets, lengths)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape))))
def test_intersection_holds_exactly_the_common_elements(case):
    shape, a, b = case
    both = intersect(a, b)
    common = (counts(shape, [a]) + counts(shape, [b])) == 2
    painted = np.zeros(shape, dtype=bool) if both is None else counts(shape, [both]) == 1
    assert np.array_equal(common, painted)
    assert (0 if both is None else both.num_elements) == common.sum()


@given(shapes.flatmap(boxes_in).flatmap(lambda outer: st.tuples(st.just(outer), boxes_in(outer.lengths))))
@settings(max_examples=300)
def test_runs_are_the_row_major_positions_of_the_inner_box(case):
    outer, relative = case
    inner = Box(tuple(a + b for a, b in zip(outer.offsets, relative.offsets, strict=True)), relative.lengths)
    image = np.arange(outer.num_elements).reshape(outer.lengths)
    starts, length = runs_within(inner, outer)
    positions = [start + step for start, step in itertools.product(starts.tolist(), range(length))]
    assert positions == image[slices_within(inner, outer)].ravel().tolist()
    # Maximal: no run ends where the next begins.
    assert not (starts[:-1] + length == starts[1:]).any()
    assert len(starts) * length == math.prod(inner.lengths)


def flat_positions(shape, box):
    """Where the elements of a box lie in the row-major tensor, in the box's own row-major order."""
    return np.arange(math.prod(shape)).reshape(shape)[slices_within(box, Box.whole(shape))].reshape(-1)


@given(shapes, st.lists(st.integers(0, 6**4), max_size=6))
@settings(max_examples=1000)
def test_flat_ranges_that_partition_a_tensor_give_boxes_that_tile_it_each_in_flat_order(shape, cuts):
    size = math.prod(shape)
    cuts = sorted({0, size, *(cut for cut in cuts if cut < size)})
    everything = []
    for start, stop in itertools.pairwise(cuts):
        boxes = flat_boxes(shape, start, stop)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        held = [flat_positions(shape, box) for box in boxes]
        assert np.concatenate(held).tolist() == list(range(start, stop))
        everything += boxes
    check(shape, everything)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 6), (5, 1, 2), (2, 3, 3), (2, 1, 2, 3), (2, 2, 2, 2)])
def test_no_fewer_boxes_hold_a_flat_range_in_order(shape):
    size = math.prod(shape)
    is_box = np.zeros((size, size + 1), dtype=bool)  # whether the elements from a to b are a box
    for start, stop in itertools.combinations(range(size + 1), 2):
        where = np.stack(np.unravel_index(range(start, stop), shape))
        low, high = where.min(axis=1), where.max(axis=1) + 1
        is_box[start, stop] = (high - low).prod() == stop - start
    for start in range(size):
        fewest = {start: 0}
        for stop in range(start + 1, size + 1):
            fewest[stop] = 1 + min(fewest[at] for at in range(start, stop) if is_box[at, stop])
            assert len(flat_boxes(shape, start, stop)) == fewest[stop], (start, stop)


def test_an_empty_flat_range_has_no_boxes_and_a_scalar_is_one():
    assert flat_boxes((), 0, 1) == [Box((), ())]
    assert flat_boxes((), 0, 0) == flat_boxes((3, 0, 2), 0, 0) == flat_boxes((4, 5), 7, 7) == []


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=5).map(tuple), st.data())
def test_flat_ranges_of_huge_tensors_are_exact(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for box in boxes:
        # One element long up to some dimension and whole after it: contiguous, so where it begins says all.
        split = next((dim for dim, length in enumerate(box.lengths) if length > 1), len(shape))
        assert box.lengths[split + 1 :] == shape[split + 1 :]
        assert all(
            0 <= at < end <= extent for at, end, extent in zip(box.offsets, box.ends, shape, strict=True)
        )
        assert sum(map(int.__mul__, box.offsets, strides)) == start
        start += box.num_elements
    assert start == stop
