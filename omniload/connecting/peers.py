"""The process groups of a circle, and the talk in them. A thread has its turn to talk, one after the other.

Before every message the source hears from each receiver whether it has room, and tells all of them what is next. So a
rank that is busy training holds the others up without any of them taking it for dead, one that wants to stop says so,
and who does not answer is known by rank.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from omniload.connecting.board import Board
from omniload.connecting.circles import Circle
from omniload.errors import LoaderTimeout

_WORDS = 4


class Status(IntEnum):
    """What a rank has to say before a message."""

    READY = 0
    """It has room for the next step."""
    BUSY = 1
    """It has not, but it lives."""
    CLOSING = 2
    """It stops here, and the others with it."""


class Verdict(IntEnum):
    """What is next."""

    GO = 0
    """All are ready: the message follows."""
    WAIT = 1
    """A rank is busy: everybody says again how things stand."""
    CLOSED = 2
    """A rank stops, so all do."""
    LOST = 3
    """A rank does not answer, so all stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one round."""

    verdict: Verdict
    """What is next."""
    rank: int = -1
    """The rank that is busy, stops or is lost."""
    size: int = 0
    """Bytes of the message that follows."""


class Peers:
    """The groups of this rank's circle. To make them is a collective call of all ranks of the job.

    Args:
        circles: all circles of the mesh.
        rank: this rank.
        timeout_s: limit of every wait for another rank, in seconds.
        board: where it is said who is lost.
    """

    def __init__(self, circles: Sequence[Circle], rank: int, timeout_s: float, board: Board) -> None:
        self._board = board
        self.circle = next(circle for circle in circles if rank in circle.ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        self.turn = threading.Lock()
        """Held by the thread that talks."""
        self._broken: str | None = None
        self._all = _group_of(rank, [circle.ranks for circle in circles], timeout_s)
        self.audiences = self.circle.audiences()
        """The receivers by what they are sent."""
        per_circle = [circle.audiences() for circle in circles]
        # Apart from the talk, which goes on where a message has not come through: gloo closes a group that timed out.
        self._groups = [
            _group_of(
                rank,
                [
                    (circle.source, *audiences[i][1])
                    for circle, audiences in zip(circles, per_circle, strict=True)
                ],
                timeout_s,
            )
            for i in range(len(self.audiences))
        ]
        self._mine = next((i for i, (_, ranks) in enumerate(self.audiences) if rank in ranks), None)

    @property
    def is_source(self) -> bool:
        """Whether the others receive from this rank."""
        return self.rank == self.circle.source

    def round(self, status: Status, sizes: Sequence[int], waited_for: str) -> Outcome:
        """Say how things stand and hear what is next.

        Args:
            status: of this rank.
            sizes: at the source, the bytes of the message for each audience.
            waited_for: for the message if somebody does not answer.

        Raises:
            LoaderTimeout: a rank did not answer; names it.
        """
        if not self.is_source:
            self._send(self.circle.source, [status], waited_for)
            verdict, rank, size, _ = self._receive(self.circle.source, waited_for)
            if verdict == Verdict.LOST:
                raise self._lost(rank, waited_for, "as the rank that all receive from says")
            return Outcome(verdict=Verdict(verdict), rank=rank, size=size)
        heard = {self.rank: status, **{rank: words[0] for rank, words in self._hear(waited_for).items()}}
        worst = max(heard.values())
        outcome = Outcome(
            verdict=Verdict(worst), rank=next(rank for rank in self.circle.ranks if heard[rank] == worst)
        )
        for (_, ranks), size in zip(self.audiences, sizes, strict=True):
            for rank in ranks:
                self._send(rank, [outcome.verdict, outcome.rank, size], waited_for)
        return outcome

    def agree(self, *values: int, about: str) -> tuple[int, int, int] | None:
        """Whether all ranks have the same two values; if not, one that differs, its first value and the source's.

        Raises:
            LoaderTimeout: a rank did not answer; names it.
        """
        if not self.is_source:
            self._send(self.circle.source, list(values), about)
            verdict, rank, its, first = self._receive(self.circle.source, about)
            if verdict == Verdict.LOST:
                raise self._lost(rank, about, "as the rank that all receive from says")
            return None if verdict == Verdict.GO else (rank, its, first)
        heard = self._hear(about)
        other = next((rank for rank, words in heard.items() if words[: len(values)] != list(values)), None)
        answer = [Verdict.GO] if other is None else [Verdict.CLOSED, other, heard[other][0], values[0]]
        for rank in self.circle.receivers:
            self._send(rank, answer, about)
        return None if other is None else (other, heard[other][0], values[0])

    def share(self, data: bytes, about: str) -> bytes:
        """The source's data, on all ranks.

        Raises:
            LoaderTimeout: a rank did not answer; names it.
        """
        sizes = [len(data)] * len(self.audiences)
        outcome = self.round(Status.READY, sizes, about)
        message = (
            np.frombuffer(bytearray(data), np.uint8) if self.is_source else np.empty(outcome.size, np.uint8)
        )
        self._wait([self._broadcast(message, self._all)], about)
        return message.tobytes()

    def send(self, messages: Sequence[np.ndarray], waited_for: str) -> None:
        """After a round that said so, send ``uint8[n]`` to each audience.

        Raises:
            LoaderTimeout: a rank did not take it.
        """
        works = [
            self._broadcast(message, group) for message, group in zip(messages, self._groups, strict=True)
        ]
        self._wait(works, waited_for)

    def receive(self, message: np.ndarray, waited_for: str) -> None:
        """After a round that said so, receive ``uint8[n]`` of that size.

        Raises:
            LoaderTimeout: it did not come.
        """
        assert self._mine is not None, "the source has no audience"
        self._wait([self._broadcast(message, self._groups[self._mine])], waited_for)

    def _broadcast(self, message: np.ndarray, group: dist.ProcessGroup | None) -> dist.Work:
        assert group is not None, "this rank is in the group"
        work: dist.Work = dist.broadcast(
            torch.from_numpy(message), self.circle.source, group=group, async_op=True
        )
        return work

    def _wait(self, works: Sequence[dist.Work], waited_for: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            if self.is_source:
                self._hear(waited_for)  # raises: one of them does not answer
            else:
                self._send(self.circle.source, [Status.CLOSING], waited_for)
                verdict, rank, _, _ = self._receive(self.circle.source, waited_for)
                lost = rank if verdict == Verdict.LOST else self.circle.source
                raise self._lost(lost, waited_for, str(error)) from None
            raise self._gone("a rank that receives from this one", waited_for, str(error)) from None

    def _hear(self, waited_for: str) -> dict[int, list[int]]:
        """What every receiver says, by rank."""
        self._check()
        words = {rank: torch.zeros(_WORDS, dtype=torch.int64) for rank in self.circle.receivers}
        works = {rank: dist.irecv(words[rank], rank, group=self._all) for rank in words}
        for rank, work in works.items():
            assert work is not None, "this rank is in the group"
            try:
                work.wait()
            except RuntimeError as error:
                self._dismiss(rank)
                raise self._lost(rank, waited_for, str(error)) from None
        return {rank: one.tolist() for rank, one in words.items()}

    def _receive(self, rank: int, waited_for: str) -> list[int]:
        words = torch.zeros(_WORDS, dtype=torch.int64)
        try:
            dist.recv(words, rank, group=self._all)
        except RuntimeError as error:
            raise self._lost(rank, waited_for, str(error)) from None
        return words.tolist()

    def _send(self, rank: int, words: Sequence[int], waited_for: str) -> None:
        self._check()
        tensor = torch.tensor([*words, *[0] * (_WORDS - len(words))], dtype=torch.int64)
        try:
            dist.send(tensor, rank, group=self._all)
        except RuntimeError as error:
            raise self._lost(rank, waited_for, str(error)) from None

    def _dismiss(self, lost: int) -> None:
        """Tell the others that a rank is lost; who does not hear it looks at the board."""
        self._board.say_lost(self.circle.source, lost)
        words = torch.tensor([Verdict.LOST, lost, 0, 0], dtype=torch.int64)
        works = [dist.isend(words, rank, group=self._all) for rank in self.circle.receivers if rank != lost]
        for work in works:
            with suppress(RuntimeError):
                assert work is not None, "this rank is in the group"
                work.wait()

    def _check(self) -> None:
        if self._broken is not None:
            raise LoaderTimeout(self._broken)

    def _lost(self, rank: int, waited_for: str, reason: str) -> LoaderTimeout:
        if rank == self.circle.source:  # it may have closed the group on account of another
            known = self._board.lost(rank)
            rank = rank if known is None else known
        return self._gone(f"rank {rank}", waited_for, reason)

    def _gone(self, who: str, waited_for: str, reason: str) -> LoaderTimeout:
        """The error, which stays: a group that lost a rank, or its place in the talk, cannot go on."""
        # Without gloo's file and line before it, and its advice after it.
        reason = " ".join(re.sub(r"^\[[^]]*\] ", "", reason).split()).partition(". ")[0][:100]
        self._broken = (
            f"{waited_for}: {who} is gone, or did not answer within {self.timeout_s:g} s ({reason}); restart the job,"
            " or raise timeout_s of connect if it is that slow"
        )
        return LoaderTimeout(self._broken)


def digest_of(values: object) -> int:
    """64 bits of what JSON can hold, for `Peers.agree`."""
    text = json.dumps(values, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _group_of(rank: int, groups: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
    """The group that this rank is in, if any; all ranks make all of them."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timedelta(seconds=timeout_s), "gloo", group_desc="omniload")
        if rank in ranks:
            mine = group
    return mine
