"""Ranges read together: every byte delivered, and little read in vain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import Corrupt, Store
from storage.backend import RangeRead
from storage.coalescing import MAX_GAP_BYTES, coalesce

MAX_BYTES = 1 << 20


def wanted(*bounds: tuple[int, int], path: str = "x") -> list[RangeRead]:
    return [
        RangeRead(path=path, start=start, into=memoryview(bytearray(end - start))) for start, end in bounds
    ]


def spans(ranges: list[RangeRead]) -> list[tuple[int, int]]:
    return [(run.whole.start, run.whole.end) for run in coalesce(ranges, MAX_BYTES)]


def test_neighbours_are_joined_in_any_order() -> None:
    assert spans(wanted((200, 300), (0, 100), (100, 200), (50, 250))) == [(0, 300)]


def test_a_range_alone_is_read_into_its_own_memory() -> None:
    [one] = wanted((5, 10))
    [run] = coalesce([one], MAX_BYTES)
    assert run.whole is one


def test_the_gap_is_bounded() -> None:
    near, far = MAX_GAP_BYTES, MAX_GAP_BYTES + 1
    size = MAX_GAP_BYTES
    assert len(spans(wanted((0, size), (size + near, 2 * size + near)))) == 1
    assert len(spans(wanted((0, size), (size + far, 2 * size + far)))) == 2


def test_what_is_read_in_vain_is_bounded() -> None:
    assert spans(wanted((0, 10), (31, 40), (41, 50))) == [(0, 10), (31, 50)]


def test_the_length_is_bounded_but_for_one_range_that_is_longer() -> None:
    half = MAX_BYTES // 2
    assert spans(wanted((0, half), (half, 2 * half), (2 * half, 3 * half))) == [
        (0, 2 * half),
        (2 * half, 3 * half),
    ]
    assert spans(wanted((0, 2 * MAX_BYTES))) == [(0, 2 * MAX_BYTES)]


def test_objects_are_never_joined() -> None:
    assert len(spans(wanted((0, 10)) + wanted((10, 20), path="y"))) == 2


bounds = st.tuples(st.integers(0, 5000), st.integers(1, 700)).map(lambda pair: (pair[0], sum(pair)))


@given(
    ranges=st.lists(st.tuples(bounds, st.sampled_from("xy")), max_size=20),
    object_bytes=st.integers(0, 6000),
    max_bytes=st.integers(1, 4000),
)
def test_every_range_gets_exactly_its_bytes(
    ranges: list[tuple[tuple[int, int], str]], object_bytes: int, max_bytes: int
) -> None:
    """Whatever is asked for, and wherever the object ends."""
    data = {path: bytes((i * 7 + ord(path)) % 251 for i in range(object_bytes)) for path in "xy"}
    asked = [one for pair, path in ranges for one in wanted(pair, path=path)]
    seen = []
    for run in coalesce(asked, max_bytes):
        found = data[run.whole.path][run.whole.start : run.whole.end]
        run.whole.into[: len(found)] = found
        unasked = set(range(run.whole.start, run.whole.end))
        for one, num_bytes in run.deliver(len(found)):
            expected = data[one.path][one.start : one.end]
            assert one.path == run.whole.path
            assert num_bytes == len(expected)
            assert one.into[:num_bytes] == expected
            unasked -= set(range(one.start, one.end))
            seen.append(one)
        assert len(run.members) == 1 or run.whole.into.nbytes <= max_bytes
        assert 2 * len(unasked) <= run.whole.into.nbytes
    assert sorted(map(id, seen)) == sorted(map(id, asked))


def test_a_remote_store_reads_neighbours_at_once_and_names_the_range_that_is_short() -> None:
    store = Store("memory://coalescing")
    store.write("x", bytes(range(100)))
    requests: list[int] = []
    read_range = store._backend._backend.read_range  # type: ignore[attr-defined]

    def counted(one: RangeRead) -> int:
        requests.append(one.start)
        return int(read_range(one))

    store._backend._backend.read_range = counted  # type: ignore[attr-defined]
    views = store.read_ranges([("x", 50, 60), ("x", 0, 10), ("x", 10, 50)])
    assert [bytes(view) for view in views] == [bytes(range(50, 60)), bytes(range(10)), bytes(range(10, 50))]
    assert requests == [0]
    with pytest.raises(Corrupt, match=r"x: bytes 95\.\.105 wanted, the object ends at 100"):
        store.read_ranges([("x", 80, 95), ("x", 95, 105)])
    store.delete("x")
