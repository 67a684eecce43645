"""A vision-language model: its encoder beside the lanes that hold the images, or spread over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.planning.lengths import with_clips, with_images
from benchmarks.planning.metadata import SyntheticMetadata, mixture
from omniload.placing import ClientPlaceTree, assign_encoders
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.costs import MixedCost, cost_model
from omniload.planner.pipeline import simulated_time

_BACKBONE = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 13_824,
    "vocab_size": 128_256,
}
_ENCODER = {"hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 8192}
# A patch sees those of its image: 1,600, as many as an image has in the middle.
_BY_IMAGE = {"block": 1600, "num_block_layers": 40}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What the model is trained on."""

    name: str
    """What it is called."""
    draw: Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]
    """Tokens and patches of samples, for a generator, their number, and the context."""
    encoder: Mapping[str, int] = field(hash=False)
    """The encoder's sizes."""

    @property
    def model(self) -> dict[str, Mapping[str, int]]:
        """About 12 billion parameters of decoder and 2 billion of encoder."""
        return {"backbone": _BACKBONE, "image": self.encoder}


IMAGES = Corpus(name="images", draw=with_images, encoder=_ENCODER | _BY_IMAGE)
"""Several images a sample, of usual sizes."""
CLIPS = Corpus(name="clips", draw=with_clips, encoder=_ENCODER)
"""One of any size, whose patches all see each other."""

MESH = ClientPlaceTree.of({"pp": 4, "dp": 16})
"""64 ranks."""
LANES = 8 * MESH.dp_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to run a step."""

    name: str
    """What it is called."""
    strategy: str | None
    """In place of what the mixture would do."""
    balance: str = "lpt"
    """How packs are given to lanes."""
    spread: bool
    """Whether the encoder's work is divided over all ranks, and not done where the lane is."""


@functools.cache
def time_per_token(corpus: Corpus, way: Way, context: int, steps: int, number: int) -> float:
    """Simulated time of a step, in the unit of the costs, by its tokens.

    Where the encoder is beside the lanes, it is a part of the first stage of their pipeline. Where it is spread over
    all ranks, these encode the images of the whole step first, each its share, and the pipeline has the backbone only.
    The exchange in between costs nothing here.

    Args:
        corpus: what is trained on.
        way: how it is run.
        context: tokens of a pack; a lane is one.
        steps: how many to plan; the first is not counted.
        number: another draws other samples.
    """
    spec = mixture(
        seq_len=context,
        packs=LANES,
        lanes=LANES,
        balance=way.balance,
        strategy=way.strategy,
        cost=corpus.model,
    )
    metadata = SyntheticMetadata(
        draw=lambda generator, count: corpus.draw(generator, count, context),
        seq_len=context,
        seed=number,
        chunk_samples=8192,
    )
    planner = Planner(spec, metadata, StreamState.initial(1))
    model = cost_model(corpus.model)
    assert isinstance(model, MixedCost)
    planned = (planner.next() for _ in range(steps))
    plans = [plan for plan in planned if plan is not None and plan.step > 0]
    tokens = sum(int(plan.pieces["length"].sum(dtype=np.int64)) for plan in plans)
    return sum(_time(plan, model, spread=way.spread) for plan in plans) / tokens


def _time(plan: Plan, model: MixedCost, *, spread: bool) -> float:
    units = (plan.pieces[name].astype(np.int64) for name in ("length", "patches", "frames"))
    cost = model.cost(*units)
    of_lane = np.add.reduceat(cost, plan.offsets[plan.lane_offsets[:-1]], axis=1)
    backbone, encoder = (
        of_lane.astype(np.float64).reshape(2, -1, MESH.dp_size).swapaxes(1, 2)
    )  # [dp, microbatches]
    num_stages = MESH.num_buckets("pp")
    stage = backbone / num_stages
    if not spread:
        return float(simulated_time(stage, num_stages - 1, encoder=encoder + stage).max())
    return _most_encoded(plan, cost[1]) + float(simulated_time(stage, num_stages).max())


def _most_encoded(plan: Plan, cost: np.ndarray) -> float:
    """What the rank that encodes most has to do."""
    lane = np.searchsorted(plan.offsets[plan.lane_offsets], np.arange(len(cost)), side="right") - 1
    home = MESH.fetchers(("pp",))[lane % MESH.dp_size]
    some = np.flatnonzero(plan.pieces["patches"])
    rows = plan.pieces["patches"][some].astype(np.int64) // 4
    rank = assign_encoders(cost[some], rows, home[some], num_ranks=MESH.world_size)
    return float(np.bincount(rank, cost[some], MESH.world_size).max())
