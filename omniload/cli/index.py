"""``omniload data index``: prepare files for being entered in the middle."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from omniload.errors import MixtureError, OmniloadError
from omniload.mixture import Mixture
from omniload.sources import Listing
from omniload.sources.indexing import Outcome, index_file
from omniload.sources.listing import list_files

_THREADS = min(16, 4 * (os.cpu_count() or 1))
_MIXTURE_ENDINGS = (".yaml", ".yml")


def index(
    what: Annotated[
        str, typer.Argument(help="A mixture's YAML file, or the path of a source.", metavar="MIXTURE_OR_PATH")
    ],
    overrides: Annotated[
        list[str],
        typer.Argument(help="Keys that replace the mixture's.", metavar="KEY=VALUE", show_default=False),
    ] = [],  # noqa: B006 - typer makes a new one
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            help="Also replace compressed files by ones of the same content that can be entered in the middle:"
            " verified, then renamed. Do it before a run; for a run that began the data have changed.",
        ),
    ] = False,
) -> None:
    """Build what the files of sources need to be entered in the middle: indices of tar files, kept beside them."""
    counts: Counter[tuple[str, str, Outcome]] = Counter()
    failures: list[str] = []
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(_THREADS) as threads:
        jobs: dict[Future[Outcome], tuple[str, str, TaskID]] = {}
        try:
            seen: set[str] = set()  # sources may share files
            for name, format_name, listing in _sources(what, overrides):
                files = [file for file, entry in enumerate(listing.files) if entry.url not in seen]
                seen.update(entry.url for entry in listing.files)
                task = progress.add_task(escape(name), total=len(files))
                for file in files:
                    job = threads.submit(index_file, format_name, listing, file, may_rewrite=rewrite)
                    jobs[job] = name, format_name, task
            for job in as_completed(jobs):
                name, format_name, task = jobs[job]
                try:
                    counts[name, format_name, job.result()] += 1
                except (OmniloadError, OSError) as error:
                    failures.append(" ".join(str(error).split()))
                progress.advance(task)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # what is queued would be done first otherwise
            raise
    table = Table("source", "format", "files", "outcome")
    for (name, format_name, outcome), count in sorted(counts.items()):
        table.add_row(escape(name), format_name, f"{count:,}", outcome)
    console.print(table)
    for failure in sorted(failures):
        sys.stderr.write(f"error: {failure}\n")
    if failures:
        raise typer.Exit(2)


def _sources(what: str, overrides: list[str]) -> Iterator[tuple[str, str, Listing]]:
    """Name, format and files of each source."""
    if not what.lower().endswith(_MIXTURE_ENDINGS):
        if overrides:
            raise MixtureError(
                f"{overrides[0]}: overrides a key of a mixture, and {what} is a path; remove it"
            )
        yield what, *list_files(what, [what])
        return
    mixture = Mixture.load(what, overrides=overrides)
    for name, spec in mixture.sources.items():
        if spec.dataset is None:  # which is no files
            yield name, *list_files(name, spec.path, spec.storage_options, spec.format)
