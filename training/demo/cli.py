"""The command `omniload demo`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training.demo.demo import run_demo
from training.demo.errors import CorpusError, DemoError, OutputError
from training.demo.evidence import Check
from training.demo.plan import default_plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Load, train, break, resume elsewhere, prove, export: the whole job on real data, in a few minutes.

    Exits with code 1 if any part of the proof fails, and with code 2 if it cannot start.
    """
    console = Console()
    try:
        result = run_demo(out, default_plan(), console)
    except DemoError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(2 if isinstance(error, CorpusError | OutputError) else 1) from None
    console.print(proof_table(result.checks))
    verdict = "[bold green]all checks passed[/]" if result.passed else "[bold red]NOT proved[/]"
    console.print(f"{verdict}; report: {escape(str(result.report))}", soft_wrap=True, highlight=False)
    if not result.passed:
        raise typer.Exit(1)


def proof_table(checks: Sequence[Check]) -> Table:
    """The proof as a table for the terminal, grouped by run and narrow enough for 80 columns."""
    table = Table("claim", "result", "evidence", title="Proof", title_justify="left")
    for (run, layout, steps), group in itertools.groupby(
        checks, key=lambda check: (check.run, check.layout, check.steps_text)
    ):
        table.add_section()
        table.add_row(f"[bold]{escape(run)}[/bold]", "", f"{layout}, steps {steps}")
        for check in group:
            verdict = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
            table.add_row(f"  {escape(check.claim)}", verdict, escape(check.detail))
    return table
