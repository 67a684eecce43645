"""Items to the ranks that encode them, and their rows from there to the backbone."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlaceError
from omniload.placing import Exchange, Parts, assign_encoders, parts_of_slices
from tests.omniload.placing import encoded_by, fetched, names_of, sliced

Case = tuple[Exchange, list[np.ndarray]]


def exchanged(exchange: Exchange, sent: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank receives in an all-to-all of the rows that each sends."""
    splits = [np.split(rows, np.cumsum(exchange.send_rows(rank))[:-1]) for rank, rows in enumerate(sent)]
    return [np.concatenate([split[rank] for split in splits]) for rank in range(exchange.num_ranks)]


def check_both_ways(exchange: Exchange, wanted: list[np.ndarray]) -> None:
    ranks = range(exchange.num_ranks)
    assert sorted(np.concatenate(wanted).tolist()) == list(range(int(exchange.rows.sum())))
    encoded = [encoded_by(exchange, rank) for rank in ranks]
    received = exchanged(exchange, [encoded[rank][exchange.send_order(rank)] for rank in ranks])
    for rank in ranks:
        assert received[rank][exchange.receive_order(rank)].tolist() == wanted[rank].tolist()
        assert exchange.send_rows(rank).tolist() == exchange.sent[rank].tolist()
        assert exchange.receive_rows(rank).tolist() == exchange.sent[:, rank].tolist()
    assert exchange.num_moved_rows == exchange.sent.sum() - np.trace(exchange.sent)
    # And the gradients back: the same with the splits swapped.
    for rank in ranks:
        received[rank] = np.empty_like(wanted[rank])
        received[rank][exchange.receive_order(rank)] = wanted[rank]
    splits = [np.split(received[rank], np.cumsum(exchange.sent[:, rank])[:-1]) for rank in ranks]
    for rank in ranks:
        back = np.empty_like(encoded[rank])
        back[exchange.send_order(rank)] = np.concatenate([split[rank] for split in splits])
        assert back.tolist() == encoded[rank].tolist()


@given(fetched())
@settings(max_examples=1000)
def test_every_row_reaches_the_fetcher_of_its_lane_once_and_in_order(case: Case) -> None:
    check_both_ways(*case)


@given(sliced())
@settings(max_examples=1000)
def test_every_row_reaches_the_slice_that_has_its_placeholder_once_and_in_order(case: Case) -> None:
    check_both_ways(*case)


def test_an_item_cut_by_a_zigzag_arrives_in_the_order_of_the_slice() -> None:
    # Lane of 8 tokens: item 0 has tokens 1..5, item 1 has 6 and 7; rank 0 has tokens 0, 1, 6, 7; rank 1 has 2..5.
    parts = parts_of_slices(
        np.array([5, 2]),
        tokens=np.arange(1, 8),
        slices=[np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])],
        receivers=np.array([0, 1]),
    )
    assert parts.item.tolist() == [0, 1, 0]
    assert parts.start.tolist() == [0, 0, 1]
    assert parts.rows.tolist() == [1, 2, 4]
    assert parts.receiver.tolist() == [0, 0, 1]
    exchange = Exchange.of_parts(np.array([5, 2]), encoder=np.array([1, 0]), parts=parts, num_ranks=2)
    assert exchange.sent.tolist() == [[2, 0], [1, 4]]
    assert exchange.receive_order(0).tolist() == [2, 0, 1], (
        "its first row comes from rank 1, so it arrives last"
    )


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Items with costs of few kinds or of many, and homes on some of the ranks."""
    num_ranks = draw(st.integers(1, 6))
    most = draw(st.sampled_from([2, 5, 10**6, 2**40]))
    homes = st.integers(0, draw(st.integers(0, num_ranks - 1)))
    drawn = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, 9), homes), max_size=30))
    cost, rows, home = np.array(drawn, np.int64).reshape(-1, 3).T
    return cost, rows, home, num_ranks


def loads(rank: np.ndarray, cost: np.ndarray, num_ranks: int) -> list[int]:
    return [int(cost[rank == one].sum()) for one in range(num_ranks)]


def lpt(cost: np.ndarray, num_ranks: int) -> list[int]:
    """Load of each rank by the rule of Graham, without regard to homes."""
    heap = [0] * num_ranks
    for one in sorted(cost.tolist(), reverse=True):
        heapq.heapreplace(heap, heap[0] + one)
    return heap


@given(tables())
@settings(max_examples=1000)
def test_no_rank_encodes_more_than_if_items_had_no_home_or_half_a_percent_over_the_mean(
    table: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    cost, rows, home, num_ranks = table
    rank = assign_encoders(cost, rows, home, num_ranks=num_ranks)
    assert rank.shape == cost.shape
    assert set(rank.tolist()) <= set(range(num_ranks))
    even = int(cost.sum()) // num_ranks * 1005 // 1000
    assert max(loads(rank, cost, num_ranks)) <= max(even, *lpt(cost, num_ranks))
    again = assign_encoders(cost.astype("<u8"), rows.astype("<u4"), home.astype("<u2"), num_ranks=num_ranks)
    assert again.tolist() == rank.tolist(), "whatever the width of the integers"


def test_of_small_cases_few_send_more_than_the_least_for_their_balance() -> None:
    rng = np.random.default_rng(0)
    most = least = 0
    for _ in range(60):
        cost, rows, home = rng.integers(1, 6, 7), rng.integers(1, 9, 7), rng.integers(0, 2, 7)
        rank = assign_encoders(cost, rows, home, num_ranks=3)
        bound = max(loads(rank, cost, 3))
        ways = np.array(list(itertools.product(range(3), repeat=7)))
        load = np.stack([(cost * (ways == one)).sum(1) for one in range(3)]).max(0)
        best = (rows * (ways != home)).sum(1)[load <= bound].min()
        assert best <= rows[rank != home].sum()
        least += int(best)
        most += int(rows[rank != home].sum())
    assert 0 < least <= most <= 1.2 * least


def test_items_of_balanced_homes_all_stay() -> None:
    cost = np.array([7, 5, 3, 9, 1, 5, 8, 7])
    home = np.array([0, 0, 0, 1, 1, 1, 2, 2])
    assert assign_encoders(cost, cost, home, num_ranks=3).tolist() == home.tolist()


def test_the_work_of_one_data_parallel_rank_is_spread_over_the_ranks_that_share_its_lanes_and_all_others() -> (
    None
):
    rng = np.random.default_rng(0)
    rows = rng.integers(16, 1024, 4000)
    home = rng.integers(0, 8, 4000) * 8  # dp=8, tp=8: one in eight receives
    rank = assign_encoders(rows * rows, rows, home, num_ranks=64)
    load = np.array(loads(rank, rows * rows, 64))
    assert load.max() * 1000 <= load.mean() * 1005
    assert rows[rank == home].sum() * 8 >= rows.sum() * 0.99, (
        "an eighth of the work is all that homes have time for"
    )


def test_of_homes_that_have_about_the_same_work_few_items_leave() -> None:
    rng = np.random.default_rng(0)
    rows, home = rng.integers(16, 1024, 4000), rng.integers(0, 64, 4000)
    rank = assign_encoders(rows * rows, rows, home, num_ranks=64)
    before, after = loads(home, rows * rows, 64), loads(rank, rows * rows, 64)
    assert max(before) > 1.2 * np.mean(before), "they do need balance"
    assert max(after) * 1000 <= np.mean(after) * 1005
    assert rows[rank == home].sum() > 0.9 * rows.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": np.array([1, -2])}, "items: cost is -2 in row 1, below 0"),
        ({"cost": np.array([1.0, np.nan])}, "items: cost is of float64; give whole numbers"),
        ({"cost": np.array([2**62, 2**62])}, "items: cost adds up to more than 64 bits"),
        ({"rows": np.array([1])}, r"items: columns have the shapes cost \[2\], rows \[1\], home \[2\]"),
        ({"home": np.array([0, 4])}, "items: a rank is 4, not in 0..3"),
        ({"num_ranks": 0}, "items: num_ranks is 0, not in 1"),
        ({"num_ranks": 2**40}, "items: num_ranks is 1099511627776, not in 1"),
    ],
)
def test_items_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"cost": np.array([1, 2]), "rows": np.array([1, 2]), "home": np.array([0, 1])}
    with pytest.raises(PlaceError, match=message):
        assign_encoders(**{**good, "num_ranks": 4, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("item", "start", "rows"),
    [
        ([0, 1], [0, 0], [3, 1]),  # a row of item 1 is in no part
        ([0, 1, 1], [0, 0, 1], [3, 2, 1]),  # one is in two
        ([0, 1], [0, 0], [4, 1]),  # a part beyond its item
        ([1, 1], [0, 1], [1, 1]),  # no part of item 0
        ([0, 0, 1], [0, 0, 0], [3, 3, 2]),
    ],
)
def test_parts_that_are_not_each_row_once_are_refused(
    item: list[int], start: list[int], rows: list[int]
) -> None:
    parts = Parts(
        item=np.array(item),
        start=np.array(start),
        rows=np.array(rows),
        receiver=np.zeros(len(item), np.int64),
    )
    with pytest.raises(PlaceError, match=r"rows are not the 5 rows of the 2 items, each once"):
        Exchange.of_parts(np.array([3, 2]), encoder=np.array([0, 1]), parts=parts, num_ranks=2)


def test_slices_and_ranks_that_do_not_fit_are_refused() -> None:
    def parts(tokens: list[int], *slices: list[int]) -> Parts:
        return parts_of_slices(
            np.array([2]),
            tokens=np.array(tokens),
            slices=[np.array(one) for one in slices],
            receivers=np.arange(2),
        )

    with pytest.raises(PlaceError, match="3 placeholders for 2 rows"):
        parts([0, 1, 2], [0, 1, 2], [3])
    with pytest.raises(PlaceError, match="placeholders: token is -1 in row 1, below 0"):
        parts([0, -1], [0], [1])
    with pytest.raises(PlaceError, match="slices: 3 slices and 2 receivers"):
        parts([0, 1], [0], [1], [2])
    with pytest.raises(PlaceError, match="not every one of the 2 placeholders is in them once"):
        parts([0, 1], [0], [2])
    with pytest.raises(PlaceError, match="not every one of the 2 placeholders is in them once"):
        parts([0, 1], [0], [0])
    exchange = Exchange.of(np.array([2]), encoder=np.array([0]), receiver=np.array([1]), num_ranks=2)
    for ask in (exchange.send_rows, exchange.receive_rows, exchange.send_order, exchange.items_of):
        with pytest.raises(PlaceError, match=r"exchange: a rank is 2, not in 0\.\.1"):
            ask(2)
    one = np.array([1])
    beyond = Parts(item=one * 3, start=one, rows=one, receiver=one)
    with pytest.raises(PlaceError, match="parts: item 3 is not among the 1 items"):
        Exchange.of_parts(one, encoder=one, parts=beyond, num_ranks=2)


def test_a_step_without_items_exchanges_nothing() -> None:
    nothing = np.empty(0, np.int64)
    assert assign_encoders(nothing, nothing, nothing, num_ranks=3).tolist() == []
    exchange = Exchange.of(nothing, encoder=nothing, receiver=nothing, num_ranks=3)
    assert exchange.sent.tolist() == [[0] * 3] * 3
    assert exchange.send_order(1).tolist() == exchange.receive_order(1).tolist() == []
    assert names_of(nothing) == []
