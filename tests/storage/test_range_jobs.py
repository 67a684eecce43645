"""How ranges are shared out to threads."""

from hypothesis import given
from hypothesis import strategies as st

from storage.backend import RangeRead
from storage.parallel import NUM_THREADS
from storage.range_jobs import gather, jobs_of

MIB = 1 << 20
BUFFER = memoryview(bytearray(256 * MIB))

ranges = st.lists(
    st.builds(
        lambda path, start, size: RangeRead(path=path, start=start, into=BUFFER[:size]),
        st.sampled_from("ab"),
        st.integers(0, 1 << 40),
        st.one_of(st.integers(1, 100_000), st.integers(1, len(BUFFER))),
    ),
    max_size=20,
)


def joined(parts: list[RangeRead]) -> list[tuple[str, int, int]]:
    """Parts that continue each other as one range again."""
    found: list[tuple[str, int, int]] = []
    for part in parts:
        if found and found[-1][0] == part.path and found[-1][2] == part.start:
            found[-1] = (part.path, found[-1][1], part.end)
        else:
            found.append((part.path, part.start, part.end))
    return found


@given(ranges)
def test_every_byte_is_in_one_job_and_no_job_is_too_long(wanted: list[RangeRead]) -> None:
    jobs = jobs_of(wanted, 8 * MIB, 64)
    parts = [member for job in jobs for run in job for member in run.members]
    assert joined(parts) == joined(wanted)
    num_bytes = sum(one.into.nbytes for one in wanted)
    bound = max(8 * MIB, min(num_bytes // NUM_THREADS, 64 * MIB))
    for job in jobs:
        assert 1 <= len(job) <= 64
        assert sum(run.whole.into.nbytes for run in job) <= bound


def test_a_long_copy_is_one_job_for_each_thread() -> None:
    """More jobs would only mean more switches between threads."""
    wanted = [RangeRead(path="x", start=0, into=BUFFER) for _ in range(4)]
    assert len(jobs_of(wanted, 8 * MIB, 64)) == NUM_THREADS


def test_a_long_request_is_cut_however_long_it_is() -> None:
    jobs = jobs_of([RangeRead(path="x", start=5, into=BUFFER)], 8 * MIB, 1)
    assert [run.whole.start for [run] in jobs] == [5 + begin for begin in range(0, len(BUFFER), 8 * MIB)]


def test_short_ranges_are_read_in_a_row() -> None:
    wanted = [RangeRead(path="x", start=100 * number, into=BUFFER[:10]) for number in range(130)]
    assert [len(job) for job in gather(wanted, 8 * MIB, 64)] == [64, 64, 2]
    assert [len(job) for job in gather(wanted, 25, 64)][:3] == [2, 2, 2]
    assert gather([], 8 * MIB, 64) == []
