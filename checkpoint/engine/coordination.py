"""Rounds: how ranks agree on anything, without a collective of the training group.

A *round* is the only pattern. Every rank does its local part and posts the outcome, ok or failed with the cause;
rank 0 collects all of them, decides, and posts the decision; every rank returns it or raises the same error.
Outcomes go up a tree and decisions down the same tree (:mod:`checkpoint.engine.tree`), so that no rank talks to more
than a few dozen. Messages go through a c10d store (a connection of our own, so that a thread may wait while the
trainer uses its own).

Every wait has a time-out that names the ranks and the stage. A rank that leads others posts a receipt as soon as it
has arrived, so that whoever waits for it can tell a leader that is missing from one that waits for another.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from checkpoint import errors
from checkpoint.engine.messages import pack, unpack, unpack_all
from checkpoint.engine.tree import Tree
from checkpoint.errors import CheckpointError, CoordinationTimeout, RankFailed, RanksFailed

# TCPStore refuses values of 8 MiB and drops the connection.
_CHUNK_BYTES: Final = 4 << 20

# What a message may take to arrive, at most; less if the time-out is.
_MAX_GRACE_S: Final = 5.0

_OK: Final = b"+"
_FAILED: Final = b"-"

Decide = Callable[[list[bytes]], bytes | list[bytes]]


@dataclass(kw_only=True, slots=True)
class _Report:
    """How it went on a rank and all below it.

    Attributes:
        messages: What they have to say, packed, in order of rank; of no use if anything below is not empty.
        failed: Rank, stage, kind and text of what failed.
        missing: Ranks that did not come in time.
        gone: Ranks that came, and will not wait for the outcome.
    """

    messages: list[bytes] = field(default_factory=list)
    failed: list[list[Any]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    @property
    def lost(self) -> Set[int]:
        """Ranks that will not pass an outcome on."""
        return {*self.missing, *self.gone}

    def add(self, other: _Report) -> None:
        """Take in what the next ranks report."""
        self.messages += other.messages
        self.failed += other.failed
        self.missing += other.missing
        self.gone += other.gone

    def encode(self) -> bytes:
        """As a message; begins with whether all went well."""
        if self.failed or self.missing:
            return _FAILED + json.dumps([self.failed, self.missing, self.gone]).encode()
        return _OK + pack(unpack_all(self.messages))

    @classmethod
    def decode(cls, data: bytes) -> _Report:
        """The inverse of :meth:`encode`."""
        if data[:1] == _OK:
            return cls(messages=[data[1:]])
        failed, missing, gone = json.loads(data[1:])
        return cls(failed=failed, missing=missing, gone=gone)


class Coordinator:
    """One rank's seat among the ranks that save and load together.

    One thread uses a coordinator at a time; :meth:`fork` gives another thread its own.

    Args:
        store: A c10d store that all the ranks share; used through a prefix.
        rank: Index of this rank, 0 to ``world_size - 1``.
        world_size: Number of ranks.
        tree: The way that messages take; equal on all ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, tree: Tree | None = None) -> None:
        self._origin = store  # on rank 0 it may own the server; it must outlive every client
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self.rank = rank
        self.world_size = world_size
        self._tree = tree or Tree(world_size=world_size)
        self._num_calls: Counter[str] = Counter()

    def fork(self) -> Coordinator:
        """A seat for another thread, with a connection of its own."""
        return Coordinator(self._origin, self.rank, self.world_size, tree=self._tree)

    def connect(self, name: str) -> Store:
        """The store that all the ranks share, below a name of its own, through a connection of its own."""
        return dist.PrefixStore(name, self._origin.clone())  # type: ignore[attr-defined]  # missing from torch's stubs

    def next_call(self, kind: str) -> str:
        """A name for the rounds of one call; equal on all ranks, since they make the same calls in the same order."""
        self._num_calls[kind] += 1
        return f"{kind}/{self._num_calls[kind]}"

    @contextmanager
    def checking(self, name: str, stage: str, timeout_s: float) -> Iterator[None]:
        """What is raised in it, before a round, is raised on, and fails the round: to others, this rank failed in it.

        Args:
            name: Of the round.
            stage: Of the round.
            timeout_s: Of the round.
        """
        try:
            yield
        except Exception as error:
            self._fail(name, stage, error, timeout_s)
            raise

    def _fail(self, name: str, stage: str, error: Exception, timeout_s: float) -> None:
        def fail() -> bytes:
            raise error

        with suppress(Exception):  # whatever comes of it, this rank's own error tells more
            self.round(name, stage, fail, lambda _: b"", timeout_s=timeout_s)

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
            timeout_s: How long after a rank has arrived those that report to it may arrive. Longer waits, of those that
                have arrived, follow from it.
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
        own = _Report()
        try:
            own.messages = [pack([local()])]
        except BaseException as caught:
            error = caught
            own.failed = [[self.rank, stage, *_describe(caught)]]
        try:
            if self.world_size == 1:
                if error is not None:
                    raise error
                answer = decide(unpack(own.messages[0]))
                return answer if isinstance(answer, bytes) else answer[0]
            outcome, error = self._agree(f"{name}/{stage}", stage, own, error, decide, timeout_s, linger_s)
            if outcome[:1] == _OK:
                return unpack(outcome[1:])[0]
            raise _rebuild(outcome[1:], self.rank, self.world_size, error)
        finally:
            # An error leads to this frame by its traceback. Were it named here, the two would hold each other, and all
            # that its frames refer to, the memory of a state among it, until garbage is collected.
            del error

    def _agree(
        self,
        key: str,
        stage: str,
        own: _Report,
        error: BaseException | None,
        decide: Decide,
        timeout_s: float,
        linger_s: float,
    ) -> tuple[bytes, BaseException | None]:
        """What all ranks come to, and what went wrong on this one."""
        try:
            if self.rank == 0:
                outcome, cause = self._lead(key, stage, own, decide, timeout_s, linger_s)
                return outcome, error or cause
            return self._follow(key, stage, own, error, timeout_s, lingers=linger_s > 0), error
        except dist.DistError as lost:
            raise CoordinationTimeout(
                f"rank {self.rank} lost the store of the process group in stage '{stage}', probably because the "
                f"process that serves it ended ({_one_line(lost)})"
            ) from lost
        finally:
            del error

    def _lead(
        self, key: str, stage: str, own: _Report, decide: Decide, timeout_s: float, linger_s: float
    ) -> tuple[bytes, BaseException | None]:
        cause: BaseException | None = None
        report = own
        try:
            report, heard = self._collect(key, own, timeout_s)
            self._clear(key, heard)
            if report.missing:
                raise CoordinationTimeout(
                    f"{_ranks(sorted(report.missing))} did not finish stage '{stage}' within {timeout_s:g} s; "
                    "look for a crash or a hang there, or raise timeout_s"
                )
            if report.failed:
                outcome = _FAILED + json.dumps(sorted(report.failed)).encode()
            else:
                answer = decide(unpack_all(report.messages))
                answers = answer if isinstance(answer, list) else [answer] * self.world_size
                outcome = _OK + pack(answers)
        except BaseException as caught:
            cause = caught
            outcome = _FAILED + json.dumps([[None, stage, *_describe(caught)]]).encode()
            if isinstance(caught, CoordinationTimeout):
                linger_s = 0.0  # who did not come will not read the outcome either
        self._pass_on(key, outcome, self.rank, report.lost)
        try:
            if cause is not None and not isinstance(cause, Exception):
                raise cause
            if linger_s:
                self._linger(f"{key}/read", linger_s)
            return outcome, cause
        finally:
            del cause

    def _follow(
        self,
        key: str,
        stage: str,
        own: _Report,
        error: BaseException | None,
        timeout_s: float,
        *,
        lingers: bool,
    ) -> bytes:
        if self._tree.height(self.rank):
            self._store.set(f"{key}/here/{self.rank}", "1")
        if error is not None and not isinstance(error, Exception):
            # KeyboardInterrupt and the like: the others are told, this rank waits for nobody.
            own.gone = [self.rank]
            self._post(f"{key}/from/{self.rank}", own.encode())
            try:
                raise error
            finally:
                del error
        report, heard = self._collect(key, own, timeout_s)
        self._post(f"{key}/from/{self.rank}", report.encode())
        self._clear(
            key, heard
        )  # only now: who looks for missing ranks finds either their messages or this one
        outcome = self._await_outcome(key, stage, timeout_s)
        self._pass_on(key, outcome, self.rank, report.lost)
        if lingers and self._store.add(f"{key}/read", 1) == self.world_size - 1:
            self._store.set(f"{key}/read/all", "1")
        return outcome

    def _collect(self, key: str, own: _Report, timeout_s: float) -> tuple[_Report, list[int]]:
        """The report of this rank and all below it, and those of which messages are to be deleted."""
        children = self._tree.children(self.rank)
        if not children:
            return own, []
        receipts = [self._receipt(key, child) for child in children]
        absent = {children[index] for index in self._wait(receipts, timeout_s)}
        arrived = [child for child in children if child not in absent]
        leading = [child for child in arrived if self._tree.height(child)]
        limit_s = self._collecting_s(self._tree.height(self.rank) - 1, timeout_s) + _grace_s(timeout_s)
        late = {leading[index] for index in self._wait([f"{key}/from/{one}" for one in leading], limit_s)}
        for child in absent:
            # One that came just now is not heard any more either.
            own.missing += self._absent(key, child) or [child]
        own.missing += late
        heard = [child for child in arrived if child not in late]
        for child in heard:
            own.add(_Report.decode(self._fetch(f"{key}/from/{child}")))
        return own, heard

    def _clear(self, key: str, heard: Sequence[int]) -> None:
        """Delete the messages of those below that were heard."""
        for child in heard:
            self._delete(f"{key}/from/{child}")
            if self._tree.height(child):
                self._store.delete_key(f"{key}/here/{child}")

    def _absent(self, key: str, rank: int) -> list[int]:
        """Of a rank and those below it, the ones that have not arrived, though the rank was to report by now."""
        here = self._store.check([self._receipt(key, rank)])
        below = [one for child in self._tree.children(rank) for one in self._absent(key, child)]
        if here and self._store.check([f"{key}/from/{rank}"]):
            return _Report.decode(self._fetch(f"{key}/from/{rank}")).missing
        return below if here else [rank, *below]

    def _receipt(self, key: str, rank: int) -> str:
        """The key that tells that a rank has arrived."""
        return f"{key}/here/{rank}" if self._tree.height(rank) else f"{key}/from/{rank}"

    def _collecting_s(self, height: int, timeout_s: float) -> float:
        """How long a rank of some height may take to collect what is below it, once it has arrived."""
        return height * timeout_s + max(0, height - 1) * _grace_s(timeout_s)

    def _await_outcome(self, key: str, stage: str, timeout_s: float) -> bytes:
        # A rank may arrive up to one time-out before those it reports to.
        limit_s = self._collecting_s(self._tree.height(0), timeout_s) + timeout_s + _grace_s(timeout_s)
        own = f"{key}/to/{self.rank}"
        if self._wait([own], limit_s):
            # Whoever has an outcome and did not pass it on is the one; else nobody but rank 0 could have made one.
            silent = self._tree.parent(self.rank)
            while silent and not self._store.check([f"{key}/to/{silent}"]):
                silent = self._tree.parent(silent)
            raise CoordinationTimeout(
                f"rank {silent} gave no outcome of stage '{stage}' within {limit_s:g} s; look for a crash or a hang "
                "there, or raise timeout_s"
            )
        outcome = self._fetch(own)
        self._delete(own)
        return outcome

    def _pass_on(self, key: str, outcome: bytes, rank: int, lost: Set[int]) -> None:
        """Give those below a rank their part of an outcome, also in place of those that are lost."""
        children = self._tree.children(rank)
        if not children:
            return
        answers = unpack(outcome[1:]) if outcome[:1] == _OK else []
        for child in children:
            part = outcome
            if answers:
                part = _OK + pack(answers[child - rank : self._tree.end(child) - rank])
            self._post(f"{key}/to/{child}", part)
            if child in lost:
                self._pass_on(key, part, child, lost)

    def _linger(self, key: str, linger_s: float) -> None:
        if self._wait([f"{key}/all"], linger_s):
            return  # decided is decided; a rank that is this late finds out from the store, or the store is gone
        self._store.delete_key(key)
        self._store.delete_key(f"{key}/all")

    def _wait(self, keys: list[str], timeout_s: float) -> list[int]:
        """Wait for keys; the indices of those that are still missing."""
        if not keys:
            return []
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


def _grace_s(timeout_s: float) -> float:
    return min(timeout_s, _MAX_GRACE_S)


def _describe(error: BaseException) -> tuple[str, str]:
    if isinstance(error, RanksFailed):
        return type(error).__name__, "; ".join(str(one) for one in error.exceptions)
    return type(error).__name__, _one_line(error)


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
        # What rank 0 posted may be another than this rank ran into: that others did not come, above all.
        if isinstance(own, CheckpointError) and _describe(own) == (kind, text):
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
