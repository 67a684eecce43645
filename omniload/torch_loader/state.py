"""Parts of a saved state: what has one of its own, generators, and how many ranks there are."""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from omniload.errors import StateError


class Stateful(Protocol):
    """A dataset, sampler or iterator of one that knows its own place.

    The protocol of torchdata's StatefulDataLoader: what `load_state_dict` is given holds for the next iteration.
    """

    def state_dict(self) -> Any:
        """Where it stands."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether this has a state. Asked for every batch, for which ``isinstance`` of a protocol is too slow."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def state_of(thing: object) -> Any:
    """A private copy of the state of a dataset, sampler or iterator; None if it has none."""
    return copy.deepcopy(thing.state_dict()) if is_stateful(thing) else None


def pack_generator(generator: torch.Generator) -> str:
    """The state of a generator as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def unpack_generator(generator: torch.Generator, text: str) -> None:
    """Inverse of `pack_generator`.

    Raises:
        StateError: the text is no state of such a generator.
    """
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
        generator.set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise StateError(f"the loader state is damaged: its generator cannot be restored: {reason}") from None


def num_ranks() -> int:
    """Processes of the job, as far as torch knows."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def number(state: Mapping[str, Any], key: str) -> int:
    """A count in a saved state.

    Raises:
        StateError: it is missing, no integer, or negative.
    """
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"the loader state is damaged: '{key}' is {value!r} and not a count")
    return value
