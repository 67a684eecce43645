"""What a plan log does with its store. One writer at a time is in force, and only what it wrote in force counts.

A generation is claimed by create-if-absent, and after everything it writes a log looks whether the next generation is
claimed. If not, whoever claims that later finds what was written, for it lists only then; if so, the log stops. What a
log that is not in force any more still writes lies beside what counts: the head that its successor wrote says how much
of it does. And it removes nothing that counts, for a head was in force before what that left out is removed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from omniload.errors import LoaderStopped, StateError
from omniload.planner.decisions import Decision, from_json, to_json
from omniload.planner.state import StreamState
from omniload.runtime.plan_log_objects import (
    HASH_BYTES,
    HASHES_EVERY,
    Entry,
    Head,
    Kind,
    claim_path,
    generation_of,
    json_body,
    json_of,
    parts_of,
    seal,
    unseal,
)
from storage import AlreadyExists, NotFound, Store

logger = logging.getLogger(__name__)

_REMEDY = "bring the object back from a copy, or begin a log elsewhere from a state saved with a checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Where to plan on from, to come to a step again."""

    state: StreamState
    """The nearest state at or before that step, with all that is decided about its step and later ones."""
    hashes: Mapping[int, str]
    """By step, from that of the state on: `Plan.hash` of plans that were made. Those made last may be missing."""


class PlanLogStore:
    """A plan log that is in force, as it lies in its store. Used by one thread at a time.

    After an error from the store it is unknown what was written, so it must not be used any more.

    Args:
        store: holds it and nothing else.
        names: of the sources, in the order of `Mixture.names`.
        fingerprint: of what the stream depends on besides state and decisions.
        generation: claimed for this log; 0 to look only.
    """

    def __init__(self, store: Store, names: Sequence[str], fingerprint: str, generation: int) -> None:
        self.generation = generation
        self._store = store
        self._names = list(names)
        self._fingerprint = fingerprint
        self._next_number = 0
        self._decisions: list[Decision] = []
        self._live: list[Entry] = []
        self._snapshots: dict[int, Entry] = {}

    @classmethod
    def begin(cls, store: Store, names: Sequence[str], fingerprint: str, state: StreamState) -> Self:
        """A new log that starts with a state; see `PlanLog.begin`."""
        _require_none(store)
        log = cls(store, names, fingerprint, _claim(store))
        _require_none(store)
        log._decisions = list(state.decisions)
        log.add_snapshot(state)
        log._put_head()
        return log

    @classmethod
    def open(cls, store: Store, names: Sequence[str], fingerprint: str) -> Self | None:
        """Take over the log that is there; see `PlanLog.open`."""
        if not cls(store, names, fingerprint, generation=0)._is_begun():
            return None
        log = cls(store, names, fingerprint, _claim(store))
        log._load()
        log._put_head()
        log._sweep()
        return log

    def has_snapshot(self, step: int) -> bool:
        """Whether the stream before a step is stored."""
        return step in self._snapshots

    def add_decision(self, decision: Decision) -> None:
        """Store a decision."""
        self._put("decision", decision.step, json_body(to_json(decision)))
        self._decisions.append(decision)

    def add_hashes(self, step: int, hashes: bytes) -> None:
        """Store the hashes of the plans of a step and of those after it, one after the other."""
        self._put("hashes", step, hashes)

    def add_snapshot(self, state: StreamState) -> None:
        """Store a state."""
        assert all(decision in self._decisions for decision in state.decisions), (
            "it is logged before it is told"
        )
        body = json_body(state.to_json(self._names))
        self._snapshots[state.step] = self._put("snapshot", state.step, body)

    def release(self, step: int) -> None:
        """Remove what is not needed to plan a step and later ones again."""
        floor = self._snapshot_before(step)
        if floor is None or floor == self._live[0]:
            return
        self._live = self._live[self._live.index(floor) :]
        self._snapshots = _snapshots_of(self._live)
        self._decisions = [decision for decision in self._decisions if decision.step >= floor.step]
        self._put_head()
        self._sweep()

    def recover(self, step: int) -> Recovery:
        """Where to plan on from; see `PlanLog.recover`."""
        while (entry := self._snapshot_before(step)) is not None:
            try:
                state = self._state(entry)
                break
            except StateError as error:
                if self._snapshot_before(entry.step - 1) is None:
                    raise
                del self._snapshots[entry.step]  # so that it is stored again
                logger.warning("%s; steps are planned again from an older one", error)
        else:
            oldest = min(self._snapshots, default=None)
            raise StateError(
                f"{self._store.url}: step {step} cannot be planned again, as the plan log begins at step {oldest}; what"
                " lies before was released"
            )
        decisions = sorted(
            (decision for decision in self._decisions if decision.step >= state.step),
            key=lambda one: one.step,
        )
        return Recovery(
            state=replace(state, decisions=tuple(decisions)),
            hashes=self._hashes_from(state.step),
        )

    def _snapshot_before(self, step: int) -> Entry | None:
        return self._snapshots.get(max((one for one in self._snapshots if one <= step), default=-1))

    def _state(self, entry: Entry) -> StreamState:
        state = StreamState.from_json(json_of(self._body(entry)), self._names)
        assert state.step == entry.step
        return state

    def _hashes_from(self, step: int) -> dict[int, str]:
        hashes: dict[int, str] = {}
        for entry in self._live:
            if entry.kind != "hashes" or entry.step <= step - HASHES_EVERY:
                continue
            try:
                body = self._body(entry)
            except StateError as error:  # without them there is less to compare
                logger.warning("%s; its plans are not compared when they are made again", error)
                continue
            for i in range(len(body) // HASH_BYTES):
                if entry.step + i >= step:
                    hashes[entry.step + i] = body[i * HASH_BYTES : (i + 1) * HASH_BYTES].hex()
        return hashes

    def _is_begun(self) -> bool:
        """Whether there is a log, of this stream. Asked before it is taken over, so that who errs stops no job."""
        seen: list[Entry] = []
        while True:
            found = _entries(self._store)
            try:
                head = _head_among(found, self._store.url)
                if head is not None:
                    self._read_head(head)
                return head is not None
            except StateError:
                if (
                    found == seen
                ):  # else the job that is to be replaced still writes, and removes what it replaced
                    raise
                seen = found

    def _load(self) -> None:
        found = _entries(self._store)
        at = _head_among(found, self._store.url)
        if at is None:
            raise StateError(f"{self._store.url}: the plan log was removed while it was opened")
        head = self._read_head(at)
        end = max(entry.number for entry in found if entry.generation == at.generation) + 1
        by_number = {(entry.generation, entry.number): entry for entry in found}
        for generation, first, last in (*head.parts, (at.generation, at.number, end)):
            for number in range(first, last):
                entry = by_number.get((generation, number))
                if entry is None:
                    raise StateError(
                        f"{self._store.url}: object {number} of generation {generation} of the plan log is gone;"
                        f" {_REMEDY}"
                    )
                self._live.append(entry)
        self._snapshots = _snapshots_of(self._live)
        later = [entry for entry in self._live if entry > at and entry.kind == "decision"]
        self._decisions = [*head.decisions, *(from_json(json_of(self._body(entry))) for entry in later)]

    def _read_head(self, at: Entry) -> Head:
        head = Head.from_body(self._body(at))
        if list(head.names) != self._names:
            raise StateError(
                f"{self._store.url}: the plan log is of {len(head.names)} sources, the mixture has"
                f" {len(self._names)}, and they are not the same; resume with the mixture it was begun with, or begin a"
                " log elsewhere"
            )
        if head.fingerprint != self._fingerprint:
            raise StateError(
                f"{self._store.url}: the plan log is of another stream: its mixture or its data were others; resume"
                " with those, or begin a log elsewhere"
            )
        return head

    def _put_head(self) -> None:
        head = Head(
            names=tuple(self._names),
            fingerprint=self._fingerprint,
            parts=parts_of(self._live),
            decisions=tuple(self._decisions),
        )
        self._put("head", self._live[0].step, head.to_body())

    def _put(self, kind: Kind, step: int, body: bytes) -> Entry:
        entry = Entry(self.generation, self._next_number, kind, step)
        self._store.write(entry.path, seal(entry.path, body))
        self._check_in_force()
        self._next_number += 1
        self._live.append(entry)
        return entry

    def _body(self, entry: Entry) -> bytes:
        try:
            return unseal(entry.path, self._store.read(entry.path))
        except NotFound:
            self._check_in_force()  # a successor may have removed it
            problem = "is gone"
        except ValueError as error:
            problem = f"is damaged: {error}"
        raise StateError(f"{self._store.url}/{entry.path}: this part of the plan log {problem}; {_REMEDY}")

    def _check_in_force(self) -> None:
        if self.generation and self._store.exists(claim_path(self.generation + 1)):
            raise LoaderStopped(
                f"{self._store.url}: the plan log was opened again elsewhere, as generation {self.generation + 1}; this"
                f" planner, of generation {self.generation}, must not go on"
            )

    def _sweep(self) -> None:
        """Remove what no head in force counts, of this generation and earlier ones."""
        live = set(self._live)
        for entry in _entries(self._store):
            if entry not in live and entry.generation <= self.generation:
                self._store.delete(entry.path)


def _entries(store: Store) -> list[Entry]:
    return [entry for one in store.list() if (entry := Entry.of(one.path)) is not None]


def _snapshots_of(entries: Sequence[Entry]) -> dict[int, Entry]:
    return {entry.step: entry for entry in entries if entry.kind == "snapshot"}


def _claim(store: Store) -> int:
    """Take the next generation."""
    while True:
        generation = max((generation_of(one.path) for one in store.list()), default=0) + 1
        try:
            # A mark of its own: storage may take a claim of equal content, made at the same time, for this one.
            store.create(claim_path(generation), uuid.uuid4().bytes)
        except AlreadyExists:
            continue
        return generation


def _require_none(store: Store) -> None:
    if _head_among(_entries(store), store.url) is not None:
        raise StateError(f"{store.url}: a plan log is here already; open it, or begin one elsewhere")


def _head_among(found: Sequence[Entry], url: str) -> Entry | None:
    """The head in force; None if no log was begun."""
    head = max((entry for entry in found if entry.kind == "head"), default=None)
    generation = 0 if head is None else head.generation
    for entry in found:
        # All that there can be without a head is the first snapshot, of who died while beginning a log.
        if entry.generation > generation and entry.number > 0:
            raise StateError(
                f"{url}/{entry.path}: this part of the plan log is here and the head before it is gone; {_REMEDY}"
            )
    return head
