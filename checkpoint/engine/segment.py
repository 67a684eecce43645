"""Memory that ranks of one machine share during a load.

A segment is an anonymous file, which its maker keeps open until the others have opened it below ``/proc``. It has no
name in any file system: whatever becomes of the processes, the system takes it back with the last of them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
from torch._C._distributed_c10d import PrefixStore, Store

from checkpoint.engine.connections import Connections
from checkpoint.engine.memory import Bytes

_NAME: Final = "omniload-checkpoint"
_TOKEN_BYTES: Final = 16
_HEAD_BYTES: Final = mmap.PAGESIZE
"""The token lies there, so that what follows begins at a page."""

_ADDRESS: Final = struct.Struct(f"<32sqqq{_TOKEN_BYTES}s")  # machine, process, file, bytes, token

NOWHERE: Final = bytes(_ADDRESS.size)
"""An address that nobody can attach to."""

_YES: Final = b"+"
_NO: Final = b"-"


def this_machine() -> bytes:
    """What all processes have in common that know each other by the same ids; 32 bytes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # a system without /proc: nobody else has the same
        return secrets.token_bytes(32)
    return hashlib.sha256(name.encode()).digest()


class Segment:
    """One process's map of a segment.

    Attributes:
        memory: What is shared, uint8 ``[num_bytes]``; begins at a page. It stays until the last array over it is gone.

    Args:
        file: Descriptor of the anonymous file.
        num_bytes: Size of what is shared.

    Raises:
        OSError, ValueError: The file cannot be mapped.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self._file = file
        mapped = np.frombuffer(mmap.mmap(file, _HEAD_BYTES + num_bytes), dtype=np.uint8)
        self._token = mapped[:_TOKEN_BYTES]
        self.memory: Bytes = mapped[_HEAD_BYTES:]

    @classmethod
    def make(cls, num_bytes: int) -> Self | None:
        """A new segment, for others to attach to until :meth:`close`; None where the system gives none."""
        if not hasattr(os, "memfd_create"):
            return None
        file = -1
        try:
            file = os.memfd_create(_NAME)
            os.ftruncate(file, _HEAD_BYTES + num_bytes)
            segment = cls(file, num_bytes)
        except OSError:
            if file >= 0:
                os.close(file)
            return None
        segment._token[:] = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), dtype=np.uint8)
        return segment

    @classmethod
    def attach(cls, address: bytes, machine: bytes) -> Self | None:
        """The segment of another process.

        Args:
            address: What its maker says.
            machine: What :func:`this_machine` says here.

        Returns:
            None if this process cannot get at it. That is found out by doing it: of two systems that look like one
            machine, one does not find the token of the other.
        """
        there, process, number, num_bytes, token = _ADDRESS.unpack(address)
        path = Path(f"/proc/{process}/fd/{number}")
        if there != machine:
            return None
        try:
            # To open what is none of ours might block, or do something.
            if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                return None
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            segment = cls(file, num_bytes)
        except (OSError, ValueError):  # the latter: it is smaller than that
            return None
        finally:
            os.close(file)
        return segment if segment._token.tobytes() == token else None

    def address(self, machine: bytes) -> bytes:
        """For :meth:`attach`; of the size of ``NOWHERE``."""
        return _ADDRESS.pack(machine, os.getpid(), self._file, len(self.memory), self._token.tobytes())

    def close(self) -> None:
        """Let nobody else attach; for who made it."""
        os.close(self._file)


class Segments:
    """What one rank shares with others of its machine.

    Attributes:
        own: Segment that this rank writes; None if nobody else sees it.
        receivers: Ranks that see it.
        others: Segments of other ranks, by rank; those that this one sees.

    Args:
        rank: This rank.
        machine: What :func:`this_machine` says.
        timeout_s: Longest wait for another rank.
    """

    def __init__(self, rank: int, machine: bytes, timeout_s: float) -> None:
        self._rank = rank
        self._machine = machine
        self._timeout_s = timeout_s
        self._copied = Connections(rank, (), timeout_s)
        self.own: Segment | None = None
        self.receivers: set[int] = set()
        self.others: dict[int, Segment] = {}

    def open(self, connections: Connections, peers: Sequence[int], num_bytes: int, store: Store) -> None:
        """Find out who sees whose memory, with all peers at the same time.

        Args:
            connections: To all peers; nothing else is under way on them.
            peers: Other ranks.
            num_bytes: Size of the segment of this rank; 0: it needs none.
            store: Shared by all of them, and used by nobody else.

        Raises:
            PeersLost: A peer is gone, or does not answer.
        """
        own = Segment.make(num_bytes) if num_bytes else None
        try:
            address = NOWHERE if own is None else own.address(self._machine)
            _tell(connections, dict.fromkeys(peers, address))
            for peer, there in _hear(connections, peers, len(NOWHERE)):
                segment = Segment.attach(there, self._machine)
                if segment is not None:
                    self.others[peer] = segment
            _tell(connections, {peer: _YES if peer in self.others else _NO for peer in peers})
            self.receivers = {peer for peer, sees in _hear(connections, peers, 1) if sees == _YES}
        finally:
            if own is not None:
                own.close()
        self.own = own if self.receivers else None
        # Connections of their own: on the others, what these ranks read for each other is under way.
        self._copied = Connections(self._rank, self.receivers | self.others.keys(), self._timeout_s)
        self._copied.open(PrefixStore("copied", store))

    def say_copied(self, rank: int) -> None:
        """Tell another rank that this one is done with what it last told to lie in its segment.

        Raises:
            PeersLost: It is gone.
        """
        _tell(self._copied, {rank: _YES})

    def wait_until_copied(self, ranks: Sequence[int]) -> None:
        """Wait until other ranks have said so once more.

        Raises:
            PeersLost: One is gone, or does not say so in time.
        """
        for _ in _hear(self._copied, ranks, len(_YES)):
            pass

    def close(self) -> None:
        """End all waits for and of other ranks."""
        self._copied.close()


def _tell(connections: Connections, messages: Mapping[int, bytes]) -> None:
    for peer, message in messages.items():
        connections.send(peer, [memoryview(message)])


def _hear(connections: Connections, peers: Iterable[int], num_bytes: int) -> Iterator[tuple[int, bytes]]:
    for peer in peers:
        message = bytearray(num_bytes)
        connections.receive(peer, [memoryview(message)])
        yield peer, bytes(message)
