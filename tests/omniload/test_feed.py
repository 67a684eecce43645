"""A source read through loaders that die, hang and answer late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import CorruptSource, LoaderTimeout
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, SampleChunk
from omniload.runtime.feed import LoaderLost, SourceFeed
from omniload.runtime.leases import Lease, LeaseTable
from tests.omniload.planning import FakeMetadata

ROWS = [[3, 4]] * 41
METADATA = FakeMetadata([ROWS], seq_len=8)
SPEC = SourceSpec(path=("memory",), weight=1, on_exhausted="repeat")


class FakeLoader:
    """Reads `ROWS`, once ``before`` the read lets it."""

    def __init__(self, before: Callable[[int], None] = lambda nth: None) -> None:
        self._before = before
        self._lock = threading.Lock()
        self.reads = 0
        self.windows: list[tuple[int, int]] = []

    def read(self, cursor: Cursor, max_samples: int) -> SampleChunk:
        with self._lock:
            self.reads += 1
            nth = self.reads
        self._before(nth)
        self.windows.append((cursor.epoch, cursor.window))
        return METADATA.read(0, cursor)

    def evict(self, fraction: float) -> None:
        pass


def dies(*reads: int) -> FakeLoader:
    """A loader that loses some of its reads, by their number from 1."""

    def before(nth: int) -> None:
        if nth in reads:
            raise LoaderLost(f"read {nth} is lost")

    return FakeLoader(before)


def dead() -> FakeLoader:
    def before(nth: int) -> None:
        raise LoaderLost("it is not running")

    return FakeLoader(before)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Hears:
    """What is heard of the loaders of a feed."""

    def __init__(self) -> None:
        self.of_lost: list[tuple[Any, str]] = []
        self.of_moved: list[tuple[int, str]] = []
        self.of_refused: list[tuple[Any, int]] = []

    def lost(self, source: str, loader: Any, why: LoaderLost) -> None:
        assert source == "prose"
        self.of_lost.append((loader, str(why)))

    def lease_moved(self, source: str, cursor: Cursor, lease: Lease, why: str) -> None:
        self.of_moved.append((lease.generation, why))

    def answer_refused(self, source: str, cursor: Cursor, loader: Any, lease: Lease) -> None:
        self.of_refused.append((loader, lease.generation))


def feed(loaders: Sequence[FakeLoader], pool: ThreadPoolExecutor, **keys: object) -> SourceFeed:
    return SourceFeed("prose", SPEC, loaders, pool, **{"timeout_s": 30.0, **keys})  # type: ignore[arg-type]


def addresses(feed: SourceFeed, chunks: int = 30) -> list[tuple[int, int, int, int]]:
    """Epoch, window, position and sub-index of every sample of the first chunks."""
    found, cursor = [], Cursor()
    for _ in range(chunks):
        chunk = feed.read(cursor)
        assert chunk.begin == cursor
        of_window = (cursor.epoch, cursor.window)
        found += [(*of_window, *one) for one in zip(chunk.position.tolist(), chunk.sub.tolist(), strict=True)]
        cursor = chunk.end
    return found


def expected(pool: ThreadPoolExecutor) -> list[tuple[int, int, int, int]]:
    found = addresses(feed([FakeLoader()], pool))
    assert len(found) == len(set(found))
    assert found[-1][0] >= 1, "more than an epoch"
    return found


@given(st.lists(st.sets(st.integers(1, 12)), min_size=2, max_size=4), st.integers(0, 1))
def test_samples_are_the_same_whichever_reads_are_lost(lost: list[set[int]], num_standbys: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaders = [dies(*reads) for reads in lost]
        hears = Hears()
        one = feed(loaders, pool, num_standbys=num_standbys, observer=hears)
        assert addresses(one) == expected(pool)
        assert len(hears.of_lost) == sum(
            1 for loader, reads in zip(loaders, lost, strict=True) for nth in reads if nth <= loader.reads
        )


def test_a_standby_reads_nothing_until_a_loader_is_lost_and_hands_back_when_it_is_there_again(
    pool: ThreadPoolExecutor,
) -> None:
    reader, standby = dies(3), FakeLoader()
    hears = Hears()
    one = feed([reader, standby], pool, num_standbys=1, observer=hears)
    cursor = one.read(Cursor()).end
    assert standby.reads == 0
    deadline = time.monotonic() + 60
    while reader.reads <= 3:
        assert time.monotonic() < deadline
        cursor = one.read(cursor).end
        time.sleep(0.01)
    assert hears.of_lost == [(reader, "read 3 is lost")]
    assert hears.of_moved[0] == (1, "read 3 is lost")
    taken = standby.reads
    assert taken > 3, "it is not asked while it is thought dead"
    for _ in range(6):
        cursor = one.read(cursor).end
    assert reader.reads > 4
    assert standby.reads <= taken + 1, "what was read ahead"


def test_a_late_answer_is_refused_once_the_lease_has_moved(pool: ThreadPoolExecutor) -> None:
    leases: list[LeaseTable] = []

    def move(nth: int) -> None:
        if nth == 2:  # who gave up on it did this meanwhile
            leases[0].move(0, 0)

    slow, other = FakeLoader(move), FakeLoader()
    hears = Hears()
    one = feed([slow, other], pool, observer=hears)
    leases.append(one._sharing.leases)
    assert addresses(one) == expected(pool)
    assert one.stale_answers == 1
    assert hears.of_refused == [(slow, 0)]
    assert (0, 0) in slow.windows
    assert (0, 0) in other.windows


def test_payload_is_to_be_asked_of_the_loader_that_read_its_window(pool: ThreadPoolExecutor) -> None:
    loaders = [FakeLoader(), dies(3), FakeLoader()]
    one, cursor, holders = feed(loaders, pool), Cursor(), dict[int, int]()
    for _ in range(12):
        chunk = one.read(cursor)
        cursor = chunk.end
        [holder] = set(one.holders(chunk.pieces).tolist())
        assert (chunk.begin.epoch, chunk.begin.window) in loaders[holder].windows
        holders[chunk.begin.window] = holder
    assert one.holders(np.concatenate([chunk.pieces, chunk.pieces])).tolist() == [holder] * 2 * len(
        chunk.pieces
    )
    assert set(holders.values()) == {0, 1, 2}
    assert any(window % 3 != holder for window, holder in holders.items()), "a lease has moved"
    assert not feed([FakeLoader()], pool).is_shared


def test_where_all_loaders_are_lost_it_waits_until_one_is_back(pool: ThreadPoolExecutor) -> None:
    assert addresses(feed([dies(1, 2, 3), dies(1, 2, 3, 4)], pool)) == expected(pool)


def test_when_none_comes_back_the_error_names_the_source_and_what_its_loader_says(
    pool: ThreadPoolExecutor,
) -> None:
    with pytest.raises(
        LoaderTimeout, match=r"source 'prose': no loader answered within 0\.3 s \(it is not running\)"
    ):
        feed([dead(), dead()], pool, num_standbys=1, timeout_s=0.3).read(Cursor())


def test_when_none_answers_the_error_names_the_source_and_the_place(pool: ThreadPoolExecutor) -> None:
    freed = threading.Event()
    stuck = FakeLoader(lambda nth: (None if nth == 1 else freed.wait(60)) and None)
    one = feed([stuck], pool, timeout_s=0.3)
    cursor = one.read(Cursor()).end
    with pytest.raises(
        LoaderTimeout,
        match=rf"source 'prose': no samples within 0\.3 s \(epoch 0, window {cursor.window}, row",
    ):
        one.read(cursor)
    freed.set()


def test_an_error_of_the_source_is_raised_and_no_other_loader_is_asked(pool: ThreadPoolExecutor) -> None:
    def broken(nth: int) -> None:
        raise CorruptSource("it is no Parquet file")

    other = FakeLoader()
    with pytest.raises(CorruptSource, match="no Parquet"):
        feed([FakeLoader(broken), other], pool).read(Cursor())
    assert other.reads == 0


def test_windows_are_dealt_over_loaders_and_not_over_standbys() -> None:
    table = LeaseTable(3, 2)
    assert [table.holder(0, window).loader for window in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@given(
    st.integers(1, 5),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=12),
)
def test_a_lease_that_moves_goes_round_and_what_was_given_under_it_counts_no_more(
    num_loaders: int, num_standbys: int, moves: list[tuple[int, int]]
) -> None:
    table = LeaseTable(num_loaders, num_standbys)
    given: dict[int, list[Lease]] = {}
    for window, times in moves:
        for _ in range(times):
            given.setdefault(window, []).append(table.holder(0, window))
            table.move(0, window)
    for window in range(6):
        old = given.get(window, [])
        assert not any(table.accepts(0, window, lease) for lease in old)
        lease = table.holder(0, window)
        assert table.accepts(0, window, lease)
        assert lease == Lease((window % num_loaders + len(old)) % (num_loaders + num_standbys), len(old))
    table.forget_before(0, 3)
    assert table.holder(0, 2) == Lease(2 % num_loaders, 0)


def test_a_source_shared_among_others_meanwhile_gives_the_same_samples(pool: ThreadPoolExecutor) -> None:
    feeds: list[SourceFeed] = []
    others = [FakeLoader(), FakeLoader()]

    def share(nth: int) -> None:
        if nth == 4:
            feeds[0].share(others, 1)

    first = FakeLoader(share)
    feeds.append(feed([first], pool))
    assert addresses(feeds[0]) == expected(pool)
    assert feeds[0].stale_answers == 1, "what was being read then"
    assert first.reads == 4
    assert others[0].reads
    assert not others[1].reads, "it stands by"
