"""The client of a mixture: what a training loop iterates over."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from omniload.constructor import DERIVED, LaneArrays
from omniload.control import Control, DecisionLog
from omniload.errors import (
    LoaderStopped,
    MixtureError,
    OmniloadError,
    PlaceError,
    StateError,
    TooManyFailures,
)
from omniload.identity import Identity
from omniload.lazy import lazy
from omniload.ledger import Ledger
from omniload.mixture import Mixture
from omniload.observing.stats import SLOW_S, ClientStats
from omniload.observing.timing import Timing
from omniload.pieces import Failure
from omniload.place import Place
from omniload.planner import Plan, StreamState
from omniload.planner.rules import StepRules
from omniload.planner.strategies import load_strategy
from omniload.quarantine import Quarantine
from omniload.runtime.chaos import Chaos
from omniload.runtime.options import Execution, RayOptions, Settings, chosen
from omniload.runtime.steps import End, Host, Ready, Runtime, Step
from omniload.samples.buffer import BUFFER_BYTES
from omniload.sources.split import Split
from omniload.torch_loader.entry import DataLoader
from storage.background import BackgroundThread

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from omniload.connecting.circles import StageOrder
    from omniload.connecting.host import Mesh

logger = logging.getLogger(__name__)

STATE_VERSION = 3
PLANS_KEPT = 64
"""Steps whose plans stay at hand for `MixtureLoader.samples`."""

Lane = dict[str, Any]
"""One microbatch: the tensors of `LaneArrays`, and its place in the step (see `MixtureLoader`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _At:
    """Where a loader stands. Replaced as a whole, so that a signal handler never sees half of a move."""

    stream: StreamState
    """Before the step, or, where there is none, before the one to come."""
    step: Step | None = None
    yielded: int = 0
    """Lanes of the step, or of the one to come, that were given out already."""


class LanesDataset(IterableDataset[Lane]):
    """The ``dataset`` of a loader of lanes, for code that looks for one.

    Args:
        loader: the loader; it is not kept alive.
        mixture: what it loads.
    """

    def __init__(self, loader: MixtureLoader, mixture: Mixture) -> None:
        self.mixture = mixture
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[Lane]:
        """The lanes, from where the loader stands."""
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the loader of these lanes is gone; keep it, and iterate over it")
        return iter(loader)


class MixtureLoader(DataLoader[Lane]):
    """Packed, balanced microbatches of a mixture for one rank.

    Iterating gives this rank's lanes in order, `lanes / dp_size` of them per step. A lane is a dict::

        input_ids          int64[m, S]   m = packs / lanes packs of S = seq_len tokens; 0 where there is no token
        targets            int64[m, S]   the next token of the same document, -100 where there is none
        position_ids       int64[m, S]   position in the segment
        segment_ids        int32[m, S]   1, 2, … for the documents of a pack; 0 for padding
        cu_seqlens         int32[k + 1]  bounds of the segments in the m·S tokens laid end to end, padding included
        max_seqlen         int           longest segment
        num_target_tokens  int           targets of the whole step over all ranks: divide the summed loss by it
        step, lane         int           which microbatch of the stream this is
        is_last_in_step    bool          whether the optimizer steps after it

    With ``labels: hf`` in the mixture, ``labels`` (unshifted) stands in place of ``targets``. If a source turns images
    into patches, every lane has those of its samples, in the order of their placeholders, maybe none::

        pixel_values       float32[n, d]  patches; uint8 where the transform says so
        image_grid_thw     int64[k, 3]    frames, rows and columns of patches of each image

    Iteration goes on from where the loader stands: after a break, after `load_state_dict`, after the end (where it
    gives nothing more). The stream is a pure function of the mixture and its data, so any number of ranks, at any
    time, see the same global step.

    Args:
        mixture: a YAML file, a mapping of the same shape, or a `Mixture`.
        seq_len: overrides the mixture's tokens per pack.
        packs: overrides the mixture's packs per step.
        lanes: overrides the mixture's microbatch slots per step.
        steps: overrides the mixture's length of the run.
        quarantine: overrides the mixture's file that data-parallel rank 0 appends bad rows to.
        dp_rank: rank on the data-parallel axes; ranks that differ on other axes only get the same lanes.
        dp_size: number of data-parallel ranks; must divide ``lanes``.
        mesh: instead of both, a DeviceMesh whose data-parallel axes are named ``dp…``.
        split: ``train``, or ``held_out`` for the rows that ``held_out`` in the mixture keeps from training.
        prefetch_steps: finished steps held ready.
        buffer_bytes: prepared samples held per source, in bytes; what does not fit is prepared again when needed.
        timeout_s: limit of every wait inside the loader.
        derived: which of targets (or labels), position_ids and segment_ids lanes have, all by default: building the
            ones that a model does not look at takes as long as the rest.
        execution: overrides where sources are read and steps planned: in threads of this process (``inline``), or in
            actors that all ranks of the job share (``ray``). ``auto`` takes Ray where the job has several processes.
        ray: overrides how Ray hosts them.
        chaos: disturbs timing, buffers and loaders at random, for tests of what must not depend on them.

    Raises:
        MixtureError: the mixture is not valid.
        PlaceError: the ranks cannot share the lanes.
        SourceError: a source cannot be opened.
        QuarantineError: the quarantine file cannot be written.
    """

    _takes_mixtures = True

    def __init__(
        self,
        mixture: Mixture | Mapping[str, Any] | str | Path,
        *,
        seq_len: int | None = None,
        packs: int | None = None,
        lanes: int | None = None,
        steps: int | None = None,
        quarantine: str | Path | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        split: Split = "train",
        prefetch_steps: int = 2,
        buffer_bytes: int = BUFFER_BYTES,
        timeout_s: float = 300.0,
        derived: Collection[str] = DERIVED,
        execution: Execution | None = None,
        ray: RayOptions | Mapping[str, Any] | None = None,
        chaos: Chaos | None = None,
    ) -> None:
        self._mixture = Mixture.load(
            mixture,
            seq_len=seq_len,
            packs=packs,
            lanes=lanes,
            steps=steps,
            quarantine=None if quarantine is None else str(quarantine),
            execution=execution,
            ray=ray.model_dump() if isinstance(ray, RayOptions) else ray,
        )
        # Before torch's part, which asks for it.
        self._place = Place.of(dp_rank=dp_rank, dp_size=dp_size, mesh=mesh)
        super().__init__(LanesDataset(self, self._mixture), batch_size=None)
        self._lanes = self._place.lanes_of(self._mixture)
        if prefetch_steps < 1:
            raise ValueError(
                f"prefetch_steps: {prefetch_steps} is below 1; the step being built needs a place"
            )
        unknown = sorted(set(derived) - set(DERIVED))
        if unknown:
            raise ValueError(f"derived: '{unknown[0]}' is none of {', '.join(DERIVED)}")
        told, other = ("targets", "labels") if self._mixture.labels == "shifted" else ("labels", "targets")
        if other in derived and told not in derived:
            raise ValueError(
                f"derived: with labels: {self._mixture.labels} lanes have no '{other}'; ask for {told}, or change it"
            )
        if buffer_bytes < 0 or not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"buffer_bytes: {buffer_bytes} must not be negative, timeout_s: {timeout_s} must be positive and at"
                f" most {threading.TIMEOUT_MAX:g}"
            )
        if split == "held_out" and not self._mixture.held_out:
            raise MixtureError(
                "held_out: is 0, so there is no held-out row to load; set the fraction to hold out"
            )
        StepRules.of(self._mixture)  # so that a cost or a strategy that is not there is said now
        load_strategy(self._mixture.strategy)
        if split not in ("train", "held_out"):
            raise ValueError(f"split: '{split}' is neither 'train' nor 'held_out'")
        self._settings = Settings(
            split=split,
            prefetch_steps=prefetch_steps,
            buffer_bytes=buffer_bytes,
            timeout_s=timeout_s,
            derived=tuple(derived),
            chaos=chaos,
        )
        self._process = os.getpid()
        # Held while what follows moves: the state may be taken, and the loader closed, in another thread. It may be
        # taken again, for a signal's handler that takes the state runs in the thread that it interrupts.
        self._moving = threading.RLock()
        self._at = _At(stream=StreamState.initial(len(self._mixture.names)))
        # Beyond the steps asked for, those in the queue and one that waits to get in are planned, or being planned.
        self._log = DecisionLog(self._mixture.names, prefetch_steps + 2, self._moving)
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._runtime: Runtime | None = None
        self._stall = Timing()
        self._slow = -1, 0.0  # step and seconds of the last that was waited for long
        self._began_s = time.monotonic()
        self._tokens = 0
        self._runs_in = 0  # process of the runtime's threads
        self._stopper: weakref.finalize[..., Any] | None = None
        # Last, as it may ask how the rank is.
        self._host = self._make_host()
        self._quarantine = self._open_quarantine()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A loader has threads and open files.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a loader of a mixture cannot be copied or pickled; pass the mixture, and make one from it there"
        )

    @lazy
    def _identity(self) -> Identity:
        # Of many local files it takes a while, so the first step does not wait for it.
        return self._host.identity()

    @property
    def mixture(self) -> Mixture:
        """The mixture, with the overrides applied."""
        return self._mixture

    @property
    def control(self) -> Control:
        """Changes the weights, skips steps: decisions about steps that are not planned yet."""
        return Control(self._mixture, self._place.dp_size, self._log)

    @property
    def place(self) -> Place:
        """The rank, and the number of ranks, that the lanes are divided among."""
        return self._place

    def __iter__(self) -> Iterator[Lane]:  # type: ignore[override]  # torch names a class of its own
        """This rank's lanes, from where the loader stands."""
        while True:
            with self._moving:
                at = self._at
                step = at.step if at.yielded < len(self._lanes) else None
                if step is not None:
                    self._at = replace(at, yielded=at.yielded + 1)
            if step is not None:
                yield self._lane(step, at.yielded)
            elif not self._advance():
                return

    def steps(self) -> Iterator[list[Lane]]:
        """This rank's lanes grouped by step; after a resume inside a step, the first group is what is left of it."""
        group: list[Lane] = []
        for lane in self:
            group.append(lane)
            if lane["is_last_in_step"]:
                yield group
                group = []

    def __len__(self) -> int:
        """Iterations of the whole run, if the mixture says how many steps it has.

        Raises:
            TypeError: the mixture has no ``steps``.
        """
        if self._mixture.steps is None:
            raise TypeError("the mixture has no 'steps', so the loader has no length")
        return self._mixture.steps * len(self._lanes)

    def samples(self, lane: Mapping[str, Any]) -> pa.Table:
        """Where the tokens of a lane come from.

        Args:
            lane: a lane of one of the last `PLANS_KEPT` steps, or anything with its ``step`` and ``lane``.

        Returns:
            One row per piece, in the order they lie in: ``pack`` (int64, numbered in the step), ``source``
            (string), ``epoch`` (int64), ``file`` (string), ``row`` (int64: the id that the format gives rows, say
            the row number, or for JSONL the byte offset of the line), ``start`` and ``end`` (int64, tokens of the
            sample).

        Raises:
            LookupError: the step is too long ago, or not served yet.
        """
        plan = self._plans.get(lane["step"])
        if plan is None:
            raise LookupError(
                f"step {lane['step']} is not among the last {PLANS_KEPT} served; ask for samples sooner"
            )
        return self._host.origins(plan, lane["lane"])

    def plan(self, step: int) -> Plan:
        """The plan of one of the last `PLANS_KEPT` steps served.

        Raises:
            LookupError: the step is too long ago, or not served yet.
        """
        if step not in self._plans:
            raise LookupError(f"step {step} is not among the last {PLANS_KEPT} served")
        return self._plans[step]

    def ledger(self) -> Ledger:
        """Where the tokens of every source went, up to the last step begun."""
        at = self._at
        return Ledger.of(self._mixture, at.step.after if at.step else at.stream)

    def failures(self) -> list[Failure]:
        """The rows quarantined last, up to a thousand of each source, with path, row and reason.

        A row appears when it is read, which is ahead of the step it would have gone to.
        """
        return self._host.failures()

    def stats(self) -> ClientStats:
        """How well the loader keeps up: above all, how long each of the last steps was waited for."""
        at, runtime = self._at, self._runtime
        ready = runtime.ready() if runtime is not None else Ready()
        return ClientStats(
            rank=int(os.environ.get("RANK", self._place.dp_rank)),
            step=at.step.plan.step if at.step is not None else at.stream.step,
            stall_p50_ms=self._stall.p50_ms,
            stall_p99_ms=self._stall.p99_ms,
            fetch_p50_ms=ready.fetch_p50_ms,
            queue_steps=ready.steps,
            queue_bytes=ready.num_bytes,
            tokens_per_s=self._tokens / (time.monotonic() - self._began_s),
            slow_step=self._slow[0],
            slow_s=self._slow[1],
        )

    def connect(
        self,
        mesh: Mesh,
        *,
        broadcast: Sequence[str] | None = None,
        timeout_s: float | None = None,
        context_parallel: str | None = "zigzag",
        stage_order: StageOrder = "loop",
    ) -> None:
        """Let one rank load for all that share its lanes; the others open no source and plan nothing.

        A collective call: every rank of the job makes it, with the same arguments, at the same point among its other
        collectives. From then on the ranks that share lanes go through the steps together: each of them has to
        iterate, `close` and `load_state_dict` as the others do, and to make the same decisions. They talk in a thread
        of their own, over gloo groups of their own, so nothing comes between the collectives of the training loop;
        close the loader before `torch.distributed.destroy_process_group`.

        What a rank gets, byte for byte, is what it would have loaded by itself, or a part of that: with ``cp`` in the
        mesh its slice of every pack, with ``pp`` what its stage has a use for. A middle stage gets no ``input_ids``
        and no targets; ``cu_seqlens`` and ``max_seqlen`` are those of the whole lane. An error is raised on all of
        them, of the same type and with the same text; a rank that dies is named by the others.

        Args:
            mesh: of all ranks: a DeviceMesh, sizes by axis with the outermost first, or ``"dp=2,tp=4"``.
            broadcast: axes along which only the first rank loads, of ``pp``, ``cp`` and ``tp``. By default those that
                the mixture's strategy marks with ``broadcast_at``, and without such marks all three.
            timeout_s: how much longer than the loader's ``timeout_s`` a rank waits for another one; by default as
                long again.
            context_parallel: how packs are cut over ``cp``, one of `omniload.placing.slicing.SLICINGS`; None to leave
                them whole.
            stage_order: ``loop`` if the last stage of the model is on the last rank of ``pp``, ``v`` if it is on the
                first one, with the first stage.

        Raises:
            PlaceError: the mesh is not that of the job, or not the one that the loader's lanes follow from; there is
                no process group; or the loader is connected already.
            MixtureError: a rank has another mixture.
            LoaderTimeout: a rank does not answer.
        """
        from omniload.connecting.host import connect  # loads torch.distributed
        from omniload.connecting.runtime import AHEAD_STEPS
        from omniload.runtime.inline import InlineHost

        with self._moving:
            self._halt()
            host, settings = self._host, self._settings
            inline = isinstance(host, InlineHost)
            self._host = connect(
                host,
                mesh,
                mixture=self._mixture,
                place=self._place,
                lanes=self._lanes,
                settings=settings,
                state=self._position()[0],
                broadcast=broadcast,
                timeout_s=settings.timeout_s if timeout_s is None else timeout_s,
                context_parallel=context_parallel,
                stage_order=stage_order,
                reopen=partial(InlineHost.open, self._mixture, self._lanes, settings)
                if inline
                else lambda: host,
            )
            if self._host is not host:
                self._log.ahead += AHEAD_STEPS

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the lanes yielded so far: JSON-serialisable, the same on every rank.

        At a step boundary it loads on any number of ranks; inside a step on the same number only.
        """
        with self._moving:
            stream, yielded = self._position()
            decisions = self._log.to_json(stream.step)
        state = {
            "version": STATE_VERSION,
            "identity": self._identity.to_json(),
            "stream": stream.to_json(self._mixture.names),
        }
        if decisions:
            state["decisions"] = decisions
        if yielded:
            state |= {"lanes_yielded": yielded, "dp_size": self._place.dp_size}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Nothing changes if it is refused.

        Raises:
            StateError: the state is of another mixture, other data or another version, or was taken inside a step
                on another number of ranks.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"a loader state is a mapping, as state_dict gives it, and this is a {type(state).__name__}"
            )
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"loader state has version {state.get('version')!r}, this omniload reads {STATE_VERSION}"
            )
        self._identity.check(state.get("identity"))
        yielded, dp_size = state.get("lanes_yielded", 0), state.get("dp_size")
        if not isinstance(yielded, int) or not isinstance(state.get("stream"), Mapping):
            raise StateError("the loader state is damaged: it lacks its stream, or counts no lanes")
        if yielded and dp_size != self._place.dp_size:
            raise StateError(
                f"the state was taken inside a step with dp_size {dp_size} and cannot go on with dp_size"
                f" {self._place.dp_size}: load it with dp_size {dp_size}, or save at a step boundary"
            )
        if not 0 <= yielded < len(self._lanes):
            raise StateError(f"the loader state is damaged: {yielded} of {len(self._lanes)} lanes yielded")
        stream = StreamState.from_json(dict(state["stream"]), self._mixture.names)
        decisions = self._log.read(state.get("decisions"), stream.decisions)
        with self._moving:
            self._halt()
            self._log.load(decisions)
            self._log.stop(stream.step + bool(yielded))
            self._at = _At(stream=stream, yielded=yielded)
            self._plans.clear()

    def close(self) -> None:
        """Stop the threads, and leave the actors. The loader stays where it is; iterating starts them again.

        Another thread that waits for a step gets `LoaderStopped`.
        """
        with self._moving:
            self._halt()
            self._host.close()

    def _halt(self) -> None:
        """Stop the runtime."""
        with self._moving:
            if self._runtime is not None:
                assert self._stopper is not None, "set together with the runtime"
                stream, yielded = self._position()
                self._at = _At(stream=stream, yielded=yielded)
                self._log.stop(stream.step + bool(yielded))
                self._stopper.detach()
                runtime, self._runtime = self._runtime, None
                runtime.stop()

    def __enter__(self) -> Self:
        """The loader itself; its threads stop at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _position(self) -> tuple[StreamState, int]:
        """The stream before the step that is going on, and the lanes of it already yielded."""
        at = self._at
        if at.step is None:
            stream, yielded = at.stream, at.yielded
        elif at.yielded == len(self._lanes):
            stream, yielded = at.step.after, 0
        else:
            stream, yielded = at.step.before, at.yielded
        # What was decided after the step was planned is part of the stream as well.
        return replace(stream, decisions=self._log.since(stream.step)), yielded

    def _make_host(self) -> Host:
        if chosen(self._mixture.execution) == "ray":
            from omniload.runtime.ray.host import RayHost  # loads ray

            return RayHost(self._mixture, self._place, self._settings, self.stats)
        dropped = [one for one, spec in self._mixture.sources.items() if spec.on_unreachable == "drop_source"]
        if self._place.dp_size > 1 and dropped:
            raise MixtureError(
                f"sources.{dropped[0]}.on_unreachable: drop_source is decided by one planner for all ranks, and with"
                " execution: inline each has its own; set execution: ray, or on_unreachable: stop"
            )
        if self._place.dp_size > 1 and self._mixture.tokenizer is not None:
            logger.warning(
                "each of the %d data-parallel ranks tokenizes the whole mixture by itself; set execution: ray, or"
                " pre-tokenise the data, if the loader is the bottleneck",
                self._place.dp_size,
            )
        from omniload.runtime.inline import InlineHost  # loads what reads sources

        return InlineHost.open(self._mixture, self._lanes, self._settings)

    def _open_quarantine(self) -> Quarantine | None:
        if self._mixture.quarantine is None or self._place.dp_rank != 0:
            return None
        path = Path(self._mixture.quarantine)
        for source, name in enumerate(self._mixture.names):
            alike = [url for url in self._host.urls(source) if url.endswith(f"/{path.name}")]
            if any(Path(url).resolve() == path.resolve() for url in alike):
                raise MixtureError(
                    f"quarantine: {path} is a file of source '{name}'; give one that no source reads"
                )
        return Quarantine(path)

    def _advance(self) -> bool:
        """Move to the next step; False at the end of the stream."""
        with self._moving:
            runtime = self._runtime = self._runtime or self._start()
            at = self._at
            self._log.asked_for(at.step.plan.step + 1 if at.step else at.stream.step)
        if self._runs_in != os.getpid():
            raise LoaderStopped(
                "the loader was iterated over before this process was forked, and its threads are not here; start the"
                " process before, or make a loader in it"
            )
        began_s = time.perf_counter()
        try:
            step = runtime.next_step()
        finally:
            stalled_s = time.perf_counter() - began_s
            self._stall.record(stalled_s)
        with self._moving:
            if self._runtime is not runtime:
                raise LoaderStopped(
                    "the loader was closed while this thread waited for a step; iterate again to go on"
                )
            self._note_quarantined(step)
            if isinstance(step, Step):
                self._log.note(step.decided)
            if isinstance(step, BaseException):
                self._halt()  # the next call starts afresh from where the loader stands
                raise step
            if isinstance(step, End):
                self._at = _At(stream=step.after)
                return False
            if stalled_s > SLOW_S and self._at.step is not None:
                self._slow = step.plan.step, stalled_s
            skipped = self._at.yielded if self._at.step is None else 0
            self._at = _At(stream=step.before, step=step, yielded=skipped)
            self._tokens += sum(_num_tokens(lane) for lane in step.lanes)
            self._plans[step.plan.step] = step.plan
            if len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        if "_identity" not in self.__dict__:
            BackgroundThread(self._identify, name="omniload-identify").start()
        return True

    def _start(self) -> Runtime:
        """Start the runtime, from where the loader stands."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1 and self._process != os.getpid():
            raise PlaceError(
                f"each of the {worker.num_workers} workers of a torch DataLoader would give the whole stream of this"
                " loader; iterate over it itself, which has threads of its own"
            )
        runtime = self._host.start(self._position()[0])
        self._log.planned_by(runtime.decide)
        self._runs_in = os.getpid()
        self._stopper = weakref.finalize(self, runtime.abandon)
        return runtime

    def _note_quarantined(self, item: Step | End | BaseException) -> None:
        """Write the rows that a step, or what there is in its place, left out."""
        if self._quarantine is None:
            return
        try:
            if isinstance(item, Step | End):
                self._quarantine.add(
                    item.quarantined, item.plan.step if isinstance(item, Step) else item.after.step
                )
            elif isinstance(item, TooManyFailures):
                self._quarantine.add(item.failures, self._position()[0].step)
        except OmniloadError:
            self._halt()  # the step is not handed out, so the next call starts afresh before it
            raise

    def _identify(self) -> None:
        with suppress(Exception):  # raised where the identity is asked for
            _ = self._identity

    def _lane(self, step: Step, index: int) -> Lane:
        lane: Lane = {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in step.lanes[index].items()
        }
        lane["num_target_tokens"] = step.plan.num_target_tokens
        lane["step"] = step.plan.step
        lane["lane"] = self._lanes[index]
        lane["is_last_in_step"] = index == len(self._lanes) - 1
        return lane


def _num_tokens(lane: LaneArrays) -> int:
    bounds = lane["cu_seqlens"]
    assert isinstance(bounds, np.ndarray)
    return int(bounds[-1])
