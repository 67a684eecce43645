"""Connections between ranks for one load: plain TCP, found through the store that the ranks share.

Not a process group: gloo leaves a send waiting when the rank at its other end goes away, until its time-out, and a
load that fails must fail everywhere at once. A socket that is shut down wakes whoever waits for it, on both ends.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from storage.spans import span

_TOKEN_BYTES: Final = 16
_RANK_BYTES: Final = 4
_WELCOME: Final = b"+"

_ATTEMPT_S: Final = 5.0
"""Longest attempt to connect to one of the addresses of a rank."""

_BUFFER_BYTES: Final = 4 << 20
_MAX_BUFFERS: Final = 1024  # IOV_MAX

# An address that nobody has (RFC 5737). Connecting a datagram socket sends nothing, but picks an interface.
_NOBODY: Final = "192.0.2.1"


class PeersLost(Exception):
    """A connection broke or fell silent; the rank at its other end says why, or is dead."""


class Connections:
    """One rank's connections to some others.

    Args:
        rank: This rank.
        peers: The ranks to connect to; all of them connect to this one.
        timeout_s: Longest wait for a connection, or for the other end to take or give any bytes.
    """

    def __init__(self, rank: int, peers: Iterable[int], timeout_s: float) -> None:
        self._rank = rank
        self._peers = sorted(peers)
        self._timeout_s = timeout_s
        self._sockets: dict[int, socket.socket] = {}

    def open(self, store: Store) -> None:
        """Connect to all peers.

        Args:
            store: Shared by all ranks that connect to each other, and used by nobody else.

        Raises:
            PeersLost: Some did not come in time; names the first.
        """
        deadline = time.monotonic() + self._timeout_s
        token = secrets.token_bytes(_TOKEN_BYTES)
        with span("checkpoint.connect"), socket.create_server(("", 0), backlog=len(self._peers)) as server:
            place = {"to": _addresses(store), "port": server.getsockname()[1], "token": token.hex()}
            store.set(str(self._rank), json.dumps(place))
            try:
                for peer in self._peers:
                    if peer < self._rank:
                        self._sockets[peer] = self._dial(store, peer, deadline)
                while len(self._sockets) < len(self._peers):
                    self._accept(server, token, deadline)
            except (OSError, RuntimeError) as error:
                self.close()
                missing = [peer for peer in self._peers if peer not in self._sockets]
                raise PeersLost(f"no connection to rank {missing[0]}: {_one_line(error)}") from error
        store.delete_key(str(self._rank))  # whoever wanted to know it is connected
        for connection in self._sockets.values():
            connection.settimeout(self._timeout_s)

    def send(self, peer: int, parts: Sequence[memoryview]) -> None:
        """Send bytes, one part after the other; returns when the system has taken them.

        Raises:
            PeersLost: The connection is gone, or the peer takes nothing.
        """
        pending = deque(part for part in parts if part.nbytes)
        try:
            while pending:
                _advance(pending, self._sockets[peer].sendmsg([*islice(pending, _MAX_BUFFERS)]))
        except OSError as error:
            raise PeersLost(f"sending to rank {peer}: {_one_line(error)}") from error

    def receive(self, peer: int, into: Sequence[memoryview]) -> None:
        """Fill parts of memory, one after the other, with the next bytes of a peer.

        Raises:
            PeersLost: The connection is gone, or the peer sends nothing.
        """
        pending = deque(part for part in into if part.nbytes)
        try:
            while pending:
                num_bytes, *_ = self._sockets[peer].recvmsg_into([*islice(pending, _MAX_BUFFERS)])
                if not num_bytes:
                    raise ConnectionError("it closed the connection")
                _advance(pending, num_bytes)
        except OSError as error:
            raise PeersLost(f"receiving from rank {peer}: {_one_line(error)}") from error

    def close(self) -> None:
        """Shut all connections down. Whoever waits for one of them, here or at the other end, does so no longer."""
        for connection in self._sockets.values():
            with suppress(OSError):  # the other end may have done so before
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _dial(self, store: Store, peer: int, deadline: float) -> socket.socket:
        store.wait([str(peer)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        place = json.loads(store.get(str(peer)))
        failure: OSError = TimeoutError("no time left")
        for address in place["to"]:
            connection = None
            try:
                left_s = max(0.001, min(_ATTEMPT_S, deadline - time.monotonic()))
                connection = socket.create_connection((address, place["port"]), timeout=left_s)
                _tune(connection)
                # It greets back when it has itself been greeted by all ranks below it.
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                connection.sendall(bytes.fromhex(place["token"]) + self._rank.to_bytes(_RANK_BYTES, "little"))
                if connection.recv(len(_WELCOME)) == _WELCOME:
                    return connection
                failure = ConnectionError(f"somebody else answers at {address}")
            except OSError as error:
                failure = error
            if connection is not None:
                connection.close()
        raise failure

    def _accept(self, server: socket.socket, token: bytes, deadline: float) -> None:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        connection, _ = server.accept()
        try:
            connection.settimeout(_ATTEMPT_S)
            hello = b""
            while len(hello) < _TOKEN_BYTES + _RANK_BYTES and (
                got := connection.recv(_TOKEN_BYTES + _RANK_BYTES)
            ):
                hello += got
            peer = int.from_bytes(hello[_TOKEN_BYTES:], "little")
            if secrets.compare_digest(hello[:_TOKEN_BYTES], token) and peer in self._peers:
                _tune(connection)
                connection.sendall(_WELCOME)
                self._sockets[peer] = connection
                return
        except OSError:  # a stranger, or a peer that tries another address
            pass
        connection.close()


def _advance(pending: deque[memoryview], num_bytes: int) -> None:
    """Drop so many bytes from the front of parts."""
    while num_bytes:
        part = pending.popleft()
        if part.nbytes > num_bytes:
            pending.appendleft(part[num_bytes:])
        num_bytes -= min(num_bytes, part.nbytes)


def _tune(connection: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _addresses(store: Store) -> list[str]:
    """Where this machine can be reached: as who serves the store reaches it, and as the rest of the world does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    hosts = [store.host] if isinstance(store, TCPStore) else []
    found = []
    for host in (*hosts, _NOBODY, "127.0.0.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
