"""``omniload data plan``: what a mixture will do to a run, before it is one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.cli.picture import Bar, Chart, svg
from omniload.errors import OmniloadError
from omniload.forecasting.dry_run import DryRun
from omniload.forecasting.evenness import PLANNED, RANDOM, TOKENS
from omniload.forecasting.forecast import Forecast
from omniload.mixture import Mixture
from omniload.placing import ClientPlaceTree
from omniload.planner.rules import StepRules

_MOST_BARS = 24


def plan(
    mixture: Annotated[Path, typer.Argument(help="The mixture's YAML file.", metavar="MIXTURE")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to plan.")] = 200,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes of the trainer's mesh, like dp=8,cp=2,pp=4; by default a data-parallel rank per lane.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw it, into this SVG file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    overrides: Annotated[
        list[str],
        typer.Argument(help="Keys that replace the file's.", metavar="KEY=VALUE", show_default=False),
    ] = [],  # noqa: B006 - typer makes a new one
) -> None:
    """Plan the first steps of a run on metadata alone, and show what comes of them.

    Per source the share it gets beside the declared one, its passes, and when it runs out; padding; how even the ranks
    are, by each way of giving packs to lanes; and what that is worth in time.
    """
    spec = Mixture.load(mixture, overrides=[*overrides, "quarantine=null"])
    tree = ClientPlaceTree.parse(mesh) if mesh is not None else ClientPlaceTree.of({"dp": spec.lanes})
    tree.lanes_of(0, spec.lanes)
    if picture is not None and picture.suffix != ".svg":
        raise OmniloadError(f"--picture: {picture} would be SVG; give it a name that ends in .svg")
    if picture is not None and not picture.parent.is_dir():
        raise OmniloadError(f"--picture: there is no folder {picture.parent}; make it, or name another")
    with DryRun(spec) as run, Console(stderr=True).status(f"planning {steps:,} steps"):
        forecast = Forecast.of(spec, run, steps, tree)
    if as_json:
        values = dataclasses.asdict(forecast) | {"padding": forecast.padding}
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
    else:
        _show(forecast, str(mixture), tree, StepRules.of(spec).cost.modules)
    if picture is not None:
        try:
            picture.write_text(svg(_charts(forecast)), encoding="utf-8")
        except OSError as error:
            raise OmniloadError(f"--picture: {picture} cannot be written: {error.strerror}") from None


def _show(forecast: Forecast, title: str, tree: ClientPlaceTree, modules: tuple[str, ...]) -> None:
    console = Console()
    console.print(_sources(forecast, title))
    if forecast.num_steps:
        console.print(_ways(forecast, tree, modules))
    console.print(
        f"{forecast.num_steps:,} steps, {forecast.tokens:,} tokens, {forecast.padding:.3%} padding; a token waits"
        f" {forecast.mean_token_delay:.2f} steps on average, a document up to {forecast.longest_delay};"
        f" the largest document alone makes it {forecast.bound:.4f} over ranks at least"
    )
    for remark in forecast.remarks:
        console.print(f"[yellow]![/] {escape(remark)}", soft_wrap=True)


def _sources(forecast: Forecast, title: str) -> Table:
    table = Table("source", "declared", "realised", "tokens", "samples", "passes", "last sample", title=title)
    for source in forecast.sources:
        if source.runs_out_at is None:
            last = "none"
        else:
            last = f"{'' if source.ran_out else 'about '}step {source.runs_out_at:,}"
        table.add_row(
            escape(source.name),
            f"{source.declared:.2%}",
            f"{source.realised:.2%}",
            f"{source.tokens:,}",
            f"{source.samples:,}",
            "unknown" if source.epochs is None else f"{source.epochs:.3g}",
            last,
        )
    return table


def _ways(forecast: Forecast, tree: ClientPlaceTree, modules: tuple[str, ...]) -> Table:
    by_module = modules if len(modules) > 1 else ()
    table = Table(
        "packs to lanes",
        "over lanes",
        "over ranks",
        "worst step",
        *by_module,
        "against random",
        "against tokens",
        title=f"cost of the costliest by the mean, and speed-up, on {_mesh(tree)}",
    )
    random, tokens = forecast.ways.get(RANDOM), forecast.ways.get(TOKENS)
    for name, way in forecast.ways.items():
        table.add_row(
            name,
            f"{way.over_lanes:.4f}",
            f"{way.over_ranks:.4f}",
            f"{way.worst:.4f}",
            *(f"{one:.4f}" for one in way.by_module[: len(by_module)]),
            "" if random is None else f"{random.time / way.time:.3f}×",
            "" if tokens is None else f"{tokens.time / way.time:.3f}×",
            style="bold" if name == PLANNED else None,
        )
    return table


def _mesh(tree: ClientPlaceTree) -> str:
    return ",".join(f"{name}={size}" for name, size in zip(tree.names, tree.sizes, strict=True))


def _charts(forecast: Forecast) -> list[Chart]:
    largest = sorted(forecast.sources, key=lambda source: -source.declared)[:_MOST_BARS]
    some = (
        f", the {_MOST_BARS} largest of {len(forecast.sources)}"
        if len(largest) < len(forecast.sources)
        else ""
    )
    shares = Chart(
        title=f"share of each source over {forecast.num_steps:,} steps: declared (grey), realised (blue){some}",
        bars=[
            Bar(
                label=source.name if len(source.name) <= 26 else f"{source.name[:25]}…",
                values=(source.declared, source.realised),
                text=f"{source.realised:.2%}",
            )
            for source in largest
        ],
    )
    even = Chart(
        title="cost of the costliest rank by the mean, from 1; red: what the largest document makes it",
        bars=[
            Bar(label=name, values=(way.over_ranks,), text=f"{way.over_ranks:.4f}")
            for name, way in forecast.ways.items()
        ],
        start=1.0,
        mark=forecast.bound,
    )
    return [shares, even] if forecast.ways else [shares]
