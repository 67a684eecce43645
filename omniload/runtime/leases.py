"""Leases: which loader may read which window of a source, and since when.

A window is read by the loader that holds its lease. When a lease moves, its generation grows, and an answer given
under an older generation is refused; so a loader that is slow or thought dead can never deliver a window twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read one window."""

    loader: int
    """Index of the loader that holds it."""
    generation: int
    """Grows each time the lease moves."""


class LeaseTable:
    """Leases of the windows of one source. Windows are dealt round-robin until a lease is moved.

    Args:
        num_loaders: loaders that share the source.
        num_standbys: loaders after those, which hold a lease only once it is moved to them.
    """

    def __init__(self, num_loaders: int, num_standbys: int = 0) -> None:
        self._num_loaders = num_loaders
        self._num_members = num_loaders + num_standbys
        self._moved: dict[tuple[int, int], Lease] = {}

    def holder(self, epoch: int, window: int) -> Lease:
        """The lease in force on a window."""
        return self._moved.get((epoch, window), Lease(window % self._num_loaders, 0))

    def move(self, epoch: int, window: int) -> Lease:
        """Give a window to the next loader, or standby."""
        old = self.holder(epoch, window)
        lease = Lease((old.loader + 1) % self._num_members, old.generation + 1)
        self._moved[epoch, window] = lease
        return lease

    def accepts(self, epoch: int, window: int, lease: Lease) -> bool:
        """Whether an answer given under ``lease`` still counts."""
        return self.holder(epoch, window) == lease

    def forget_before(self, epoch: int, window: int) -> None:
        """Drop the moved leases of windows that are read to their end."""
        self._moved = {key: lease for key, lease in self._moved.items() if key >= (epoch, window)}
