"""Control of a running stream: what may be decided, and the rule for when it may take effect.

The planner is ahead of training, by an amount that is a matter of timing. Timing must not decide what is trained on, so
a decision names its step, and that is one which no rank can have planned yet. With ``step`` the last step asked for,
a planner has begun at most ``step + prefetch_steps + 1``: ``prefetch_steps`` finished steps wait in the queue, and one
more, taken up before the queue was full, waits to get in. So a step is open to decisions from
``step + prefetch_steps + 2`` on, whether or not the planner has come that far: on every rank alike. A loader that is
not running has planned nothing, and its next step is open.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omniload.errors import DecisionError, StateError
from omniload.mixture import Mixture
from omniload.planner.decisions import (
    Decision,
    SetCoefficients,
    SetWeights,
    SkipSteps,
    check_names,
    digest_of,
    from_json,
    to_json,
)


class DecisionLog:
    """The decisions of a run, by step, and which steps are open to more. Thread-safe.

    Args:
        names: of the sources.
        ahead: steps from the last one asked for to the first that is open.
        lock: held while the loader moves on.
    """

    def __init__(self, names: Sequence[str], ahead: int, lock: threading.RLock) -> None:
        self.ahead = ahead
        self.lock = lock
        self._names = names
        self._decisions: list[Decision] = []
        self._earliest = 0
        self._planner: Callable[[Decision], None] | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All of them, by step; those of one step in the order given."""
        return tuple(self._decisions)

    @property
    def earliest_step(self) -> int:
        """The first step that is open."""
        return self._earliest

    def since(self, step: int) -> tuple[Decision, ...]:
        """Those about a step and later ones."""
        return tuple(self._decisions[self._first(step) :])

    def add(self, decisions: Iterable[Decision]) -> None:
        """Decide; all of it or nothing.

        Raises:
            DecisionError: a step is not open, or a source is unknown.
        """
        with self.lock:
            added = list(decisions)
            for decision in added:
                check_names(decision, self._names)
                if decision.step < self._earliest:
                    raise DecisionError(
                        f"step {decision.step} is already planned, or may be on some rank; the earliest is"
                        f" {self._earliest}"
                    )
            for decision in added:
                if self._planner is not None:
                    self._planner(decision)  # or it is not decided
                bisect.insort_right(self._decisions, decision, key=lambda one: one.step)

    def note(self, decisions: Iterable[Decision]) -> None:
        """Take note of what the planner decided by itself; it is the same on every rank."""
        with self.lock:
            for decision in decisions:
                bisect.insort_right(self._decisions, decision, key=lambda one: one.step)

    def planned_by(self, planner: Callable[[Decision], None]) -> None:
        """From now on a planner is at work, which is told of decisions; it knows those there are."""
        self._planner = planner

    def asked_for(self, step: int) -> None:
        """A step is about to be asked for."""
        self._earliest = step + self.ahead

    def stop(self, next_step: int) -> None:
        """Planning has ended, and starts again at a step."""
        self._planner, self._earliest = None, next_step

    def to_json(self, step: int) -> dict[str, Any]:
        """What a state before a step holds of the log, besides the decisions `since` that step."""
        if not self._decisions:
            return {}
        return {
            "past": [to_json(decision) for decision in self._decisions[: self._first(step)]],
            "digest": digest_of(self._decisions),
        }

    def read(self, saved: object, pending: Sequence[Decision]) -> list[Decision]:
        """The log of a saved state; `load` takes it.

        Args:
            saved: as `to_json` gave it.
            pending: the decisions since the step of the state.

        Raises:
            StateError: it is damaged.
        """
        if saved is None and not pending:
            return []
        damaged = StateError("the loader state is damaged: its decisions are not those that were made")
        if not isinstance(saved, Mapping) or not isinstance(saved.get("past"), list):
            raise damaged
        try:
            decisions = [*map(from_json, saved["past"]), *pending]
            for decision in decisions:
                check_names(decision, self._names)
        except DecisionError:
            raise damaged from None
        steps = [decision.step for decision in decisions]
        if steps != sorted(steps) or digest_of(decisions) != saved.get("digest"):
            raise damaged
        return decisions

    def load(self, decisions: list[Decision]) -> None:
        """Go on from a log, while no planner is at work."""
        self._decisions = decisions

    def _first(self, step: int) -> int:
        return bisect.bisect_left(self._decisions, step, key=lambda one: one.step)


class Control:
    """Changes the stream of a running loader. Plans that are made stay as they are.

    Every rank has to make the same decisions, whatever axis it is on; `digest` is equal on all of them then. They are
    part of the state.

    Args:
        mixture: what is loaded.
        dp_size: number of data-parallel ranks.
        log: the loader's.
    """

    def __init__(self, mixture: Mixture, dp_size: int, log: DecisionLog) -> None:
        self._mixture = mixture
        self._dp_size = dp_size
        self._log = log

    @property
    def log(self) -> tuple[Decision, ...]:
        """All decisions so far, by step. Those of a loaded state are among them."""
        return self._log.decisions

    @property
    def digest(self) -> str:
        """Digest of the log, to be compared over ranks."""
        return digest_of(self._log.decisions)

    @property
    def earliest_step(self) -> int:
        """The first step that is open to decisions.

        While the loader runs, `delay_steps` after the step that was asked for last: the same on every rank that is at
        that step with the same ``prefetch_steps``. Before the first step, and after `MixtureLoader.close`, which throws
        away what is planned ahead, the step that comes next.
        """
        return self._log.earliest_step

    @property
    def delay_steps(self) -> int:
        """Steps from the one being trained on to the earliest that is open: ``prefetch_steps + 2``.

        Two more once the loader is connected.
        """
        return self._log.ahead

    def set_weights(self, weights: Mapping[str, float] | None, at_step: int | None = None) -> SetWeights:
        """Mix by other weights from a step on, until they are set again.

        Args:
            weights: of all sources, relative to each other; or of some: their shares of the stream (or of its samples,
                with ``unit: samples``), while the others share what is left in proportion to the weights then in
                force. None: go by the mixture's schedule again.
            at_step: the first step mixed so; by default the earliest, which several data-parallel ranks have to agree
                on and therefore name.

        Returns:
            The decision, as it is in the log.

        Raises:
            DecisionError: the weights are not valid, or the step is not open.
        """
        with self._log.lock:
            decision = SetWeights(step=self._step(at_step), weights=weights)
            if decision.weights is not None and decision.weights.keys() == self._mixture.sources.keys():
                try:
                    self._mixture.check_weights(decision.weights, "weights")
                except ValueError as error:
                    raise DecisionError(str(error)) from None
            self._log.add([decision])
            return decision

    def skip_steps(self, count: int, at_step: int | None = None) -> SkipSteps:
        """Leave out the data of the next steps, as after a spike of the loss.

        The steps ``at_step`` to ``at_step + count - 1`` are planned as they would have been, and thrown away, and step
        ``at_step`` trains on what follows. Step numbers go on, and with them ``steps``, a schedule placed by step, and
        what is decided for later steps.
        The tokens are counted as `SourceLedger.skipped_tokens`; bad rows among the data are counted and written down.

        Args:
            count: how many.
            at_step: the step before which they are left out; see `set_weights`.

        Returns:
            The decision, as it is in the log.

        Raises:
            DecisionError: it is no number of steps, or the step is not open.
        """
        with self._log.lock:
            decision = SkipSteps(step=self._step(at_step), count=count)
            self._log.add([decision])
            return decision

    def set_cost_coefficients(
        self, coefficients: Mapping[str, int], at_step: int | None = None
    ) -> SetCoefficients:
        """Reckon the costs of pieces by measured coefficients from a step on, in place of the mixture's cost model.

        Args:
            coefficients: integers by name, those of `omniload.planner.costs.CalibratedCost`.
            at_step: the first step balanced so; see `set_weights`.

        Returns:
            The decision, as it is in the log.

        Raises:
            DecisionError: one is unknown, no integer or negative; the step is not open; or ``caps.cost`` is in the
                unit of the mixture's cost model.
        """
        with self._log.lock:
            decision = SetCoefficients(step=self._step(at_step), coefficients=coefficients)
            self._add([decision])
            return decision

    def replay(self, decisions: Iterable[Decision | Mapping[str, Any]]) -> None:
        """Decide as another run did; all of it or nothing.

        Args:
            decisions: its log, or the JSON forms of it (`omniload.planner.decisions.to_json`).

        Raises:
            DecisionError: one is not valid, or its step not open.
        """
        self._add([from_json(one) if isinstance(one, Mapping) else one for one in decisions])

    def _add(self, decisions: list[Decision]) -> None:
        if self._mixture.caps.cost is not None and any(isinstance(one, SetCoefficients) for one in decisions):
            raise DecisionError(
                "coefficients: costs would be in another unit than caps.cost of the mixture; bound lanes by caps.tokens"
                " instead"
            )
        self._log.add(decisions)

    def _step(self, at_step: int | None) -> int:
        if at_step is not None:
            return at_step
        if self._dp_size > 1:
            raise DecisionError(
                f"at_step: needed with dp_size {self._dp_size}, for every rank has to decide for the same step; take"
                " earliest_step of the rank that is furthest, or the step trained on plus delay_steps"
            )
        return self.earliest_step
