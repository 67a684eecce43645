"""Launches the trainer under `torchrun`, watches it, and makes sure that it ends."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from training.demo.errors import RunError, RunTimeoutError
from training.demo.logs import num_steps_logged
from training.demo.plan import Family, RunPlan

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
"""The trainer's configuration; a run only overrides what makes it different."""
OUTPUT = "output.log"
"""Name of the file in a run's directory that has what its ranks printed."""

_POLL_S = 0.1
_TAIL_LINES = 20
_LAUNCHER_LINE = re.compile(r"[WE]\d{4} .*/torch/distributed/elastic/")
# The launcher gives its workers 30 s between SIGTERM and SIGKILL.
_STOP_GRACE_S = 45.0


def launch(
    plan: RunPlan,
    family: Family,
    *,
    directory: Path,
    mixture: Path,
    resume: Path | None,
    steps: range,
    timeout_s: float,
    on_progress: Callable[[int], None],
) -> float:
    """Runs the trainer to its planned end.

    Args:
        plan: What to launch.
        family: The training it is a part of.
        directory: Where it writes, its terminal output included (`OUTPUT`); created.
        mixture: The mixture file.
        resume: The checkpoint to start from; None to start afresh.
        steps: The steps it will do.
        timeout_s: Longest time to wait, in seconds.
        on_progress: Told the number of steps logged, every time it has changed.

    Returns:
        Wall-clock time from launch to exit, in seconds.

    Raises:
        RunError: The run failed, or was to be killed and was not.
        RunTimeoutError: It did not end in time; all its processes are gone.
    """
    directory.mkdir(parents=True)
    settings = [
        f"out={json.dumps(str(directory))}",  # JSON strings are YAML strings, whatever a path contains
        f"mixture={json.dumps(str(mixture))}",
        f"dtype={family.dtype}",
        f"steps={family.steps}",
        f"checkpoint_every={family.checkpoint_every}",
        f"parallel.tp={plan.layout.tp}",
        f"resume={json.dumps(str(resume)) if resume is not None else 'none'}",
        f"timeout_s={timeout_s}",
        *plan.overrides,
    ]
    if plan.kill_after is not None:
        settings.append(f"faults.kill_after_step={plan.kill_after - 1}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *torchrun,
        f"--nproc-per-node={plan.layout.world_size}",
        "-m",
        "training",
        "--config",
        str(CONFIG),
    ]
    start = time.monotonic()
    output = directory / OUTPUT
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *settings], stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            _watch(process, plan, directory, start + timeout_s, on_progress)
        finally:
            _stop(process)
    failure = _failure(plan, process.returncode, num_steps_logged(directory), len(steps))
    if failure:
        raise RunError(f"run {plan.name} {failure}; the end of {output}:\n{_tail(output)}")
    return time.monotonic() - start


def _watch(
    process: subprocess.Popen[bytes],
    plan: RunPlan,
    directory: Path,
    deadline: float,
    on_progress: Callable[[int], None],
) -> None:
    """Returns when the process has ended."""
    logged = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RunTimeoutError(
                f"run {plan.name} had logged {logged} steps at its time limit; the end of "
                f"{directory / OUTPUT}:\n{_tail(directory / OUTPUT)}"
            )
        time.sleep(_POLL_S)
        if (now := num_steps_logged(directory)) != logged:
            logged = now
            on_progress(logged)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher if it still runs; it ends its workers."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(plan: RunPlan, code: int, num_logged: int, num_steps: int) -> str:
    """What is wrong with how a run ended; empty if it is as planned."""
    if plan.kill_after is None:
        return f"exited with code {code}" if code != 0 else ""
    if code == 0:
        return "ended although it was to be killed"
    return (
        f"ended after {num_logged} of {num_steps} steps, before it was to be killed"
        if num_logged < num_steps
        else ""
    )


def _tail(output: Path) -> str:
    """The last lines that the ranks wrote; what the launcher adds about processes that ended is left out."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    own = list(itertools.takewhile(lambda line: not _LAUNCHER_LINE.match(line), lines))
    return "\n".join(own[-_TAIL_LINES:])
