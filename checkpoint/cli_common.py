"""What the commands of ``omniload ckpt`` share: one-line errors, progress, text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from checkpoint.errors import CheckpointError
from storage.errors import BadRequest, StorageError

EXIT_USER_ERROR: Final = 2

PathArgument = Annotated[str, typer.Argument(help="Directory or URL of a checkpoint.", show_default=False)]


@contextmanager
def user_errors() -> Iterator[None]:
    """One line on stderr and exit code 2 for whatever the user can mend."""
    try:
        yield
    except (CheckpointError, StorageError, BadRequest) as error:
        show_error(error)
        raise typer.Exit(EXIT_USER_ERROR) from None


def show_error(error: object) -> None:
    """Print one line on stderr."""
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)


@contextmanager
def progress_bar(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; gives what to call with the bytes done since the last call."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda done: bar.advance(task, done)


def show(text: str) -> None:
    """Print text on stdout; what its encoding lacks, such as names that are no UTF-8, in escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))


def console(*, soft_wrap: bool = False) -> Console:
    """A console on stdout that prints names as they are, and what the encoding lacks in escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)


def size_text(num_bytes: int) -> str:
    """A size for people, in decimal units."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
