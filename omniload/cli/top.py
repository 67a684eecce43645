"""``omniload top``: how a running job is doing."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from omniload.errors import JobNotFound, OmniloadError
from omniload.observing.job_dir import Published, list_jobs, read, runtime_dir
from omniload.observing.screen import JobScreen
from omniload.observing.stats import to_json

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0
_MOST_NAMED = 5
_WIDE = 1000


def top(
    job: Annotated[
        str | None,
        typer.Argument(
            help="The job's name; not needed if one is running.", metavar="JOB", show_default=False
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once and end; exit code 1 if the numbers are stale.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object instead, a line each.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a job that runs on this machine: stalls and imbalance, its actors, sources and ranks, the worst first.

    Ends with the job, or by Ctrl-C. Jobs are found in $OMNILOAD_RUNTIME_DIR or the folder for temporary files.
    """
    if not _SHORTEST_S <= interval <= _LONGEST_S:
        raise OmniloadError(f"--interval: {interval:g} is not in {_SHORTEST_S:g}..{_LONGEST_S:g} seconds")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
    found = _only() if job is None else read(job)
    if once:
        _show(_console(), found, as_json)
        if found.stale:
            raise typer.Exit(1)
        return
    with suppress(KeyboardInterrupt):  # the way to end it
        _watch(found, interval, as_json)


def _console() -> Console:
    console = Console()
    # In a file there is room for everything, and rich would leave out what does not fit a terminal.
    is_wide = not console.is_terminal and "COLUMNS" not in os.environ
    return Console(width=_WIDE) if is_wide else console


def _only() -> Published:
    """The job that runs here."""
    jobs = list_jobs()
    running = [one for one in jobs if not one.stale]
    if len(running) == 1:
        return running[0]
    if running:
        names = ", ".join(one.stats.job for one in running)
        raise OmniloadError(f"JOB: {len(running)} jobs are running, {names}; name one")
    stale = "".join(f"; '{one.stats.job}' was, but {one.stale}" for one in jobs[:_MOST_NAMED])
    raise JobNotFound(f"JOB: none is running according to {runtime_dir()}{stale}")


def _watch(found: Published, interval_s: float, as_json: bool) -> None:
    from rich.live import Live

    console = _console()
    looks = _looks(found, interval_s)
    if as_json or not console.is_interactive:  # a pipe, or a terminal that cannot go back
        for found in looks:
            _show(console, found, as_json)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the terminal is left without a cursor
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for found in looks:
                live.update(JobScreen(found), refresh=True)
    finally:
        console.print(JobScreen(found))  # what was on the screen is gone with it


def _looks(found: Published, interval_s: float) -> Iterator[Published]:
    """A job again and again, until it has ended or its process is gone."""
    job = found.stats.job
    while not found.gone:
        yield found
        time.sleep(interval_s)
        try:
            found = read(job)
        except JobNotFound:
            return
    yield found


def _show(console: Console, found: Published, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({**to_json(found.stats), "stale": found.stale}) + "\n")
        sys.stdout.flush()
    else:
        console.print(JobScreen(found))
