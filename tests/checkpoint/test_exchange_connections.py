"""Connections that a load makes between its ranks: whoever waits for one is woken when it breaks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore

from checkpoint.engine.connections import Connections, PeersLost


def connected(num_ranks: int, store: HashStore) -> list[Connections]:
    """Everybody connected to everybody."""
    ends = [Connections(rank, set(range(num_ranks)) - {rank}, timeout_s=20) for rank in range(num_ranks)]
    in_threads([lambda end=end: end.open(store) for end in ends])
    return ends


def in_threads(calls: list[Callable[[], object]]) -> list[BaseException | None]:
    """Run calls at once; what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a call hangs"
    return raised


def test_bytes_arrive_in_order_from_every_rank() -> None:
    ends = connected(3, HashStore())
    large = bytes(range(256)) * 40_000  # more than the system buffers
    found: dict[tuple[int, int], bytes] = {}

    def send(rank: int) -> None:
        for peer in {0, 1, 2} - {rank}:
            ends[rank].send(
                peer, [memoryview(large), *[memoryview(bytes([rank]))] * 3000, memoryview(bytes([peer]))]
            )

    def receive(rank: int) -> None:
        for peer in {0, 1, 2} - {rank}:
            # Cut otherwise than by the sender, and into more parts than one call takes.
            parts = [bytearray(1) for _ in range(2000)] + [bytearray(len(large) + 1001)]
            ends[rank].receive(peer, [memoryview(part) for part in parts])
            found[peer, rank] = b"".join(parts)

    raised = in_threads([lambda r=r, f=f: f(r) for r in range(3) for f in (send, receive)])
    assert raised == [None] * 6
    assert found == {(a, b): large + bytes([a] * 3000 + [b]) for a in range(3) for b in range(3) if a != b}
    for end in ends:
        end.close()


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_closed_connection_wakes_both_ends(breaks: int) -> None:
    ends = connected(2, HashStore())
    # More than the system buffers, and nobody receives.
    everything = memoryview(bytearray(64 << 20))
    waiting = [lambda: ends[0].send(1, [everything]), lambda: ends[1].send(0, [everything])]
    started = threading.Timer(0.3, ends[breaks].close)
    started.start()
    raised = in_threads(waiting)
    started.join()
    assert all(isinstance(error, PeersLost) for error in raised)
    waiting += [lambda rank=rank: ends[rank].receive(1 - rank, [everything]) for rank in (0, 1)]
    for call in waiting:
        with pytest.raises(PeersLost):
            call()
    for end in ends:
        end.close()


def test_a_peer_that_does_not_come_is_named() -> None:
    with pytest.raises(PeersLost, match="no connection to rank 1"):
        Connections(2, {1}, timeout_s=0.3).open(HashStore())
    with pytest.raises(PeersLost, match="no connection to rank 7"):
        Connections(2, {7}, timeout_s=0.3).open(HashStore())


def test_a_peer_that_says_nothing_is_lost_after_the_time_out() -> None:
    store = HashStore()
    ends = [Connections(0, {1}, timeout_s=0.5), Connections(1, {0}, timeout_s=0.5)]
    assert in_threads([lambda end=end: end.open(store) for end in ends]) == [None, None]
    with pytest.raises(PeersLost, match="receiving from rank 1: timed out"):
        ends[0].receive(1, [memoryview(bytearray(1))])
    for end in ends:
        end.close()


def test_strangers_are_turned_away() -> None:
    """Who does not know the token that is in the store gets nothing, and does not take the place of a peer."""
    store = HashStore()
    end = Connections(0, {1}, timeout_s=20)
    raised: list[BaseException | None] = []
    opening = threading.Thread(target=lambda: raised.extend(in_threads([lambda: end.open(store)])))
    opening.start()
    place = json.loads(store.get("0"))
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=20) as stranger:
        stranger.sendall(b"x" * 16 + (1).to_bytes(4, "little"))
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=20):
        pass  # says nothing at all
    peer = Connections(1, {0}, timeout_s=20)
    peer.open(store)
    opening.join(50)
    assert raised == [None]
    peer.send(0, [memoryview(b"he"), memoryview(b""), memoryview(b"llo")])
    memory = bytearray(5)
    end.receive(1, [memoryview(memory)])
    assert memory == b"hello"
    end.close()
    peer.close()
