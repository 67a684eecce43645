"""How many messages each actor handles in a step, with constructors in between and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omniload.errors import PlaceError


@dataclass(frozen=True, kw_only=True, slots=True)
class Fanout:
    """Messages that one actor of each role sends and receives in a step, at most: one per pair that has to do.

    Metadata go from each loader to the planner, the plan to whoever builds lanes, payload from the loaders to
    these, and finished lanes to the clients that fetch. The largest number of a role is what limits the job.
    """

    planner: int
    """Metadata in, plans out."""
    loader: int
    """Metadata out, payload out."""
    constructor: int
    """The plan in, payload in, lanes out; 0 without constructors."""
    client: int
    """Lanes in; without constructors the plan and payload."""
    total: int
    """Messages of the whole job; each is handled by two actors."""

    @classmethod
    def with_constructors(cls, *, loaders: int, constructors: int, clients: int) -> Self:
        """Each loader has one bundle for each constructor, which serves an even share of the clients.

        Args:
            loaders: number of loaders.
            constructors: number of constructors; one per node is usual.
            clients: number of ranks that fetch; those served by broadcast do not count.

        Raises:
            PlaceError: there is none of them, or a constructor without a client.
        """
        _check(loaders=loaders, constructors=constructors, clients=clients)
        if constructors > clients:
            raise PlaceError(f"constructors: {constructors} are more than the {clients} clients; take fewer")
        return cls(
            planner=loaders + constructors,
            loader=1 + constructors,
            constructor=1 + loaders + -(-clients // constructors),
            client=1,
            total=loaders + constructors + loaders * constructors + clients,
        )

    @classmethod
    def direct(cls, *, loaders: int, clients: int) -> Self:
        """Each client has payload from every loader, and builds its lanes itself.

        Raises:
            PlaceError: there is none of them.
        """
        _check(loaders=loaders, clients=clients)
        return cls(
            planner=loaders + clients,
            loader=1 + clients,
            constructor=0,
            client=1 + loaders,
            total=loaders + clients + loaders * clients,
        )


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise PlaceError(f"{name}: {count} is below 1; give their number")
