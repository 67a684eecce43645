"""``omniload ckpt report``: where the time of saves and loads went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checkpoint.cli_common import show, user_errors
from storage import Store
from storage.errors import BadRequest, NotFound


def report(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Spans of ranks, as checkpoint.monitoring.recording writes them, or traces.",
            show_default=False,
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option(help="Sizes of the axes of the mesh, as in 4x2.", show_default="rows of 32 ranks"),
    ] = None,
    out: Annotated[str, typer.Option(help="Path or URL of the page.")] = "checkpoint-report.html",
    trace: Annotated[
        str | None, typer.Option(help="Write one trace of all ranks too, for https://ui.perfetto.dev.")
    ] = None,
) -> None:
    """Show phases by rank, stragglers, heat maps over the mesh and a timeline as one HTML page."""
    from checkpoint.monitoring import read_spans
    from checkpoint.monitoring import report as page_of
    from storage.trace import trace_json

    with user_errors():
        missing = [path for path in traces if not path.is_file()]
        if missing:
            raise NotFound(str(missing[0]), "no such file")
        spans = read_spans(traces)
        try:
            page = page_of(spans, mesh=None if mesh is None else _sizes(mesh))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        written = [(out, page.encode())]
        if trace is not None:
            written.append((trace, trace_json(spans)))
        for place, data in written:
            folder, slash, name = place.rpartition("/")
            Store(folder or slash or ".").write(name, data)
            show(f"{place}: written")


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.lower().split("x")]
    except ValueError:
        raise BadRequest(f"--mesh {text!r}: write the sizes of the axes as in 4x2") from None
