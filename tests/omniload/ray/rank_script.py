"""A rank of a job, as a training script would be: says which step it is at, and what ended it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ray

from omniload import DataLoader
from tests.omniload.ray.jobs import digest, start_ray


def say(**said: Any) -> None:
    """A line that the test reads."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class Checkpoints:
    """Of a trainer that keeps in its state what it was trained on; every few steps one is committed, if any is.

    Args:
        orders: ``every`` so many steps, in which ``folder``.
        loader: goes on from the newest.
    """

    def __init__(self, orders: dict[str, Any], loader: Any) -> None:
        self._every = orders.get("every")
        self._folder = Path(orders.get("folder", "."))
        self._loader = loader
        self._digests: list[str] = []
        if self._every is not None and (kept := sorted(self._folder.glob("step-*.json"))):
            saved = json.loads(kept[-1].read_text())
            loader.load_state_dict(saved["loader"])
            self._digests = saved["trained"]

    def trained(self, group: list[dict[str, Any]]) -> None:
        """A step is trained on."""
        if self._every is None:
            return
        self._digests += map(digest, group)
        step = group[0]["step"] + 1
        if step % self._every == 0:
            saved = {"step": step, "loader": self._loader.state_dict(), "trained": self._digests}
            written = self._folder / "new"
            written.write_text(json.dumps(saved))
            written.replace(self._folder / f"step-{step:06}.json")


def train(orders: dict[str, Any], rank: int, size: int) -> None:
    """Take the steps of a loader, slowly."""
    loader = DataLoader(orders["mixture"], execution="ray", dp_rank=rank, dp_size=size, **orders["keys"])
    say(session=ray._private.worker._global_node.get_session_dir_path())
    if rank == 0 and orders.get("forks"):
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        say(child=child)
    checkpoints = Checkpoints(orders, loader)
    for group in itertools.islice(loader.steps(), orders.get("takes")):
        say(step=group[0]["step"])
        time.sleep(orders["step_s"])
        checkpoints.trained(group)
    if orders.get("then") == "closes it":
        loader.close()
    if orders.get("then") == "keeps it":
        _kept.append(loader)


_kept: list[Any] = []


def main(orders: dict[str, Any]) -> None:
    """Train, with so many ``loaders`` one after the other, then do other work for ``works_s``.

    In ``orders``, besides: ``starts_ray`` before, if this is rank 0; ``forks`` a child that sleeps, likewise; of each
    loader ``takes`` so many steps, ``then`` "closes it" or "keeps it", or else it is collected; is ``careless`` about
    errors.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank == 0 and orders.get("starts_ray"):
        start_ray()
    try:
        for _ in range(orders.get("loaders", 1)):
            train(orders, rank, size)
        say(trained=True)
        time.sleep(orders.get("works_s", 0.0))
    except Exception as error:
        say(error=type(error).__name__, message=str(error))
        if orders.get("careless"):
            raise
        traceback.print_exc()
        sys.exit(3)
    say(done=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
