"""Who takes part in a job: known by what the nodes say again and again, and forgotten when they fall silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniload.runtime.ray.streams import Streams

ALIVE_EVERY_S = 2.0
"""How often ranks tell constructors that they are there, and constructors the planner."""
LOST_AFTER_S = 15.0
"""A rank that its constructor has not heard of for so long takes part no more."""
_SILENT_AFTER_S = 45.0
"""A node whose constructor is silent for so long takes part no more: on a busy machine it may take a while to be made
anew."""
_UNUSED_S = 60.0
"""A job that nobody takes part in for so long since it was made is over."""


class Membership:
    """The nodes that take part, and the ranks that take the steps of streams.

    Args:
        streams: those of the job; one that nobody takes any more is stopped.
        clock: seconds that pass.
    """

    def __init__(self, streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._clock = clock
        self._made = clock()
        self._swept = False
        self._used = False
        self._nodes: dict[str, float] = {}
        # By stream and client: which node said last that it takes steps, and when. By client: what it opened, and when.
        self._heard: dict[tuple[str, str], tuple[str, float]] = {}
        self._opened: dict[str, tuple[str, float]] = {}

    @property
    def nodes(self) -> list[str]:
        """Those that take part."""
        return list(self._nodes)

    @property
    def is_over(self) -> bool:
        """Whether nobody takes part any more, or ever did."""
        return not self._nodes and (self._used or self._clock() >= self._made + _UNUSED_S)

    def opens(self, stream: str, client: str) -> None:
        """A rank takes a stream from now on, and no other."""
        now = self._clock()
        self._opened[client] = stream, now
        self._heard[stream, client] = "", now
        for other, _ in self._streams:
            if other != stream:
                self._leaves(other, client)

    def asks(self, name: str, node: str, asked: Mapping[str, int]) -> None:
        """Ranks of a node have come to ask for these steps of a stream, by their names."""
        stream = self._streams.get(name)
        if stream is None:
            return
        now = self._clock()
        for client, step in asked.items():
            if client not in stream.plans.clients:
                opened, at = self._opened.get(client, (name, now))
                if opened != name and at > now - LOST_AFTER_S:
                    continue  # this was said before it opened the other, and would have its clients wait for nobody
                stream.plans.adopt(client, step)
            self._heard[name, client] = node, now
        stream.plans.ask(asked)

    def decides(self, name: str, client: str) -> None:
        """A rank of some node takes a stream, as it decides about it."""
        self._heard.setdefault((name, client), ("", self._clock()))

    def leave(self, name: str, node: str, clients: Sequence[str]) -> None:
        """Ranks of a node take no more steps of a stream."""
        for client in clients:
            if self._heard.get((name, client), ("", 0.0))[0] in ("", node):  # or else it goes on elsewhere
                self._leaves(name, client)

    def alive(self, node: str, num_clients: int) -> bool:
        """A node says how many ranks it has; False if those that it had are gone."""
        if num_clients:
            self._nodes[node] = self._clock()
            self._used = True
            return True
        return self._nodes.pop(node, None) is None

    def sweep(self) -> None:
        """Have the logs removed that planners before this one left, once ranks have had the time to ask for them again.

        Raises:
            StorageError: they cannot be listed, or not be removed; it is not tried again.
        """
        if not self._swept and self._clock() >= self._made + _SILENT_AFTER_S:
            self._swept = True
            self._streams.sweep()

    def forget_silent(self) -> None:
        """Leave out who has not been heard of for long."""
        since = self._clock() - _SILENT_AFTER_S
        self._nodes = {node: at for node, at in self._nodes.items() if at > since}
        for (name, client), (_, at) in list(self._heard.items()):
            if at < since:
                self._leaves(name, client)

    def _leaves(self, name: str, client: str) -> None:
        self._heard.pop((name, client), None)
        stream = self._streams.get(name)
        if stream is not None and client in stream.plans.clients:
            stream.plans.leave(client)
            if not stream.plans.clients:
                self._streams.stop(name)
