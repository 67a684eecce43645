"""The outcome of a benchmark, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table

from benchmarks.definition import Benchmark, Settings
from benchmarks.summary import Summary

VERSION = 1
"""Of the JSON's layout."""


def to_json(
    benchmark: Benchmark, settings: Settings, machine: dict[str, object], summaries: list[Summary]
) -> dict[str, object]:
    """Everything measured, as JSON-serialisable values; one entry of ``results`` for each contender."""
    return {
        "version": VERSION,
        "benchmark": benchmark.name,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {"quick": settings.quick, "directory": str(settings.directory)},
        "machine": machine,
        "results": [
            {
                "measure": summary.measure.name,
                "contender": summary.name,
                "kind": summary.kind.value,
                "unit": summary.measure.unit,
                "higher_is_better": summary.measure.higher_is_better,
                "reference": summary.measure.reference,
                "value": asdict(summary.value),
                "ratio": asdict(summary.ratio) if summary.ratio else None,
                "busy_cores": summary.busy_cores,
                "samples": [asdict(sample) for sample in summary.samples],
            }
            for summary in summaries
        ],
    }


def write_json(path: Path, outcome: dict[str, object]) -> None:
    """Write an outcome, replacing an earlier one as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def render(benchmark: Benchmark, machine: dict[str, object], summaries: list[Summary]) -> RenderableType:
    """A table for each measure, between what was measured on and how to read it."""
    place = "{cpu}, {cores} cores, load {load_average}, {filesystem}, Python {python}".format_map(machine)
    tables = [
        _table(benchmark, measure.name, [summary for summary in summaries if summary.measure is measure])
        for measure in benchmark.measures
    ]
    return Group(
        f"[bold]{benchmark.name}[/]: {benchmark.measures_what}", place, *tables, benchmark.how_to_read
    )


_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("contender", "left"),
    ("kind", "left"),
    ("median", "right"),
    ("min … max", "left"),
    ("ratio", "right"),
    ("min … max", "left"),
    ("cores", "right"),
)


def _table(benchmark: Benchmark, name: str, summaries: list[Summary]) -> Table:
    measure = benchmark.measure(name)
    better = "more" if measure.higher_is_better else "less"
    title = f"{name} ({measure.unit}, {better} is better); ratio to: {measure.reference}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading, justify in _COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=True)
    digits = 3 if measure.timed else 5  # what is computed has no noise
    for summary in summaries:
        ratio = ("", "")
        if summary.ratio is not None:
            low, high = (f"{end:.{digits - 1}f}" for end in (summary.ratio.low, summary.ratio.high))
            ratio = (f"{summary.ratio.median:.{digits - 1}f}", f"{low} … {high}")
        table.add_row(
            summary.name,
            summary.kind.value,
            _number(summary.value.median, digits),
            f"{_number(summary.value.low, digits)} … {_number(summary.value.high, digits)}",
            *ratio,
            f"{summary.busy_cores:.1f}" if measure.timed else "",
            style="bold" if summary.kind == "ours" else None,
        )
    return table


def _number(value: float, digits: int) -> str:
    """So many significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.{digits}g}"
