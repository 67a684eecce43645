"""A rank that trains by sleeping, and tells how long it waited for each step; without torch."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from omniload.errors import LoaderStopped
from omniload.mixture import Mixture
from omniload.observing.stats import ClientStats
from omniload.place import Place
from omniload.planner import StreamState
from omniload.runtime.inline import InlineHost
from omniload.runtime.options import Settings
from omniload.runtime.steps import Step

_WARM_UP_STEPS = 3
"""Not counted: actors start, files are opened."""


class _Silent:
    """In place of a loader: the host asks how it is, and there is nobody to tell."""

    def stats(self) -> ClientStats:
        raise LoaderStopped("nothing to tell")


def main() -> None:
    """Train as the JSON on the command line says; JSON on stdout: seconds waited for each step."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    mixture = Mixture.load(job["mixture"])
    settings = Settings(
        split="train",
        prefetch_steps=job.get("prefetch_steps", 2),
        buffer_bytes=64 << 20,
        timeout_s=280,
        derived=("targets", "position_ids", "segment_ids"),
        chaos=None,
    )
    place = Place(dp_rank=job["rank"], dp_size=job["ranks"])
    state = StreamState.initial(len(mixture.names))
    silent = _Silent()
    if job["execution"] == "ray":
        from omniload.runtime.ray.host import RayHost

        host: Any = RayHost(mixture, place, settings, silent.stats)
    else:
        host = InlineHost.open(mixture, place.lanes_of(mixture), settings)
    runtime = host.start(state)
    waited = []
    for _ in range(job["steps"] + _WARM_UP_STEPS):
        began = time.perf_counter()
        step = runtime.next_step()
        waited.append(time.perf_counter() - began)
        if not isinstance(step, Step):
            raise step if isinstance(step, BaseException) else RuntimeError("the stream ended too soon")
        time.sleep(job["step_s"])
    host.identity()  # as for a state
    print(json.dumps(waited[_WARM_UP_STEPS:]), flush=True)  # noqa: T201  # read by who measures
    sys.stdin.read()
    runtime.stop()
    host.close()


if __name__ == "__main__":
    main()
