"""Rounds: how ranks agree on anything, without a collective of the training group.

A *round* is the only pattern. Every rank does its local part and posts the outcome, ok or failed with the cause;
rank 0 collects all of them, decides, and posts the decision; every rank returns it or raises the same error.
Messages go through a c10d store (a connection of our own, so that a thread may wait while the trainer uses its
own). Every wait has a time-out that names the ranks and the stage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from checkpoint import errors
from checkpoint.errors import CheckpointError, CoordinationTimeout, RankFailed, RanksFailed

# TCPStore refuses values of 8 MiB and drops the connection.
_CHUNK_BYTES: Final = 4 << 20

# A follower may arrive up to one time-out before rank 0, which then waits up to one more for the others; and the
# outcome of that takes a moment to arrive.
_LEADER_TIMEOUTS: Final = 2
_MAX_GRACE_S: Final = 5.0

_OK: Final = b"+"
_FAILED: Final = b"-"

Decide = Callable[[list[bytes]], bytes | list[bytes]]


class Coordinator:
    """One rank's seat among the ranks that save and load together.

    One thread uses a coordinator at a time; :meth:`fork` gives another thread its own.

    Args:
        store: A c10d store that all the ranks share; used through a prefix.
        rank: Index of this rank, 0 to ``world_size - 1``.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._origin = store  # on rank 0 it may own the server; it must outlive every client
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self.rank = rank
        self.world_size = world_size
        self._num_calls: Counter[str] = Counter()

    def fork(self) -> Coordinator:
        """A seat for another thread, with a connection of its own."""
        return Coordinator(self._origin, self.rank, self.world_size)

    def next_call(self, kind: str) -> str:
        """A name for the rounds of one call; equal on all ranks, since they make the same calls in the same order."""
        self._num_calls[kind] += 1
        return f"{kind}/{self._num_calls[kind]}"

    def round(
        self,
        name: str,
        stage: str,
        local: Callable[[], bytes],
        decide: Decide,
        *,
        timeout_s: float,
        linger_s: float = 0.0,
    ) -> bytes:
        """Do one round.

        Args:
            name: What the round belongs to; unique among all rounds of a stage, equal on all ranks.
            stage: Where in it, for messages.
            local: This rank's part; its result goes to rank 0.
            decide: Runs on rank 0 with the results of all ranks, in order of rank. Gives one answer for all, or a
                list with an answer for each rank.
            timeout_s: How long rank 0 waits for the others; they wait for rank 0 twice as long.
            linger_s: How long rank 0 waits, at most, until all have read the outcome. For the last round of a
                process that may exit afterwards and take the store with it.

        Returns:
            The answer for this rank.

        Raises:
            RanksFailed: Some ranks failed; equal on all ranks. When all failed alike, the error itself instead.
            CoordinationTimeout: Some ranks did not come in time.
            CheckpointError: What ``decide`` raised, equal on all ranks.
        """
        error: BaseException | None = None
        message = b""
        try:
            message = _OK + local()
        except BaseException as caught:
            error = caught
            message = _FAILED + _describe(caught)
        if self.world_size == 1:
            if error is not None:
                raise error
            answer = decide([message[1:]])
            return answer if isinstance(answer, bytes) else answer[0]
        key = f"{name}/{stage}"
        try:
            if self.rank == 0:
                outcome, cause = self._lead(key, stage, message, decide, timeout_s, linger_s)
                error = error or cause
            else:
                self._post(f"{key}/from/{self.rank}", message)
                if error is not None and not isinstance(error, Exception):
                    raise error  # KeyboardInterrupt and the like: the others are told, this rank does not wait
                outcome = self._follow(key, stage, timeout_s, lingers=linger_s > 0)
        except dist.DistError as lost:
            raise CoordinationTimeout(
                f"rank {self.rank} lost the store of the process group in stage '{stage}', probably because the "
                f"process that serves it ended ({_one_line(lost)})"
            ) from lost
        if outcome[:1] == _OK:
            return outcome[1:]
        raise _rebuild(outcome[1:], self.rank, self.world_size, error)

    def _lead(
        self, key: str, stage: str, own: bytes, decide: Decide, timeout_s: float, linger_s: float
    ) -> tuple[bytes, BaseException | None]:
        outcomes: list[bytes]
        cause: BaseException | None = None
        try:
            messages = [own, *self._gather(key, stage, timeout_s)]
            failures = [
                [rank, stage, *json.loads(m[1:])] for rank, m in enumerate(messages) if m[:1] == _FAILED
            ]
            if failures:
                outcomes = [_FAILED + json.dumps(failures).encode()] * self.world_size
            else:
                answer = decide([message[1:] for message in messages])
                answers = answer if isinstance(answer, list) else [answer] * self.world_size
                outcomes = [_OK + one for one in answers]
        except BaseException as caught:
            cause = caught
            kind, text = json.loads(_describe(caught))
            outcomes = [_FAILED + json.dumps([[None, stage, kind, text]]).encode()] * self.world_size
            if isinstance(caught, CoordinationTimeout):
                linger_s = 0.0  # who did not come will not read the outcome either
        for rank in range(1, self.world_size):
            self._post(f"{key}/to/{rank}", outcomes[rank])
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if linger_s:
            self._linger(f"{key}/read", linger_s)
        return outcomes[0], cause

    def _gather(self, key: str, stage: str, timeout_s: float) -> list[bytes]:
        keys = [f"{key}/from/{rank}" for rank in range(1, self.world_size)]
        missing = self._wait(keys, timeout_s)
        if missing:
            raise CoordinationTimeout(
                f"{_ranks([index + 1 for index in missing])} did not finish stage '{stage}' within {timeout_s:g} s; "
                "look for a crash or a hang there, or raise timeout_s"
            )
        messages = [self._fetch(one) for one in keys]
        for one in keys:
            self._delete(one)
        return messages

    def _follow(self, key: str, stage: str, timeout_s: float, *, lingers: bool) -> bytes:
        limit_s = _LEADER_TIMEOUTS * timeout_s + min(timeout_s, _MAX_GRACE_S)
        own = f"{key}/to/{self.rank}"
        if self._wait([own], limit_s):
            raise CoordinationTimeout(
                f"rank 0 gave no outcome of stage '{stage}' within {limit_s:g} s; look for a crash or a hang there, "
                "or raise timeout_s"
            )
        outcome = self._fetch(own)
        self._delete(own)
        if lingers and self._store.add(f"{key}/read", 1) == self.world_size - 1:
            self._store.set(f"{key}/read/all", "1")
        return outcome

    def _linger(self, key: str, linger_s: float) -> None:
        if self._wait([f"{key}/all"], linger_s):
            return  # decided is decided; a rank that is this late finds out from the store, or the store is gone
        self._store.delete_key(key)
        self._store.delete_key(f"{key}/all")

    def _wait(self, keys: list[str], timeout_s: float) -> list[int]:
        """Wait for keys; the indices of those that are still missing."""
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # of the stores only some raise a class of their own for a time-out
            return [index for index, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _post(self, key: str, message: bytes) -> None:
        chunks = [message[start : start + _CHUNK_BYTES] for start in range(0, len(message), _CHUNK_BYTES)]
        for index, chunk in enumerate(chunks[1:], start=1):
            self._store.set(f"{key}/{index}", chunk)  # type: ignore[arg-type]  # bytes are fine
        # Last, since its presence says that all of the message is there.
        self._store.set(key, len(chunks).to_bytes(4, "little") + (chunks[0] if chunks else b""))  # type: ignore[arg-type]

    def _fetch(self, key: str) -> bytes:
        first = self._store.get(key)
        num_chunks = int.from_bytes(first[:4], "little")
        return b"".join([first[4:], *(self._store.get(f"{key}/{index}") for index in range(1, num_chunks))])

    def _delete(self, key: str) -> None:
        num_chunks = int.from_bytes(self._store.get(key)[:4], "little")
        for index in range(1, num_chunks):
            self._store.delete_key(f"{key}/{index}")
        self._store.delete_key(key)


def _describe(error: BaseException) -> bytes:
    if isinstance(error, RanksFailed):
        return json.dumps([type(error).__name__, "; ".join(str(one) for one in error.exceptions)]).encode()
    return json.dumps([type(error).__name__, _one_line(error)]).encode()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _rebuild(outcome: bytes, rank: int, world_size: int, own: BaseException | None) -> BaseException:
    """The error that all ranks raise, from what rank 0 posted and what this rank itself ran into."""
    failures: list[tuple[int | None, str, str, str]] = [tuple(one) for one in json.loads(outcome)]
    if own is not None and not isinstance(own, Exception):
        return own
    kinds = {(kind, text) for _, _, kind, text in failures}
    everybody = failures[0][0] is None or len(failures) == world_size
    if everybody and len(kinds) == 1:
        _, _, kind, text = failures[0]
        if own is not None and isinstance(own, CheckpointError):
            return own
        known = getattr(errors, kind, None)
        if (
            isinstance(known, type)
            and issubclass(known, CheckpointError)
            and known not in (RankFailed, RanksFailed)
        ):
            return known(text)
    members = [RankFailed(where or 0, stage, kind, text) for where, stage, kind, text in failures]
    group = RanksFailed(f"{_ranks([one.rank for one in members])} of {world_size} failed", members)
    group.__cause__ = own
    return group


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
