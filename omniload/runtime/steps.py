"""What a runtime hands to the client: finished steps, one after the other, and the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from omniload.constructor import LaneArrays
from omniload.identity import Identity
from omniload.pieces import Failure
from omniload.planner import Plan, StreamState
from omniload.planner.decisions import Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One finished step, as one rank sees it."""

    plan: Plan
    """The plan of the whole step."""
    before: StreamState
    """The stream before it."""
    after: StreamState
    """The stream after it."""
    lanes: list[LaneArrays]
    """This rank's lanes."""
    quarantined: tuple[Failure, ...]
    """Rows that the step consumed and that make no sample."""
    decided: tuple[Decision, ...] = ()
    """What the planner decided by itself about the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of the stream."""

    after: StreamState
    """The stream after its last step."""
    quarantined: tuple[Failure, ...]
    """Rows consumed after the last step that make no sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What is held ready for a rank."""

    steps: int = 0
    """Finished steps."""
    num_bytes: int = 0
    """Bytes of their lanes."""
    fetch_p50_ms: float = math.nan
    """Median time from asking for a step to having it."""


def bytes_of(step: Step) -> int:
    """Host memory of the lanes of a step."""
    return sum(map(bytes_of_lane, step.lanes))


def bytes_of_lane(lane: LaneArrays) -> int:
    """Host memory of a lane."""
    return sum(array.nbytes for array in lane.values() if isinstance(array, np.ndarray))


class Runtime(Protocol):
    """Runs the roles for one rank, from a state on until it is stopped."""

    def ready(self) -> Ready:
        """What is held ready."""

    def next_step(self) -> Step | End | BaseException:
        """The next step, the end of the stream, or what stopped the planning.

        An error is returned and not raised, so that it does not come to hold on to the caller.

        Raises:
            LoaderTimeout: the step was not ready in time.
        """

    def decide(self, decision: Decision) -> None:
        """Let a decision take effect at a step that no planner has begun."""

    def stop(self) -> None:
        """End the planning. Who waits for a step gets `LoaderStopped`."""

    def abandon(self) -> None:
        """End the planning as soon as it is seen, when nobody is left to ask for steps.

        Called where garbage is collected, which may be in any thread and inside of any other call here; so it takes
        no lock that such a call may hold.
        """


class Host(Protocol):
    """Where the source loaders of a job live, and what else is to be asked of them."""

    def identity(self) -> Identity:
        """Digests of everything the stream depends on; may read the ends of files."""

    def urls(self, source: int) -> list[str]:
        """The files of a source."""

    def failures(self) -> list[Failure]:
        """The rows quarantined last."""

    def origins(self, plan: Plan, lane: int) -> pa.Table:
        """Where the tokens of a lane come from; see `MixtureLoader.samples`."""

    def start(self, state: StreamState) -> Runtime:
        """Begin to plan from a state on, and to build this rank's lanes."""

    def close(self) -> None:
        """Let go of what runs outside of this object; `start` brings it back."""
