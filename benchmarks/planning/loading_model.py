"""A model of loading beside training: sources of very different cost, ways to read them, and the steps that result.

What is simulated: each step's samples are those of its real plan, and each has a processor time by its kind, its tokens
and its patches, times a log-normal factor of its own. An actor, or a worker of a rank, prepares its part of every step
in turn, at most `DEPTH` steps ahead of the trainer; a step begins when the one before is over and all its parts are
there. All ways have the same `CPUS`. A step's computing takes the time of 1F1B on the costs of its lanes, by FLOPs.

What is not: storage, which is as fast as it has to be; the network; the constructors, which all ways have alike; and
that the readers of a source, which take windows in turn, may for a moment be less even than their number says.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.planning.lengths import heavy_tailed, with_clips, with_images
from benchmarks.planning.metadata import SyntheticMetadata
from benchmarks.planning.multimodal import IMAGES
from omniload.forecasting.evenness import Evenness
from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.placing import ClientPlaceTree
from omniload.planner import Planner, StreamState
from omniload.planner.costs.flops import FLOPS_UNIT
from omniload.scaling import (
    ActorLimits,
    ActorSpec,
    Budget,
    Observation,
    Outlook,
    Scaler,
    ScalerStart,
    SourceLoad,
    SourceProfile,
    outlook,
    partition,
    step_tokens,
)

CONTEXT, LANES = 8192, 64
MESH = ClientPlaceTree.of({"pp": 4, "dp": 8})
"""32 accelerators."""
FLOPS_PER_S = 400e12
"""Of one; a step is one forward pass and a backward pass of twice its FLOPs."""
CPUS = 16
"""Processors for loading: two for each data-parallel rank."""
DEPTH = 2
"""Steps that are prepared ahead."""
SIGMA = 0.5
"""Of the logarithm of a sample's own factor, whose mean is 1."""
AHEAD, START_STEPS = 16, 4
"""Steps looked ahead on the schedule, and steps until an actor that is started helps."""
BUDGET = Budget(cpus=CPUS, memory_bytes=64 << 30)
_BASE_BYTES = ActorLimits().base_bytes
_CHUNK = 1024
_BLOCKS_PER_FILE = 16  # of `SyntheticMetadata`
_SAMPLED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Sources that are alike."""

    name: str
    """What they are called."""
    count: int
    """How many; the weight of each is the kind's by 1 / (1 + number)."""
    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    """Tokens and patches of samples."""
    s_per_token: float
    """Processor seconds for a token."""
    s_per_patch: float
    """Processor seconds for a patch of 14 × 14 pixels."""
    resident_bytes: int
    """Window and buffer of one reader."""
    weights: tuple[float, float]
    """Of all of them together, before and after the shift."""


def _text(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    return heavy_tailed(generator, count, CONTEXT), np.zeros(count, np.int64)


KINDS = (
    Kind(
        name="text",
        count=16,
        draw=_text,
        s_per_token=0.8e-6,
        s_per_patch=0,
        resident_bytes=32 << 20,
        weights=(0.70, 0.30),
    ),
    Kind(
        name="image",
        count=12,
        draw=lambda generator, count: with_images(generator, count, CONTEXT),
        s_per_token=0.8e-6,
        s_per_patch=6e-6,
        resident_bytes=192 << 20,
        weights=(0.25, 0.40),
    ),
    Kind(
        name="video",
        count=4,
        draw=lambda generator, count: with_clips(generator, count, CONTEXT),
        s_per_token=0.8e-6,
        s_per_patch=75e-6,
        resident_bytes=512 << 20,
        weights=(0.05, 0.30),
    ),
)
"""Text is tokenised at 1.25 M tokens/s, and an image of 1,600 patches decoded and cut in 10 ms, as measured here on one
core. A frame of a video has 1,024 patches, and for each that is kept 30 are decoded, at 400 a second. Memory is
assumed."""

SOURCES = {f"{kind.name}{i:02}": kind for kind in KINDS for i in range(kind.count)}
NAMES = sorted(SOURCES)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Metadata:
    """Samples of every source, by its kind."""

    kinds: tuple[SyntheticMetadata, ...]

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        return self.kinds[source].read(source, cursor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step takes."""

    compute_s: float
    """Of the trainer."""
    tokens: np.ndarray
    """``int64[sources]``."""
    cpu_s: np.ndarray
    """``float64[sources]`` to prepare its samples."""
    of_rank: np.ndarray
    """``float64[dp]``: the same, by the data-parallel rank that trains on them."""
    look: Outlook
    """Ahead of it."""


def _mixture(num_steps: int, **keys: object) -> Mixture:
    def weights(phase: int) -> dict[str, float]:
        return {
            name: kind.weights[phase] / (1 + int(name[-2:])) / sum(1 / (1 + i) for i in range(kind.count))
            for name, kind in SOURCES.items()
        }

    return Mixture.load(
        {
            "seq_len": CONTEXT,
            "packs": LANES,
            "lanes": LANES,
            "cost": IMAGES.model,
            "sources": {
                name: {"path": "nowhere", "weight": weight, "on_exhausted": "repeat"}
                for name, weight in weights(0).items()
            },
            "schedule": [{"step": 0}, {"step": num_steps // 2, "weights": weights(1)}],
            **keys,
        }
    )


@functools.cache
def profiles() -> tuple[SourceProfile, ...]:
    """Those of one reader on one processor, of samples that no step has."""
    found = []
    for name in NAMES:
        kind = SOURCES[name]
        tokens, patches = kind.draw(np.random.default_rng(2**31), _SAMPLED)
        seconds = float((tokens * kind.s_per_token + patches * kind.s_per_patch).mean())
        found.append(
            SourceProfile(
                name=name,
                tokens_per_s=float(tokens.mean()) / seconds,
                samples_per_s=1 / seconds,
                prepare_s_per_sample=seconds,
                bytes_per_sample=float(2 * tokens.mean() + 3 * 14 * 14 * patches.mean()),
                resident_bytes=kind.resident_bytes,
                open_s=0.0,
            )
        )
    return tuple(found)


@functools.cache
def steps_of(number: int, num_steps: int, strategy: str | None) -> tuple[Step, ...]:
    """Plan the steps, which are of the same packs by any strategy that only deals them.

    Args:
        number: another draws other samples and costs.
        num_steps: how many; at half of them the mixture shifts.
        strategy: in place of even costs of decoder and encoder.
    """
    spec = _mixture(num_steps, **({"strategy": strategy} if strategy else {"balance": "hybrid"}))
    kinds = tuple(
        SyntheticMetadata(draw=SOURCES[name].draw, seq_len=CONTEXT, seed=number, chunk_samples=_CHUNK)
        for name in NAMES
    )
    planner = Planner(spec, _Metadata(kinds=kinds), StreamState.initial(len(NAMES)))
    steps = []
    for _ in range(num_steps):
        look = outlook(spec, planner.state, profiles(), steps=AHEAD)
        plan = planner.next()
        assert plan is not None, "the sources have no end"
        time = Evenness.of_step(plan.lane_costs, MESH).time
        cpu_s = _cpu_s(plan.pieces, number)
        lane_ends = plan.offsets[plan.lane_offsets[1:]]
        lane = np.searchsorted(lane_ends, np.arange(len(plan.pieces)), side="right")
        source = plan.pieces["source"]
        steps.append(
            Step(
                compute_s=3 * time * FLOPS_UNIT / FLOPS_PER_S,
                tokens=np.bincount(source, plan.pieces["length"], len(NAMES)).astype(np.int64),
                cpu_s=np.bincount(source, cpu_s, len(NAMES)),
                of_rank=np.bincount(lane % MESH.dp_size, cpu_s, MESH.dp_size),
                look=look,
            )
        )
    return tuple(steps)


def _cpu_s(pieces: np.ndarray, number: int) -> np.ndarray:
    """``float64[n]``: processor seconds of ``PIECE[n]``, each of which is a whole sample."""
    seconds = np.zeros(len(pieces))
    window = pieces["file"].astype(np.int64) * _BLOCKS_PER_FILE + pieces["block"]
    for source, of_window in np.unique(np.stack([pieces["source"], window]), axis=1).T.tolist():
        here = np.flatnonzero((pieces["source"] == source) & (window == of_window))
        kind = SOURCES[NAMES[source]]
        some = pieces[here]
        factor = np.random.default_rng([number, source, of_window, 1]).lognormal(
            -(SIGMA**2) / 2, SIGMA, _CHUNK
        )
        seconds[here] = factor[some["row"]] * (
            some["length"] * kind.s_per_token + some["patches"] * kind.s_per_patch
        )
    return seconds


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The trainer, and who prepares what for it."""

    now: float = 0.0
    """When the last step was over."""
    _done: dict[Hashable, float] = field(default_factory=dict)
    _began: deque[float] = field(default_factory=lambda: deque([0.0] * DEPTH, maxlen=DEPTH))

    def step(self, busy_s: Mapping[Hashable, float], compute_s: float) -> tuple[float, dict[Hashable, float]]:
        """Run a step.

        Args:
            busy_s: how long each of those that prepare a part of it is busy with that.
            compute_s: how long it takes then.

        Returns:
            How long the trainer waited for it, and for each of them.
        """
        # There is room for it once the step before those that are held ready was begun.
        room = self._began[0]
        self._done = {who: max(self._done.get(who, 0.0), room) + busy for who, busy in busy_s.items()}
        late = {who: max(0.0, done - self.now) for who, done in self._done.items()}
        began = self.now + max(late.values())
        self._began.append(began)
        self.now = began + compute_s
        return max(late.values()), late


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a way to load."""

    iteration_s: float
    """Time of a step on average."""
    memory_bytes: int
    """Of all that read, at most."""
    num_actors: int
    """Processes that read, at most."""


def in_each_rank(steps: Sequence[Step]) -> Outcome:
    """A loader in every data-parallel rank, of `CPUS` workers in all, each of which has all sources open."""
    trainer, workers = Trainer(), CPUS // MESH.dp_size
    for step in steps:
        trainer.step(dict(enumerate((step.of_rank / workers).tolist())), step.compute_s)
    resident = sum(kind.resident_bytes for kind in SOURCES.values())
    return _outcome(trainer, steps, CPUS * (_BASE_BYTES + resident), CPUS)


def alike(steps: Sequence[Step], *, actors_each: int | None = None) -> Outcome:
    """The same number of actors for every source, whatever it costs.

    Args:
        steps: to run.
        actors_each: how many; None for as many as the source that needs most of them needs after the shift.
    """
    if actors_each is None:
        plenty = Budget(cpus=1e9, memory_bytes=1 << 60)
        later = steps[len(steps) // 2 :]
        demand = sum(step.tokens.sum() for step in later) / sum(step.compute_s for step in later)
        needed = partition(profiles(), steps[-1].look.now, float(demand), plenty).num_actors()
        actors_each = max(needed.values())
    trainer = Trainer()
    for step in steps:
        busy: dict[Hashable, float] = dict(enumerate((step.cpu_s / actors_each).tolist()))
        trainer.step(busy | {"processors": float(step.cpu_s.sum()) / CPUS}, step.compute_s)
    memory = sum(_BASE_BYTES + kind.resident_bytes for kind in SOURCES.values())
    return _outcome(trainer, steps, actors_each * memory, actors_each * len(SOURCES))


def scaled(steps: Sequence[Step], *, follow: bool) -> Outcome:
    """Actors by `partition`, for the first steps.

    Args:
        steps: to run.
        follow: whether a `Scaler` then follows the mixture.
    """
    first = steps[0]
    demand = step_tokens(_mixture(len(steps))) / first.compute_s
    plan = partition(profiles(), first.look.ahead, demand, BUDGET)
    start = ScalerStart(profiles=profiles(), shares=first.look.ahead, partition=plan, budget=BUDGET)
    scaler, trainer = Scaler(start), Trainer()
    starting = deque([plan.actors] * (START_STEPS + 1), maxlen=START_STEPS + 1)
    memory = num_actors = 0
    for number, step in enumerate(steps):
        actors = starting[0]
        before = trainer.now
        stalled, late = trainer.step(_busy(actors, step), step.compute_s)
        if follow:
            waited = dict.fromkeys(NAMES, 0.0)
            for actor in actors:
                for reader in actor.readers:
                    waited[reader.source] = max(waited[reader.source], late[actor.name])
            loads = {
                name: SourceLoad(tokens=int(tokens), waited_s=waited[name], ahead=step.look.ahead[name])
                for name, tokens in zip(NAMES, step.tokens, strict=True)
            }
            scaler.observe(
                number + 1, Observation(seconds=trainer.now - before, stalled_s=stalled, sources=loads)
            )
        starting.append(scaler.actors)
        # Actors that go are there until those that come have started.
        memory = max(memory, *(sum(actor.memory_bytes for actor in some) for some in starting))
        num_actors = max(num_actors, *map(len, starting))
    return _outcome(trainer, steps, memory, num_actors)


def even(steps: Sequence[Step]) -> Outcome:
    """What no loading can be better than: steps never wait, and one process has each source open once."""
    trainer = Trainer()
    for step in steps:
        trainer.step({"nobody": 0.0}, step.compute_s)
    return _outcome(trainer, steps, _BASE_BYTES + sum(kind.resident_bytes for kind in SOURCES.values()), 1)


def _busy(actors: Sequence[ActorSpec], step: Step) -> dict[Hashable, float]:
    """An actor is as busy as its longest reader, or as its workers are with all of them."""
    cpu_s = dict(zip(NAMES, step.cpu_s.tolist(), strict=True))
    busy: dict[Hashable, float] = {"processors": float(step.cpu_s.sum()) / CPUS}
    for actor in actors:
        parts = [cpu_s[reader.source] / reader.of for reader in actor.readers]
        busy[actor.name] = max(max(parts), sum(parts) / actor.workers)
    return busy


def _outcome(trainer: Trainer, steps: Sequence[Step], memory: int, num_actors: int) -> Outcome:
    return Outcome(iteration_s=trainer.now / len(steps), memory_bytes=memory, num_actors=num_actors)
