"""The command line: ``python -m benchmarks list`` and ``python -m benchmarks run NAME|all``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import machine, registry, report
from benchmarks.definition import Benchmark, Settings
from benchmarks.harness import interleave
from benchmarks.summary import summarise

RESULTS = Path(__file__).parent / "results"

_TABLE_WIDTH = 100
"""Columns that the tables need; a narrower terminal wraps them, and a pipe does not mind."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure beside floors and peers.")
console = Console(width=max(_TABLE_WIDTH, Console().width))
errors = Console(stderr=True)


@app.command("list")
def list_benchmarks() -> None:
    """Name the benchmarks and what they measure."""
    for name in registry.NAMES:
        console.print(f"[bold]{name}[/]  {registry.find(name).measures_what}")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="A benchmark, or 'all'.")],
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed rounds; by default 5, or 2 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: the values mean little.")] = False,
    out: Annotated[Path, typer.Option(help="Where NAME.json goes.")] = RESULTS,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where benchmarks put their files; by default in memory.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Only measures whose name has this text in it; the JSON's name has it, too.")
    ] = "",
) -> None:
    """Run a benchmark; print its tables and write NAME.json."""
    settings = Settings(quick=quick, directory=directory) if directory else Settings(quick=quick)
    if not settings.directory.is_dir():
        raise typer.BadParameter(f"{settings.directory} is not a directory; create it", param_hint="--dir")
    try:
        chosen = [registry.find(each) for each in registry.names(name)]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    for benchmark in chosen:
        run_one(benchmark, settings, repeats or settings.sized(5, 2), out, only)


def run_one(benchmark: Benchmark, settings: Settings, repeats: int, out: Path, only: str = "") -> None:
    """Run one benchmark, or its measures with ``only`` in their name; print its tables and write JSON into ``out``."""
    place = machine.describe(settings.directory)
    with (
        errors.status(f"{benchmark.name}: setting up") as status,
        benchmark.contenders(settings) as every,
    ):
        contenders = [one for one in every if only in one.measure]
        found = {one.measure for one in contenders}
        benchmark = replace(benchmark, measures=tuple(one for one in benchmark.measures if one.name in found))
        if not found:
            names = "; ".join(dict.fromkeys(one.measure for one in every))
            raise typer.BadParameter(f"{benchmark.name} measures {names}", param_hint="--only")
        samples = interleave(
            contenders,
            repeats,
            warm_up=any(measure.timed for measure in benchmark.measures),
            on_run=lambda contender: status.update(
                f"{benchmark.name}: {contender.measure}, {contender.name}"
            ),
        )
    summaries = summarise(benchmark, contenders, samples)
    path = out / f"{'-'.join([benchmark.name, *re.findall('[A-Za-z0-9]+', only)])}.json"
    report.write_json(path, report.to_json(benchmark, settings, place, summaries))
    console.print(report.render(benchmark, place, summaries))
    console.print(f"[dim]{path}[/]\n", soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
