"""One rank's side of the benchmarks of asynchronous saves: what `RankPool` calls in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpointing.formats import AsyncFormat, Copy, Ours, TorchDcp
from benchmarks.checkpointing.state import training_state
from benchmarks.peers.byte_checkpoint import ByteCheckpoint


class AsyncState:
    """What a rank holds between calls.

    Args:
        num_bytes: of the state, over all ranks if it is cut, else on each.
        shard: cut it over the ranks with FSDP2.
        flat: flatten it and cut that, with FSDP1.
    """

    def __init__(self, num_bytes: int, shard: bool, flat: bool = False) -> None:
        self._state = training_state(num_bytes, shard=shard, flat=flat)
        self.num_bytes = self._state.num_bytes
        self._forms: dict[str, AsyncFormat] = {}
        self.finishing: list[Callable[[], object]] = []

    def form(self, name: str) -> AsyncFormat:
        """A way to save; made when it is first asked for, since some allocate memory."""
        if name not in self._forms:
            match name:
                case "copy into kept memory":
                    self._forms[name] = Copy(self._state, threaded=False)
                case "checkpoint":
                    self._forms[name] = Ours(self._state)
                case "bytecheckpoint":
                    self._forms[name] = ByteCheckpoint(self._state)
                case "torch DCP":
                    self._forms[name] = TorchDcp(self._state)
                case "torch DCP, kept memory":
                    self._forms[name] = TorchDcp(self._state, keep_staging=True)
                case _:
                    raise AssertionError(name)
        return self._forms[name]


def num_bytes(rank: AsyncState) -> int:
    """Bytes of this rank's part of the state."""
    return rank.num_bytes


def begin(rank: AsyncState, form: str, path: Path) -> None:
    """Begin a save; torch's end the process when another is in flight, so they wait for it first, as one has to."""
    if form.startswith("torch DCP"):
        finish(rank)
    rank.finishing.append(rank.form(form).begin(path))


def finish(rank: AsyncState) -> None:
    """Wait for all saves that were begun."""
    for wait in rank.finishing:
        wait()
    rank.finishing.clear()
