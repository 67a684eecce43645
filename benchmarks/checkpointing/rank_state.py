"""One rank's side of the FSDP benchmark: its part of the state, and the formats by name.

The functions are what `benchmarks.checkpointing.ranks.RankPool` calls in the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from benchmarks.checkpointing.formats import AsyncFormat, Copy, Format, Ours, Raw, TorchDcp
from benchmarks.checkpointing.state import training_state


class RankState:
    """What a rank holds between calls.

    Args:
        num_bytes: of the state over all ranks.
    """

    def __init__(self, num_bytes: int) -> None:
        state = training_state(num_bytes, shard=True)
        self.num_bytes = state.num_bytes
        ours, dcp = Ours(state), TorchDcp(state)
        raw = {"raw": Raw(state, hashed=False), "raw + xxh3": Raw(state, hashed=True)}
        self.formats: dict[str, Format] = {"ours": ours, "dcp": dcp, **raw}
        self.async_formats: dict[str, AsyncFormat] = {
            "copy": Copy(state, threaded=False),
            "ours": ours,
            "dcp": dcp,
            "dcp, kept memory": TorchDcp(state, keep_staging=True),
        }
        self.own_file = raw.keys()
        self.finish: Callable[[], object] | None = None

    def path(self, form: str, path: Path) -> Path:
        """Where a format puts what this rank saves: the raw ones know nothing of other ranks."""
        return path.with_name(f"{path.name}-{dist.get_rank()}") if form in self.own_file else path


class Saving(Protocol):
    """What a rank holds that saves asynchronously."""

    num_bytes: int
    async_formats: dict[str, AsyncFormat]
    finish: Callable[[], object] | None


def num_bytes(rank: Saving) -> int:
    """Bytes of this rank's part of the state."""
    return rank.num_bytes


def save(rank: RankState, form: str, path: Path) -> None:
    """Save and wait until it is durable."""
    rank.formats[form].save(rank.path(form, path))


def load(rank: RankState, form: str, path: Path) -> None:
    """Load what `save` saved."""
    rank.formats[form].load(rank.path(form, path))


def begin(rank: Saving, form: str, path: Path) -> None:
    """Begin an asynchronous save."""
    assert rank.finish is None, "one save at a time"
    rank.finish = rank.async_formats[form].begin(path)


def finish(rank: Saving) -> None:
    """Wait for the save that `begin` began."""
    assert rank.finish is not None, "begin comes first"
    rank.finish()
    rank.finish = None
