"""Ranges shared out to threads, so that each job is worth one and none is long."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from storage.backend import RangeRead
from storage.coalescing import Run, coalesce
from storage.parallel import NUM_THREADS

__all__ = ["gather", "jobs_of"]

_MAX_COPY_BYTES: Final = 64 << 20


def jobs_of(wanted: Sequence[RangeRead], range_bytes: int, ranges_per_call: int) -> list[list[Run]]:
    """Cut long ranges; read short ones in a row, or those that lie close together by one request.

    Args:
        wanted: In any order, of any objects.
        range_bytes: As of the ``Backend``.
        ranges_per_call: As of the ``Backend``.
    """
    if ranges_per_call == 1:
        return [[run] for run in coalesce(list(_cut(wanted, range_bytes)), range_bytes)]
    job_bytes = _copied_at_once(wanted, range_bytes)
    return [
        [Run(whole=part, members=(part,)) for part in job]
        for job in gather(_cut(wanted, job_bytes), job_bytes, ranges_per_call)
    ]


def gather(parts: Iterable[RangeRead], max_bytes: int, max_parts: int) -> list[list[RangeRead]]:
    """Put parts that follow each other into one job until it has ``max_parts`` or would exceed ``max_bytes``."""
    jobs: list[list[RangeRead]] = []
    room_bytes = room_parts = 0
    for part in parts:
        if part.into.nbytes > room_bytes or not room_parts:
            jobs.append([])
            room_bytes, room_parts = max_bytes, max_parts
        jobs[-1].append(part)
        room_bytes -= part.into.nbytes
        room_parts -= 1
    return jobs


def _copied_at_once(wanted: Sequence[RangeRead], range_bytes: int) -> int:
    """Bytes of one job where reading is copying: ``range_bytes`` or more, so that no thread needs a second job.

    Each job costs several switches between threads; of 32 MiB that is nothing, of 8 MiB a twentieth.
    """
    num_bytes = sum(one.into.nbytes for one in wanted)
    return max(range_bytes, min(num_bytes // NUM_THREADS, _MAX_COPY_BYTES))


def _cut(wanted: Sequence[RangeRead], max_bytes: int) -> Iterator[RangeRead]:
    for one in wanted:
        if one.into.nbytes <= max_bytes:
            yield one
        else:
            for begin in range(0, one.into.nbytes, max_bytes):
                yield one.part(begin, max_bytes)
