"""The Planner role: metadata of all sources in, one plan per step out. One per job; it never sees payload.

A step is planned in five stages: mix (draw samples until the packs can be filled), pack, cost, balance, freeze. The
planner waits for the next metadata of the source that mixing names and never takes what happens to be ready, so its
plans are a pure function of the mixture, the data and the state it started from.
"""

from __future__ import annotations

import logging

import numpy as np

from omniload.mixture import Mixture
from omniload.pieces import Failure, join_pieces
from omniload.planner.arrange import arrange, enough
from omniload.planner.mix import Mixer
from omniload.planner.plan import Plan
from omniload.planner.reader import Metadata, SourceReader
from omniload.planner.state import StreamState
from omniload.weights import integer_cap, integer_weights

logger = logging.getLogger(__name__)


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
        specs = [mixture.sources[name] for name in self._names]
        self._readers = [
            SourceReader(name, i, spec, source, metadata, mixture.quarantine)
            for i, (name, spec, source) in enumerate(zip(self._names, specs, state.sources, strict=True))
        ]
        self._mixer = Mixer(
            state.deficits,
            [source.emitted_tokens for source in state.sources],
            [integer_cap(spec.max_fraction) for spec in specs],
            by_samples=mixture.unit == "samples",
        )
        self._stages = {stage.step for stage in mixture.schedule}
        self._set_weights(state.step)
        self._sources = list(state.sources)
        self._state = state
        self._quarantined: tuple[Failure, ...] = ()

    @property
    def state(self) -> StreamState:
        """The stream before the step that `next` plans next."""
        return self._state

    @property
    def quarantined(self) -> tuple[Failure, ...]:
        """The rows that the last call of `next` consumed and that make no sample, by source, in order."""
        return self._quarantined

    def next(self) -> Plan | None:
        """Plan the next step; None at the end of the stream.

        The stream ends after ``steps`` steps, or before the first step whose packs cannot all be filled because
        a source with ``on_exhausted: stop``, or every source, gave its last sample. What was drawn for it is then
        among the carried pieces of `state`, counted and not served.

        Raises:
            SourceError: a source cannot be read, or gives nothing.
            TooManyFailures: a source is over its budget of quarantined rows.
        """
        mixture, step = self._mixture, self._step
        self._quarantined = ()
        if mixture.steps is not None and step >= mixture.steps:
            return None
        candidates, scale = self._carried, 1
        while True:
            drawn = self._draw(candidates, step, scale)
            candidates = np.concatenate([candidates, drawn])
            arrangement = arrange(candidates, mixture, step)
            if arrangement is not None or not len(drawn):
                break
            scale *= 2
        if arrangement is None:
            logger.warning(
                "the stream ends before step %d: %d tokens are left, which do not fill its lanes",
                step,
                candidates["length"].sum(),
            )
            self._carried = candidates
            self._state = self._snapshot(ended=True)
            return None

        plan = Plan(
            step=step,
            pieces=candidates[arrangement.taken],
            offsets=arrangement.offsets,
            lane_offsets=arrangement.lane_offsets,
        )
        self._carried = np.delete(candidates, arrangement.taken)
        self._step = step + 1
        self._state = self._snapshot()
        return plan

    def _draw(self, candidates: np.ndarray, step: int, scale: int) -> np.ndarray:
        """Draw until, with the candidates there are, a step can be filled, or ``scale`` times one."""
        tokens, pieces = (scale * wanted for wanted in enough(self._mixture))  # still to be drawn
        tokens, pieces = tokens - int(candidates["length"].sum(dtype=np.int64)), pieces - len(candidates)
        mixer, drawn_from, order = self._mixer, set[int](), 0
        if step in self._stages:
            self._set_weights(step)
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
                self._set_weights(step)
                continue
            mixer.draw(source, drawn)
            tokens -= drawn
            pieces -= -(-drawn // self._mixture.seq_len)
            order += 1
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
        orders = np.array([order for one in taken for order in one.orders], np.int64)
        sources = np.repeat(drawn_from, [len(one.orders) for one in taken])
        pieces["source"] = np.repeat(sources, pieces_of)
        pieces["born"] = step
        return pieces[np.argsort(np.repeat(orders, pieces_of), kind="stable")]

    def _set_weights(self, step: int) -> None:
        """Mix by the weights in force, of the sources that still give samples; by none if one of them said stop."""
        weights = [
            0.0 if reader.exhausted else weight
            for weight, reader in zip(self._mixture.weights_at(step), self._readers, strict=True)
        ]
        stopped = any(reader.says_stop for reader in self._readers)
        self._mixer.set_weights(
            integer_weights(weights) if any(weights) and not stopped else [0] * len(weights)
        )

    def _snapshot(self, *, ended: bool = False) -> StreamState:
        return StreamState(
            step=self._step,
            sources=tuple(self._sources),
            deficits=self._mixer.deficits,
            carried=self._carried,
            ended=ended,
        )
