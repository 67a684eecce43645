"""The Planner role: metadata of all sources in, one plan per step out. One per job; it never sees payload.

A step is planned in five stages: mix (draw samples until the packs can be filled), pack, cost, balance, freeze. The
planner waits for the next metadata of the source that mixing names and never takes what happens to be ready, so its
plans are a pure function of the mixture, the data and the state it started from.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

import numpy as np

from omniload.errors import SourceError
from omniload.mixture import Mixture, SourceSpec
from omniload.pieces import PIECE, Cursor, SampleChunk
from omniload.planner.balance import longest_processing_time
from omniload.planner.cost import attention_cost
from omniload.planner.mix import WEIGHT_UNIT, integer_weights, most_owed
from omniload.planner.pack import best_fit_decreasing, choose_packs
from omniload.planner.plan import Plan
from omniload.planner.state import SourceState, StreamState

logger = logging.getLogger(__name__)

SLACK_PERCENT = 108
"""Candidates of a step in percent of the tokens it takes: the surplus is what lets packs come out full."""


class Metadata(Protocol):
    """Where the planner gets the metadata of samples from: the runtime, in front of the source loaders."""

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """The chunk of ``source`` that starts at ``cursor``; waits for it."""


class _SourceReader:
    """Draws the samples of one source one by one from its chunks, and keeps the account of what was drawn."""

    def __init__(
        self, name: str, index: int, spec: SourceSpec, state: SourceState, metadata: Metadata
    ) -> None:
        self._name = name
        self._index = index
        self._spec = spec
        self._metadata = metadata
        self._account = state
        self._chunk: SampleChunk | None = None
        self._next_cursor = state.cursor
        # Rows after the last sample of chunks already left; they are booked with the next sample drawn, so that
        # the state does not depend on where the chunks were cut.
        self._pending_rows = 0
        self._pending_failures = 0
        self._sample_tokens: list[int] = []
        self._first = 0  # first sample of the chunk that is drawn but not yet taken
        self._at = 0  # next sample of the chunk
        self._orders: list[int] = []  # draw numbers of the samples first..at
        self._taken: list[tuple[np.ndarray, np.ndarray]] = []
        self.exhausted = state.exhausted

    @property
    def says_stop(self) -> bool:
        """Whether it gave its last sample and ends the stream with it."""
        return self.exhausted and self._spec.on_exhausted == "stop"

    def draw(self, order: int) -> int | None:
        """Draw the next sample as draw number ``order``; its emitted tokens, or None if the source is spent."""
        while self._at == len(self._sample_tokens):
            if self.exhausted or not self._next_chunk():
                return None
        tokens = self._sample_tokens[self._at]
        self._at += 1
        self._orders.append(order)
        return tokens

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The pieces drawn since the last call, and the draw number of each."""
        self._book()
        taken, self._taken = self._taken, []
        if not taken:
            return np.empty(0, PIECE), np.empty(0, np.int64)
        return np.concatenate([pieces for pieces, _ in taken]), np.concatenate(
            [orders for _, orders in taken]
        )

    def state(self, deficit: int) -> SourceState:
        """The account after the last `take`."""
        return replace(self._account, deficit=deficit, exhausted=self.exhausted)

    def _next_chunk(self) -> bool:
        """Move to the next chunk; False if the source is spent."""
        self._book()
        if self._chunk is not None:
            self._pending_rows += int(self._chunk.rows[-1])
            self._pending_failures += int(self._chunk.failures[-1])
        if self._spec.on_exhausted != "repeat" and self._next_cursor.epoch >= self._spec.repeat:
            self.exhausted = True
            self._account = replace(
                self._account,
                rows=self._account.rows + self._pending_rows,
                failures=self._account.failures + self._pending_failures,
            )
            return False
        chunk = self._metadata.read(self._index, self._next_cursor)
        assert chunk.end != chunk.begin, "a chunk moves the cursor, or reading would never end"
        lengths = np.concatenate([[0], np.cumsum(chunk.pieces["length"], dtype=np.int64)])
        self._sample_tokens = np.diff(lengths[chunk.first_piece]).tolist()
        self._chunk, self._next_cursor = chunk, chunk.end
        self._first = self._at = 0
        account = self._account
        emitted = account.read_tokens - account.truncated_tokens - account.dropped_tokens
        if chunk.ends_epoch and not emitted and not len(chunk.pieces):
            # Judged by the account, which is part of the state, so that a resume judges alike.
            failures = account.failures + self._pending_failures + int(chunk.failures.sum())
            raise SourceError(
                f"source '{self._name}' gave no token in a whole pass over its data"
                f" ({failures} rows quarantined): check its column, transforms, overflow policy and split"
            )
        return True

    def _book(self) -> None:
        """Account for the samples drawn from the current chunk."""
        first, at, chunk = self._first, self._at, self._chunk
        if chunk is None or first == at:
            return
        begin, end = chunk.first_piece[first], chunk.first_piece[at]
        pieces = chunk.pieces[begin:end].copy()
        pieces["source"] = self._index
        per_sample = np.diff(chunk.first_piece[first : at + 1])
        self._taken.append((pieces, np.repeat(np.array(self._orders, np.int64), per_sample)))
        account = self._account
        self._account = replace(
            account,
            cursor=Cursor(
                epoch=chunk.begin.epoch,
                window=chunk.begin.window,
                file=chunk.begin.file,
                block=chunk.begin.block,
                position=int(chunk.position[at - 1]),
                sub=int(chunk.sub[at - 1]) + 1,
            ),
            rows=account.rows + self._pending_rows + int(chunk.rows[first:at].sum()),
            failures=account.failures + self._pending_failures + int(chunk.failures[first:at].sum()),
            read_tokens=account.read_tokens + int(chunk.tokens[first:at].sum()),
            truncated_tokens=account.truncated_tokens + int(chunk.truncated[first:at].sum()),
            dropped_tokens=account.dropped_tokens + int(chunk.dropped[first:at].sum()),
        )
        self._pending_rows = self._pending_failures = 0
        self._first = at
        self._orders = []


class Planner:
    """Plans one step after the other.

    Args:
        mixture: the mixture.
        metadata: where the metadata of samples comes from.
        state: the stream to go on from.
    """

    def __init__(self, mixture: Mixture, metadata: Metadata, state: StreamState) -> None:
        self._mixture = mixture
        self._names = mixture.names
        self._step = state.step
        self._carried = state.carried
        self._deficits = [source.deficit for source in state.sources]
        self._readers = [
            _SourceReader(name, i, mixture.sources[name], source, metadata)
            for i, (name, source) in enumerate(zip(self._names, state.sources, strict=True))
        ]
        self._state = state
        self._weights: list[int] = []
        self._weights_of: tuple[list[float], list[bool]] | None = None

    @property
    def state(self) -> StreamState:
        """The stream before the step that `next` plans next."""
        return self._state

    def next(self) -> Plan | None:
        """Plan the next step; None at the end of the stream.

        The stream ends after ``steps`` steps, or before the first step whose packs cannot all be filled because
        a source with ``on_exhausted: stop``, or every source, gave its last sample. What was drawn for it is then
        among the carried pieces of `state`, counted and not served.

        Raises:
            SourceError: a source cannot be read, or gives nothing.
        """
        mixture, step = self._mixture, self._step
        if mixture.steps is not None and step >= mixture.steps:
            return None
        candidates = self._candidates(step)
        order, pack = best_fit_decreasing(candidates["length"], mixture.seq_len)
        placed = candidates[order]
        chosen = choose_packs(pack, placed["length"], placed["born"], step=step, num_packs=mixture.packs)
        if chosen is None:
            logger.warning(
                "the stream ends before step %d: %d tokens are left, fewer than %d packs",
                step,
                candidates["length"].sum(),
                mixture.packs,
            )
            self._carried = candidates
            self._state = self._snapshot()
            return None

        # Candidates by pack, then the packs by lane.
        by_pack = np.argsort(pack, kind="stable")
        bounds = np.searchsorted(pack[by_pack], np.arange(int(pack.max()) + 2))
        costs = np.add.reduceat(attention_cost(placed["length"][by_pack]), bounds[:-1])
        lanes = longest_processing_time(costs[chosen], mixture.lanes)
        final = chosen[lanes.ravel()]
        counts = (bounds[1:] - bounds[:-1])[final]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        index = np.repeat(bounds[final] - offsets[:-1], counts) + np.arange(offsets[-1])
        taken = by_pack[index]
        plan = Plan(step=step, num_lanes=mixture.lanes, pieces=placed[taken], offsets=offsets)

        left = np.ones(len(candidates), bool)
        left[order[taken]] = False
        self._carried = candidates[left]
        self._step = step + 1
        self._state = self._snapshot()
        return plan

    def _candidates(self, step: int) -> np.ndarray:
        """The carried pieces, then draws until the packs of the step can be filled; in that order."""
        mixture = self._mixture
        needed = -(-SLACK_PERCENT * mixture.packs * mixture.seq_len // 100)
        tokens = int(self._carried["length"].sum(dtype=np.int64))
        deficits, order = self._deficits, 0
        weights = self._weights_at(step)
        while tokens < needed and any(weights):
            source = most_owed(deficits, weights)
            drawn = self._readers[source].draw(order)
            if drawn is None:
                if mixture.sources[self._names[source]].on_exhausted == "stop":
                    logger.warning(
                        "source '%s' gave its last sample before step %d was full", self._names[source], step
                    )
                    break
                logger.info("source '%s' leaves the mixture in step %d", self._names[source], step)
                deficits[source] = 0
                weights = self._weights_at(step)
                continue
            for i, weight in enumerate(weights):
                deficits[i] += weight * drawn
            deficits[source] -= WEIGHT_UNIT * drawn
            tokens += drawn
            order += 1
        parts = [reader.take() for reader in self._readers]
        pieces = np.concatenate([part for part, _ in parts])
        pieces = pieces[np.argsort(np.concatenate([orders for _, orders in parts]), kind="stable")]
        pieces["born"] = step
        return np.concatenate([self._carried, pieces])

    def _weights_at(self, step: int) -> list[int]:
        """Integer weights in force, of the sources that still give samples; all 0 if none does, or one said stop."""
        declared, exhausted = self._mixture.weights_at(step), [reader.exhausted for reader in self._readers]
        if self._weights_of != (declared, exhausted):
            in_force = [0.0 if gone else weight for weight, gone in zip(declared, exhausted, strict=True)]
            if any(reader.says_stop for reader in self._readers):
                in_force = [0.0] * len(in_force)
            self._weights = integer_weights(in_force) if any(in_force) else [0] * len(in_force)
            self._weights_of = (declared, exhausted)
        return self._weights

    def _snapshot(self) -> StreamState:
        return StreamState(
            step=self._step,
            sources=tuple(
                reader.state(deficit) for reader, deficit in zip(self._readers, self._deficits, strict=True)
            ),
            carried=self._carried,
        )
