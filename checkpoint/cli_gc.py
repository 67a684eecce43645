"""``omniload ckpt gc``: list, and if asked remove, what saves that never committed left behind."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from checkpoint.cli_common import show, size_text, user_errors
from checkpoint.cli_leftovers import Leftover, find_leftovers, remove_leftover
from storage import Store


def gc(
    root: Annotated[str, typer.Argument(help="Directory or URL that holds checkpoints.", show_default=False)],
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is left over.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Nobody saves there now: whatever is not committed is left over, however young."
        ),
    ] = False,
) -> None:
    """List what saves that never committed left in a folder of checkpoints.

    Left over is what no manifest names and has not changed for 24 hours.
    Committed checkpoints, what they replaced, and whatever is in doubt stay.
    """
    with user_errors():
        store = Store(root)
        found = find_leftovers(store, time.time(), nobody_saves=force)
        for leftover in found:
            show(_line(leftover))
        goes = [leftover for leftover in found if leftover.kept is None]
        if delete:
            for leftover in goes:
                remove_leftover(store, leftover)
        num_bytes = sum(leftover.num_bytes for leftover in goes)
        verb = "removed" if delete else "left over"
        hint = "; remove with --delete" if goes and not delete else ""
        show(f"{store.url}: {len(goes)} {verb}, {size_text(num_bytes)}{hint}")


def _line(leftover: Leftover) -> str:
    age = "" if leftover.silence_s is None else f", unchanged for {_duration_text(leftover.silence_s)}"
    files = "1 file" if leftover.num_files == 1 else f"{leftover.num_files} files"
    fate = "left over" if leftover.kept is None else f"kept: {leftover.kept}"
    return f"{leftover.path}  {size_text(leftover.num_bytes)} in {files}{age}  {fate}"


def _duration_text(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(seconds, 0):.0f} seconds"
