"""The Planner role: metadata of all sources in, one plan per step out. One per job; it never sees payload.

A step is planned in five stages: mix (draw samples until the packs can be filled), pack, cost, balance, freeze. The
planner waits for the next metadata of the source that mixing names and never takes what happens to be ready, so its
plans are a pure function of the mixture, the data and the state it started from.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from omniload.errors import DecisionError, OmniloadError, PlanError, kind_and_message
from omniload.mixture import Mixture
from omniload.pieces import Failure, join_pieces
from omniload.planner.checks import check_plan
from omniload.planner.costs import CalibratedCost
from omniload.planner.decisions import Decision, DropSource, SkipSteps
from omniload.planner.graph import DGraph, NotEnough
from omniload.planner.mix import Mixer
from omniload.planner.plan import Plan
from omniload.planner.reader import Metadata, SourceReader, Unreachable
from omniload.planner.rules import StepRules
from omniload.planner.state import StreamState, scheduled_weights
from omniload.planner.strategies import load_strategy
from omniload.suggest import suggest
from omniload.weights import integer_cap, integer_weights

logger = logging.getLogger(__name__)


class Planner:
    """Plans one step after the other.

    Args:
        mixture: the mixture.
        metadata: where the metadata of samples comes from.
        state: the stream to go on from.
        write_down: makes a decision of the planner's own durable; returns before it takes effect.
    """

    def __init__(
        self,
        mixture: Mixture,
        metadata: Metadata,
        state: StreamState,
        write_down: Callable[[DropSource], None] | None = None,
    ) -> None:
        self._mixture = mixture
        self._metadata = metadata
        self._write_down = write_down
        self._rules = StepRules.of(mixture)
        self._strategy = load_strategy(mixture.strategy)
        self._names = mixture.names
        self._decisions = list(state.decisions)  # about steps not begun, by step
        self._open_from = state.step  # the first of those steps
        self._deciding = threading.Lock()
        self._own: tuple[DropSource, ...] = ()
        self._go_on_from(state)

    def _go_on_from(self, state: StreamState) -> None:
        """Forget what was read beyond a state; decisions stay."""
        mixture = self._mixture
        self._step = state.step
        self._carried = state.carried
        specs = [mixture.sources[name] for name in self._names]
        self._readers = [
            SourceReader(name, i, spec, source, self._metadata, mixture.quarantine)
            for i, (name, spec, source) in enumerate(zip(self._names, specs, state.sources, strict=True))
        ]
        self._mixer = Mixer(
            state.deficits,
            [source.emitted_tokens for source in state.sources],
            [integer_cap(spec.max_fraction) for spec in specs],
            by_samples=mixture.unit == "samples",
        )
        self._weights: Sequence[float] = ()
        self._sources = list(state.sources)
        self._skipped = np.array([source.skipped_tokens for source in state.sources], np.int64)
        self._decided = state.decided
        self._state = state
        self._quarantined: tuple[Failure, ...] = ()

    @property
    def state(self) -> StreamState:
        """The stream before the step that `next` plans next, with what is decided for it by now."""
        with self._deciding:
            return replace(self._state, decisions=tuple(self._decisions))

    @property
    def quarantined(self) -> tuple[Failure, ...]:
        """The rows that the last call of `next` consumed and that make no sample, by source, in order."""
        return self._quarantined

    @property
    def own_decisions(self) -> tuple[DropSource, ...]:
        """What the planner decided by itself about the step that the last call of `next` planned."""
        return self._own

    def decide(self, decision: Decision) -> None:
        """Let a decision take effect at a step that is not begun. Any thread may call this."""
        with self._deciding:
            assert decision.step >= self._open_from, "who decides knows how far planning may have come"
            bisect.insort_right(self._decisions, decision, key=lambda one: one.step)

    def next(self) -> Plan | None:
        """Plan the next step; None at the end of the stream.

        The stream ends after ``steps`` steps, or before the first step whose packs cannot all be filled because
        a source with ``on_exhausted: stop``, or every source, gave its last sample. What was drawn for it is then
        among the carried pieces of `state`, counted and not served.

        Raises:
            SourceError: a source cannot be read, or gives nothing.
            TooManyFailures: a source is over its budget of quarantined rows.
            DecisionError: what was decided for the step leaves no source a weight, or only some that their
                ``max_fraction`` does not let make up the stream.
        """
        self._own = ()
        while True:
            try:
                return self._next()
            except Unreachable as lost:
                self._go_on_without(lost)

    def _go_on_without(self, lost: Unreachable) -> None:
        """Decide to plan the step again, from its beginning and without a source that cannot be read.

        Raises:
            SourceError, StorageError, LoaderTimeout: no other source gives samples, so this is the end.
        """
        out = {lost.source, *self._decided.dropped}
        left = [
            name
            for i, (name, source, weight) in enumerate(
                zip(self._names, self._state.sources, self._weights, strict=True)
            )
            if weight and i not in out and not source.exhausted
        ]
        if not left:
            raise lost.error
        decision = DropSource(
            step=self._step, source=self._names[lost.source], reason=kind_and_message(lost.error)
        )
        if self._write_down is not None:
            self._write_down(decision)
        logger.warning(
            "source '%s' cannot be read any more, and the stream goes on without it from step %d on: %s",
            decision.source,
            decision.step,
            decision.reason,
        )
        with self._deciding:
            bisect.insort_right(self._decisions, decision, key=lambda one: one.step)
        self._own += (decision,)
        self._go_on_from(self._state)

    def _next(self) -> Plan | None:
        mixture, step = self._mixture, self._step
        self._quarantined = ()
        if mixture.steps is not None and step >= mixture.steps:
            return None
        if not self._skip(step, self._begin(step)):
            return None
        plan = self._plan(step)
        if plan is not None:
            self._step = step + 1
            with self._deciding:
                self._state = self._snapshot()
                self._decisions = [decision for decision in self._decisions if decision.step > step]
        return plan

    def _begin(self, step: int) -> int:
        """Let the decisions about a step take effect; how many steps are skipped before it."""
        with self._deciding:
            self._open_from = step + 1
            due = [decision for decision in self._decisions if decision.step == step]
        if due:
            scheduled = scheduled_weights(self._mixture, self._sources, step)
            self._decided = self._decided.after(due, self._names, scheduled)
            if self._decided.weights is not None:
                weights = dict(zip(self._names, self._decided.weights, strict=True))
                try:
                    self._mixture.check_caps(weights, f"the weights decided for step {step}")
                except ValueError as error:
                    raise DecisionError(str(error)) from None
        for decision in due:
            if isinstance(decision, DropSource):
                self._drop(self._names.index(decision.source))
        return sum(decision.count for decision in due if isinstance(decision, SkipSteps))

    def _drop(self, source: int) -> None:
        """Leave out what is carried of a source, and draw no more of it."""
        of_source = self._carried["source"] == source
        self._skipped[source] += self._carried["length"][of_source].sum(dtype=np.int64)
        self._carried = self._carried[~of_source]
        self._mixer.leave(source)
        self._weights = ()  # set anew for the step

    def _skip(self, step: int, count: int) -> bool:
        """Plan the next steps as they would have been, and leave them out; False at the end of the stream."""
        for ahead in range(count):
            plan = self._plan(step + ahead)
            if plan is None:
                return False
            np.add.at(self._skipped, plan.pieces["source"], plan.pieces["length"].astype(np.int64))
        if count:  # for what waits, the steps left out do not count
            self._carried = self._carried.copy()
            self._carried["born"] = np.maximum(self._carried["born"], count) - count
        return True

    def _plan(self, step: int) -> Plan | None:
        """Plan a step, and carry over what it does not take; None if it cannot be filled."""
        mixture = self._mixture
        weights = self._decided.weights or scheduled_weights(mixture, self._sources, step)
        if weights != self._weights:
            self._weights = weights
            self._set_weights()
        rules, coefficients = self._rules, self._decided.coefficients
        if coefficients is not None:
            rules = replace(rules, cost=CalibratedCost.from_mapping(coefficients))
        graph = DGraph(
            step=step, rules=rules, carried=self._carried, draw=functools.partial(self._draw, step)
        )
        try:
            plan = self._strategy(graph)
        except NotEnough:
            logger.warning(
                "the stream ends before step %d: %d tokens are left, which do not fill its lanes",
                self._step,
                graph.candidates["length"].sum(),
            )
            self._carried = graph.candidates
            self._state = self._snapshot(ended=True)
            return None
        except Exception as error:
            if mixture.strategy is None or isinstance(error, OmniloadError):
                raise
            raise PlanError(f"strategy {mixture.strategy}: step {step}: {kind_and_message(error)}") from error
        carried = graph.carried()
        if mixture.strategy is not None:
            check_plan(plan, step, graph.candidates, carried, self._rules, mixture.strategy)
        self._carried = carried
        return plan

    def _draw(
        self,
        step: int,
        candidates: np.ndarray,
        tokens: int,
        pieces: int,
        weights: Mapping[str, float] | None,
    ) -> np.ndarray:
        """Draw until, with the candidates there are, there are so many tokens or pieces; see `graph.Draw`."""
        tokens, pieces = tokens - int(candidates["length"].sum(dtype=np.int64)), pieces - len(candidates)
        mixer, drawn_from, order = self._mixer, set[int](), 0
        if weights is not None:
            self._set_weights(weights)
        while True:
            run = mixer.draw_ready(self._readers, self._mixture.seq_len, tokens, pieces, order)
            drawn_from.update(run.sources)
            tokens, pieces, order = tokens - run.tokens, pieces - run.pieces, order + run.samples
            if tokens <= 0 or pieces <= 0:
                break
            source = mixer.most_owed()
            if source is None:
                break
            drawn_from.add(source)
            drawn = self._readers[source].draw(order)
            if drawn is None:
                logger.log(
                    logging.WARNING if self._readers[source].says_stop else logging.INFO,
                    "source '%s' gave its last sample before step %d was full",
                    self._names[source],
                    step,
                )
                mixer.leave(source)
                self._set_weights(weights)
                continue
            mixer.draw(source, drawn)
            tokens -= drawn
            pieces -= -(-drawn // self._mixture.seq_len)
            order += 1
        if weights is not None:  # they were of this call alone
            self._set_weights()
        return self._take(sorted(drawn_from), step)

    def _take(self, drawn_from: list[int], step: int) -> np.ndarray:
        """The pieces drawn from these sources, in the order drawn."""
        taken = [self._readers[source].take() for source in drawn_from]
        for source in drawn_from:
            self._sources[source] = self._readers[source].state
        self._quarantined += tuple(failure for one in taken for failure in one.failed)
        pieces = join_pieces([part for one in taken for part in one.pieces])
        if not len(pieces):
            return pieces
        pieces_of = np.concatenate([part for one in taken for part in one.pieces_of])
        orders = np.concatenate([one.orders for one in taken])
        sources = np.repeat(drawn_from, [len(one.orders) for one in taken])
        pieces["source"] = np.repeat(sources, pieces_of)
        pieces["born"] = step
        return pieces.take(np.argsort(np.repeat(orders, pieces_of), kind="stable"))

    def _set_weights(self, given: Mapping[str, float] | None = None) -> None:
        """Mix by the weights in force, or those given, of the sources that still give samples; after a stop by none."""
        in_force = self._weights if given is None else self._checked_weights(given)
        weights = [
            0.0 if reader.exhausted or source in self._decided.dropped else weight
            for source, (weight, reader) in enumerate(zip(in_force, self._readers, strict=True))
        ]
        stopped = any(reader.says_stop for reader in self._readers)
        self._mixer.set_weights(
            integer_weights(weights) if any(weights) and not stopped else [0] * len(weights)
        )

    def _checked_weights(self, given: Mapping[str, float]) -> list[float]:
        """The weights that a strategy gave `DGraph.mix`."""
        where = f"strategy {self._mixture.strategy}: mix"
        if not isinstance(given, Mapping):
            raise PlanError(f"{where}: got {given!r}; give a weight by name of source")
        unknown = sorted(given.keys() - set(self._names))
        if unknown:
            raise PlanError(f"{where}: no source '{unknown[0]}'{suggest(unknown[0], self._names)}")
        for name, weight in given.items():
            if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise PlanError(f"{where}: the weight of '{name}' is {weight!r}; give a number from 0 on")
        if not any(given.values()):
            raise PlanError(f"{where}: every weight is 0; give at least one source a positive weight")
        return [float(given.get(name, 0.0)) for name in self._names]

    def _snapshot(self, *, ended: bool = False) -> StreamState:
        return StreamState(
            step=self._step,
            sources=tuple(
                replace(source, skipped_tokens=skipped) if skipped else source
                for source, skipped in zip(self._sources, self._skipped.tolist(), strict=True)
            ),
            deficits=self._mixer.deficits,
            carried=self._carried,
            ended=ended,
            decided=self._state.decided if ended else self._decided,
        )
