"""Plans: every element once, bytes balanced, the same in whatever way the ranks are asked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.boxes import Box, flat_boxes
from checkpoint.errors import StateError, TilingError
from checkpoint.frameworks.values import LocalTensor
from checkpoint.planner import Plan, describe, make_plan, positions_in
from checkpoint.planner.balance import _UNIT_BYTES, choose_writers
from checkpoint.planner.description import join
from checkpoint.ragged import starts
from checkpoint.tiling import find_untiled
from tests.checkpoint.simulation import held, layouts, shapes

Cut = dict[str, tuple[torch.Tensor, Sequence[Sequence[Box]]]]  # key to tensor, and boxes by rank


@st.composite
def states(draw: st.DrawFn) -> tuple[int, Cut]:
    """Tensors of random shapes, cut and dealt over some ranks, with replicas."""
    world_size = draw(st.integers(1, 6))
    state = {}
    for index in range(draw(st.integers(0, 5))):
        shape = draw(shapes)
        dtype = draw(st.sampled_from([torch.int8, torch.float32, torch.complex128]))
        state[f"t{index}"] = torch.zeros(shape, dtype=dtype), draw(layouts(shape, world_size))
    return world_size, state


def on_rank(state: Cut, rank: int) -> list[LocalTensor]:
    return [held(key, tensor, boxes[rank]) for key, (tensor, boxes) in sorted(state.items())]


def plan_of(world_size: int, state: Cut) -> tuple[Plan, list[np.ndarray]]:
    """The plan, and for each rank the positions that it is to write."""
    plan = make_plan([describe(on_rank(state, rank)) for rank in range(world_size)])
    counts = np.diff(plan.held_first)
    return plan, [positions_in(share, int(count)) for share, count in zip(plan.shares(), counts, strict=True)]


def same(left: Plan, right: Plan) -> bool:
    columns = ("first", "offsets", "lengths", "held", "held_first")
    return left.tensors == right.tensors and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in columns
    )


@given(states())
def test_a_plan_writes_every_element_once_from_a_rank_that_holds_it(case: tuple[int, Cut]) -> None:
    world_size, state = case
    plan, positions = plan_of(world_size, state)
    times = {key: torch.zeros(tensor.shape, dtype=torch.int32) for key, (tensor, _) in state.items()}
    for rank in range(world_size):
        boxes = [(key, box) for key, (_, layout) in sorted(state.items()) for box in layout[rank]]
        for position in positions[rank].tolist():
            key, box = boxes[position]
            times[key][tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))] += 1
    assert all((count == 1).all() for count in times.values())
    assert sum(map(len, positions)) == len(plan.held) == plan.offsets.shape[1] == plan.first[-1]


@given(states())
def test_the_rows_of_a_plan_are_sorted_and_name_the_boxes_that_ranks_hold(case: tuple[int, Cut]) -> None:
    world_size, state = case
    plan, _ = plan_of(world_size, state)
    described = [
        (key, box)
        for rank in range(world_size)
        for key, (_, layout) in sorted(state.items())
        for box in layout[rank]
    ]
    rows = []
    for row, tensor_id in enumerate(plan.tensor_id.tolist()):
        tensor = plan.tensors[tensor_id]
        num_dims = len(tensor.shape)
        box = Box(tuple(plan.offsets[:num_dims, row].tolist()), tuple(plan.lengths[:num_dims, row].tolist()))
        assert described[plan.held[row]] == (tensor.key, box)
        rows.append((tensor_id, box.offsets))
    assert rows == sorted(set(rows))
    assert plan.num_dims.tolist() == [len(plan.tensors[one].shape) for one in plan.tensor_id]


@given(states(), st.randoms())
def test_a_plan_does_not_depend_on_the_order_in_which_a_rank_holds_things(
    case: tuple[int, Cut], random: object
) -> None:
    """Only which of the rank's boxes a position means does."""
    world_size, state = case
    messages, shuffled = [], []
    for rank in range(world_size):
        tensors = on_rank(state, rank)
        messages.append(describe(tensors))
        random.shuffle(tensors)  # type: ignore[attr-defined]
        shuffled.append(describe(tensors))
    left, right = make_plan(messages), make_plan(shuffled)
    assert left.tensors == right.tensors
    for name in ("first", "offsets", "lengths", "rank"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert same(left, make_plan(messages))


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.integers(2, 7),
    st.lists(st.integers(0, 6), max_size=9),
)
def test_replicas_of_all_ranks_are_balanced_within_the_largest_box(
    sizes: list[int], num_ranks: int, alone: list[int]
) -> None:
    """Plain replicated tensors, next to boxes that only one rank holds."""
    alone = [rank % num_ranks for rank in alone]
    own = np.asarray([500 + 7 * index for index in range(len(alone))], dtype=np.int64)
    num_bytes = np.concatenate([np.asarray(sizes), own]).astype(np.int64)  # in units
    counts = np.asarray([num_ranks] * len(sizes) + [1] * len(alone))
    rank = np.concatenate([np.tile(np.arange(num_ranks), len(sizes)), np.asarray(alone, dtype=np.int64)])
    chosen = choose_writers(num_bytes * _UNIT_BYTES, starts(counts), rank, num_ranks)
    load = np.bincount(rank[chosen], weights=num_bytes, minlength=num_ranks)
    fixed = np.bincount(np.asarray(alone, dtype=np.int64), weights=own, minlength=num_ranks)
    ideal = max(load.sum() / num_ranks, fixed.max())
    assert load.max() <= ideal + max(sizes)


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=40), st.integers(2, 7))
def test_what_may_differ_is_written_by_the_lowest_rank_and_weighs_on_it(
    boxes: list[tuple[int, bool]], num_ranks: int
) -> None:
    num_bytes, may_differ = np.asarray([size for size, _ in boxes]), np.asarray([fixed for _, fixed in boxes])
    rank = np.tile(np.arange(num_ranks), len(boxes))
    first = starts(np.full(len(boxes), num_ranks))
    chosen = rank[choose_writers(num_bytes * _UNIT_BYTES, first, rank, num_ranks, may_differ)]
    assert not chosen[may_differ].any()
    load = np.bincount(chosen, weights=num_bytes, minlength=num_ranks)
    ideal = max(load.sum() / num_ranks, num_bytes[may_differ].sum())
    assert load.max() <= ideal + num_bytes.max()


@given(st.data())
def test_no_holder_of_a_box_could_have_taken_much_work_off_its_writer(data: st.DataObject) -> None:
    """For any sets of holders: the last box that a rank took was no smaller than its lead over the others."""
    num_ranks = data.draw(st.integers(1, 6))
    sets = data.draw(
        st.lists(st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted), min_size=1, max_size=30)
    )
    num_bytes = np.asarray(
        data.draw(st.lists(st.integers(1, 50), min_size=len(sets), max_size=len(sets))), dtype=np.int64
    )
    first = starts(np.asarray([len(one) for one in sets]))
    rank = np.concatenate([np.asarray(one, dtype=np.int64) for one in sets])
    chosen = choose_writers(num_bytes * _UNIT_BYTES, first, rank, num_ranks)
    assert ((first[:-1] <= chosen) & (chosen < first[1:])).all()
    writer = rank[chosen]
    load = np.bincount(writer, weights=num_bytes, minlength=num_ranks)
    for one in range(num_ranks):
        shared = [box for box in np.flatnonzero(writer == one) if len(sets[box]) > 1]
        if shared:
            assert any(load[one] <= load[sets[box]].min() + num_bytes[box] for box in shared)


def test_the_largest_go_first() -> None:
    """One of 9 and three of 3 over two ranks: 9 to 9. In order of appearance it would be 6 to 12."""
    num_bytes = np.asarray([3, 3, 3, 9], dtype=np.int64)
    rank = np.tile(np.arange(2), 4)
    chosen = choose_writers(num_bytes * _UNIT_BYTES, starts(np.full(4, 2)), rank, 2)
    assert rank[chosen].tolist() == [1, 1, 1, 0]


def test_small_boxes_of_the_same_holders_go_to_one_of_them_until_they_are_not_small() -> None:
    """They are read together. Dealt out one by one, counters beside equal shards would lie all over the files."""
    num_boxes = 10 * _UNIT_BYTES // 64
    num_bytes = np.asarray([1 << 20, 1 << 20, *[64] * num_boxes], dtype=np.int64)
    first = starts(np.asarray([1, 1, *[2] * num_boxes]))
    rank = np.asarray([0, 1, *[0, 1] * num_boxes])
    chosen = rank[choose_writers(num_bytes, first, rank, 2)]
    assert set(chosen[2:1000].tolist()) == {0}
    assert np.count_nonzero(chosen[2:]) == num_boxes // 2


def test_thousands_of_ranks_that_replicate_over_two_axes_are_balanced() -> None:
    """Boxes of all 8 ranks of a row, of all 64 of a column, and of nearly everybody, dealt out together."""
    rows, columns = 64, 8
    grid = np.arange(rows * columns).reshape(rows, columns)
    sets = [*grid, *grid.T, grid.ravel()] * 20
    num_bytes = np.random.default_rng(0).integers(1, 1000, len(sets))
    rank = np.concatenate(sets)
    chosen = choose_writers(
        num_bytes * _UNIT_BYTES, starts(np.asarray([len(one) for one in sets])), rank, grid.size
    )
    load = np.bincount(rank[chosen], weights=num_bytes, minlength=grid.size)
    assert load.max() <= num_bytes.sum() / grid.size + num_bytes.max()


@given(st.lists(st.tuples(shapes, st.data()), max_size=4))
def test_what_sharding_makes_is_found_to_tile(cases: list[tuple[tuple[int, ...], st.DataObject]]) -> None:
    boxes = [_tiling(shape, data) for shape, data in cases]
    assert (
        find_untiled(
            [shape for shape, _ in cases],
            *_columns(max((len(shape) for shape, _ in cases), default=0), boxes),
        )
        is None
    )


@given(shapes, shapes, st.data())
def test_any_box_that_is_missing_or_moved_or_there_twice_is_found(
    shape: tuple[int, ...], other: tuple[int, ...], data: st.DataObject
) -> None:
    """In the tensor that has it, between others that are fine."""
    boxes = _tiling(shape, data)
    if not boxes:
        return
    index = data.draw(st.integers(0, len(boxes) - 1))
    kind = data.draw(
        st.sampled_from(["missing", "twice", "larger", "moved"] if shape else ["missing", "twice"])
    )
    box = boxes[index]
    if kind == "missing":
        del boxes[index]
    elif kind == "twice":
        boxes.insert(index, box)
    else:
        dim = data.draw(st.integers(0, len(shape) - 1))
        change = [0] * len(shape)
        change[dim] = data.draw(st.integers(1, 3))
        parts = [list(box.offsets), list(box.lengths)]
        which = ("moved", "larger").index(kind)
        parts[which] = [a + b for a, b in zip(parts[which], change, strict=True)]
        boxes[index] = Box(tuple(parts[0]), tuple(parts[1]))
        boxes.sort(key=lambda one: one.offsets)
    fine = _tiling(other, data)
    found = find_untiled([other, shape, other], *_columns(max(len(shape), len(other)), [fine, boxes, fine]))
    assert found is not None
    assert found[0] == 1


def _tiling(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Boxes that tile a tensor: cut at random, in a grid, or into ranges of row-major elements."""
    kind = data.draw(st.sampled_from(["random", "grid", "flat"]))
    if 0 in shape:
        return []
    if kind == "random":
        (boxes,) = data.draw(layouts(shape, 1))
        return sorted(boxes, key=lambda box: box.offsets)
    if kind == "flat":
        size = math.prod(shape)
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=5))})
        return [box for a, b in itertools.pairwise(cuts) for box in flat_boxes(shape, a, b)]
    edges = [
        sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))}) for length in shape
    ]
    parts = [list(itertools.pairwise(one)) for one in edges]
    return [
        Box(tuple(a for a, _ in combo), tuple(b - a for a, b in combo)) for combo in itertools.product(*parts)
    ]


def _columns(max_dims: int, boxes: Sequence[Sequence[Box]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = [box for one in boxes for box in one]
    offsets, lengths = np.zeros((max_dims, len(flat)), np.int64), np.ones((max_dims, len(flat)), np.int64)
    for column, box in enumerate(flat):
        offsets[: len(box.offsets), column] = box.offsets
        lengths[: len(box.lengths), column] = box.lengths
    return starts(np.asarray([len(one) for one in boxes])), offsets, lengths


def test_a_grid_of_a_hundred_thousand_boxes_is_checked_exactly() -> None:
    """Merged into the tensor itself; and with one box missing, what is missing is found."""
    offsets = np.stack(np.meshgrid(np.arange(500), np.arange(200), indexing="ij")).reshape(2, -1) * 3
    lengths = np.full_like(offsets, 3)
    first = np.asarray([0, offsets.shape[1]])
    assert find_untiled([(1500, 600)], first, offsets, lengths) is None
    found = find_untiled([(1500, 600)], first - [0, 1], offsets[:, 1:], lengths[:, 1:])
    assert found is not None
    assert "gap: element [0, 0]" in str(found[1])


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[Box((0,), (4,))], [Box((5,), (1,))]], ("model/t: gap: element [4] of shape [6]", "ranks [0, 1]")),
        ([[Box((0,), (4,))], [Box((3,), (3,))]], ("model/t: overlap: element [3] of shape [6]",)),
        ([[Box((0,), (4,))], [Box((0,), (6,))]], ("model/t: overlap: element [0]",)),
        ([[Box((0,), (6,))], [Box((0,), (4,))]], ("model/t: overlap: element [0]",)),
        ([[Box((0,), (7,))], []], ("model/t: box 0", "out of bounds")),
        ([[Box((0,), (6,))], [Box((6,), (1,))]], ("model/t: box 1", "out of bounds", "ranks [0, 1]")),
        ([[Box((0,), (6,))], [Box((-1,), (1,))]], ("model/t", "out of bounds")),
        ([[Box((0,), (6,))], [Box((0,), (0,))]], ("model/t", "is empty")),
        ([[Box((0,), (6,))], [Box((1 << 62,), (1 << 62,))]], ("model/t", "out of bounds")),
        ([[], []], ("model/t: gap: element [0] of shape [6]",)),
    ],
)
def test_boxes_that_do_not_tile_are_refused_with_the_tensor_and_its_holders(
    boxes: list[list[Box]], words: tuple[str, ...]
) -> None:
    """Whatever tensors come before and after it."""

    def message(rank: int) -> bytes:
        around = [_tensor(key, (2, 3), [Box((0, 0), (2, 3))]) for key in ("a", "z")]
        return describe([around[0], _tensor("t", (6,), boxes[rank]), around[1]])

    with pytest.raises(TilingError) as caught:
        make_plan([message(0), message(1)])
    for word in words:
        assert word in str(caught.value)


def _tensor(
    key: str, shape: tuple[int, ...], boxes: Sequence[Box], *, dtype: torch.dtype = torch.int8
) -> LocalTensor:
    """Only described, so that it may have any boxes."""
    views = tuple(torch.empty(0) for _ in boxes)
    return LocalTensor(
        group="model",
        key=key,
        dtype=dtype,
        shape=shape,
        boxes=tuple(boxes),
        views=views,
        tensor=torch.empty(0),
    )


def test_tensors_of_absurd_size_are_counted_exactly() -> None:
    huge = [
        _tensor("a", (1 << 31, 1 << 30), [Box((0, 0), (1 << 31, 1 << 30))]),
        _tensor("empty", (1 << 40, 0, 1 << 40), []),
        _tensor("z", (1 << 61,), [Box((0,), (1 << 61,))]),
    ]
    plan = make_plan([describe(huge)])
    assert [tensor.num_bytes for tensor in plan.tensors] == [1 << 61, 0, 1 << 61]
    assert plan.held.tolist() == [0, 1]
    with pytest.raises(StateError, match=r"model/z: .* over 2\^63 bytes"):
        make_plan([describe([*huge[:2], _tensor("z", (1 << 61,), [], dtype=torch.int64)])])


def test_a_tensor_that_is_described_twice_is_refused() -> None:
    twice = [_tensor("t", (1,), [Box((0,), (1,))])] * 2
    with pytest.raises(StateError, match="model/t: is there twice"):
        describe(twice)


def test_a_name_that_no_table_can_hold_is_refused_before_anything_is_written() -> None:
    with pytest.raises(StateError, match=r"'model/t\\ud800': is not Unicode text"):
        describe([_tensor("t\ud800", (1,), [Box((0,), (1,))])])
    named = join([describe([_tensor("größe/\U0001f600", (1,), [Box((0,), (1,))])])])
    assert named.tensors[0].key == "größe/\U0001f600"


def test_ranks_with_other_tensors_and_other_numbers_of_dimensions_are_joined() -> None:
    scalar, matrix = _tensor("b", (), [Box((), ())]), _tensor("a", (1 << 33, 2), [Box((0, 0), (1 << 33, 2))])
    nothing = describe([])
    joined = join([nothing, describe([scalar]), nothing, describe([matrix, scalar])])
    assert [tensor.key for tensor in joined.tensors] == ["a", "b"]
    assert joined.tensor_id.tolist() == [1, 0, 1]
    assert joined.first.tolist() == [0, 0, 1, 1, 3]
    assert joined.lengths.tolist() == [[1, 1 << 33, 1], [1, 2, 1]]
    assert make_plan([nothing, nothing]).first.tolist() == [0]
