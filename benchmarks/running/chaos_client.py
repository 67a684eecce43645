"""One rank of a job under chaos: takes its steps, writes down what it got, and goes on from its state if it died."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a rank is to do."""

    address: str
    """Of the cluster."""
    node_dir: str
    """Folder of the node that it is to run on, which tells it from the others of this machine."""
    job: str
    """Name of the job."""
    mixture: dict[str, Any]
    """What to load."""
    ray: dict[str, Any]
    """How Ray hosts the roles."""
    rank: int
    """Which of them it is."""
    world_size: int
    """Number of ranks."""
    run: int
    """Counts how often it was started."""
    step_s: float
    """How long it trains on a step."""
    timeout_s: float
    """Limit of every wait."""
    folder: str
    """For what it writes: ``<rank>.jsonl``, a line for each step, and ``<rank>.state.json``."""

    def to_json(self) -> str:
        """As text, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def digest(lane: dict[str, Any]) -> str:
    """Digest of everything in a lane but what depends on the number of ranks."""
    found = hashlib.sha256()
    for key in sorted(lane.keys() - {"is_last_in_step"}):
        value = lane[key]
        if hasattr(value, "numpy"):
            value = np.ascontiguousarray(value.numpy())
            found.update(f"{key} {value.dtype} {value.shape}".encode())
            found.update(value.tobytes())
        else:
            found.update(f"{key} {value!r}".encode())
    return found.hexdigest()


def main(orders: Orders) -> None:
    """Take all steps that are left."""
    import ray

    from omniload import DataLoader

    ray.init(
        orders.address,
        _temp_dir=orders.node_dir,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    folder = Path(orders.folder)
    state = folder / f"{orders.rank}.state.json"
    with (
        (folder / f"{orders.rank}.jsonl").open("a", buffering=1) as log,
        DataLoader(
            orders.mixture,
            execution="ray",
            ray={"job": orders.job, **orders.ray},
            dp_rank=orders.rank,
            dp_size=orders.world_size,
            timeout_s=orders.timeout_s,
        ) as loader,
    ):
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for group in loader.steps():
            said = {
                "run": orders.run,
                "at": time.time(),
                "step": group[0]["step"],
                "lanes": {lane["lane"]: digest(lane) for lane in group},
            }
            log.write(json.dumps(said) + "\n")
            time.sleep(orders.step_s)
            written = state.with_suffix(".new")
            written.write_text(json.dumps(loader.state_dict()))
            written.replace(state)
    (folder / f"{orders.rank}.end").touch()
    # All is written; a cluster that loses a node at this moment must not turn that into a failure.
    os._exit(0)


if __name__ == "__main__":
    main(Orders.from_json(sys.argv[1]))
