"""How many messages an actor handles in a step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import PlaceError
from omniload.placing import Fanout

counts = st.integers(1, 12)


@given(counts, counts, counts)
def test_the_numbers_are_those_of_a_step_played_through(loaders: int, nodes: int, more: int) -> None:
    clients = nodes + more
    messages = [(("loader", i), ("planner", 0)) for i in range(loaders)]
    direct = messages.copy()
    for node in range(nodes):
        messages.append((("planner", 0), ("constructor", node)))
        messages += [(("loader", i), ("constructor", node)) for i in range(loaders)]
    messages += [(("constructor", client % nodes), ("client", client)) for client in range(clients)]
    for client in range(clients):
        direct.append((("planner", 0), ("client", client)))
        direct += [(("loader", i), ("client", client)) for i in range(loaders)]
    for fanout, sent in (
        (Fanout.with_constructors(loaders=loaders, constructors=nodes, clients=clients), messages),
        (Fanout.direct(loaders=loaders, clients=clients), direct),
    ):
        handled = Counter(actor for pair in sent for actor in pair)
        for role in ("planner", "loader", "constructor", "client"):
            most = max((number for (kind, _), number in handled.items() if kind == role), default=0)
            assert getattr(fanout, role) == most
        assert fanout.total == len(sent)


@pytest.mark.parametrize("clients", [1024, 4096, 16384])
def test_constructors_keep_a_client_at_one_message_and_a_loader_at_one_per_node(clients: int) -> None:
    bundled = Fanout.with_constructors(loaders=300, constructors=clients // 8, clients=clients)
    direct = Fanout.direct(loaders=300, clients=clients)
    assert (bundled.client, direct.client) == (1, 301)
    assert (bundled.loader, direct.loader) == (1 + clients // 8, 1 + clients)
    assert bundled.constructor == 309, "however many clients there are"
    assert 7 < direct.total / bundled.total < 8


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlaceError, match="loaders: 0 is below 1"):
        Fanout.direct(loaders=0, clients=1)
    with pytest.raises(PlaceError, match="constructors: 9 are more than the 8 clients"):
        Fanout.with_constructors(loaders=1, constructors=9, clients=8)
