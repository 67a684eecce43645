"""Reading short ranges that lie close together by one request.

Where a read mostly waits (``Backend.ranges_per_call`` is 1), a request that also fetches a small gap costs less than
two requests. Two bounds keep that from growing into reading what nobody asked for: on each gap, and on what is
fetched in vain altogether.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from storage.backend import RangeRead
from storage.buffers import new_memory
from storage.paths import byte_order

__all__ = ["MAX_GAP_BYTES", "Run", "coalesce"]

MAX_GAP_BYTES: Final = 256 << 10
"""Largest gap that is read through: what a connection of some 10 MB/s brings in the 20 ms that a request waits."""

_WASTE: Final = 1.0
"""Most bytes fetched in vain, as a share of those wanted: at worst one request fetches twice what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Ranges of one object that are read together.

    Attributes:
        whole: What to ask for: the only member itself, or memory of our own around all of them.
        members: By their first bytes.
    """

    whole: RangeRead
    members: tuple[RangeRead, ...]

    def deliver(self, num_read: int) -> Iterator[tuple[RangeRead, int]]:
        """Bring each member its bytes, once ``num_read`` bytes of ``whole`` have been read.

        Yields:
            Each member, and how many bytes the object had of it.
        """
        for one in self.members:
            begin = one.start - self.whole.start
            num_bytes = max(0, min(one.into.nbytes, num_read - begin))
            if one is not self.whole:
                one.into[:num_bytes] = self.whole.into[begin : begin + num_bytes]
            yield one, num_bytes


def coalesce(wanted: Sequence[RangeRead], max_bytes: int) -> list[Run]:
    """Join ranges that overlap, touch or nearly touch.

    Args:
        wanted: In any order, of any objects.
        max_bytes: Most bytes of a run of several ranges.

    Returns:
        Runs in which each range occurs once, by object and first byte.
    """
    runs: list[Run] = []
    members: list[RangeRead] = []
    end = num_wanted = 0
    for one in sorted(wanted, key=lambda one: (byte_order(one.path), one.start)):
        if members:
            first = members[0]
            new_end = max(end, one.end)
            # Bytes wanted by two ranges count once.
            new_wanted = num_wanted + max(0, new_end - max(end, one.start))
            total = new_end - first.start
            if (
                one.path == first.path
                and one.start - end <= MAX_GAP_BYTES
                and total <= max_bytes
                and total - new_wanted <= _WASTE * new_wanted
            ):
                members.append(one)
                end, num_wanted = new_end, new_wanted
                continue
            runs.append(_run(members, end))
        members, end, num_wanted = [one], one.end, one.into.nbytes
    if members:
        runs.append(_run(members, end))
    return runs


def _run(members: Sequence[RangeRead], end: int) -> Run:
    first = members[0]
    if len(members) == 1:
        return Run(whole=first, members=(first,))
    memory = new_memory(end - first.start)
    return Run(whole=RangeRead(path=first.path, start=first.start, into=memory), members=tuple(members))
