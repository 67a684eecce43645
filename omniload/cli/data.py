"""``omniload data``: check and look at mixtures."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.cli.index import index
from omniload.cli.plan import plan
from omniload.cli.profile import profile
from omniload.cli.replay import replay
from omniload.errors import SourceError
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture
from omniload.pieces import Cursor
from omniload.place import Place
from omniload.planner.rules import StepRules
from omniload.planner.strategies import load_strategy

app = typer.Typer(no_args_is_help=True)
app.command()(index)
app.command()(plan)
app.command()(profile)
app.command()(replay)

MixtureFile = Annotated[Path, typer.Argument(help="The mixture's YAML file.", metavar="MIXTURE")]
Overrides = Annotated[
    list[str],
    typer.Argument(
        help="Keys that replace the file's, as sources.web.weight=0.3; values in YAML.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]


@app.command()
def validate(
    mixture: MixtureFile,
    overrides: Overrides = [],  # noqa: B006 - typer makes a new one
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that shall share the lanes.")] = 1,
) -> None:
    """Check a mixture: the file, its paths, and one row of every source; then print what it holds."""
    spec = Mixture.load(mixture, overrides=overrides)
    Place(dp_size=dp_size).lanes_of(spec)
    StepRules.of(spec)
    load_strategy(spec.strategy)
    table = Table("source", "files", "size", "weight", "first sample", title=str(mixture))
    weights = spec.weights_at(0)
    for name, weight in zip(spec.names, weights, strict=True):
        loader = open_loader(name, spec)
        tokens = _first_sample_tokens(loader)
        if tokens is None:
            why = f": {loader.failures[-1].reason}" if loader.failures else ""
            raise SourceError(f"source '{name}': no row gives a sample{why}; check its column and transforms")
        table.add_row(
            escape(name),
            f"{len(loader.source.files):,}",
            _human(sum(file.size for file in loader.source.files)),
            f"{weight / sum(weights):.4g}",
            f"{tokens:,} tokens",
        )
    console = Console()
    console.print(table)
    console.print(
        f"valid: {_size_of(spec)} a step in {spec.lanes} lanes,"
        f" {spec.lanes // dp_size} for each of {dp_size} data-parallel ranks"
    )


@app.command()
def preview(
    mixture: MixtureFile,
    overrides: Overrides = [],  # noqa: B006 - typer makes a new one
    steps: Annotated[int, typer.Option(min=1, help="Steps to show.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Samples to show of each step.")] = 12,
    width: Annotated[int, typer.Option(min=8, help="Characters of text to show of each.")] = 60,
) -> None:
    """Show the first samples of the stream: where each comes from, and how it begins."""
    import tokenizers

    from omniload import DataLoader

    console = Console()
    # A look at the stream leaves no trace.
    spec = Mixture.load(mixture, overrides=[*overrides, "quarantine=null"])
    with DataLoader(spec) as loader:
        path = loader.mixture.tokenizer
        tokenizer = tokenizers.Tokenizer.from_file(path) if path else None
        for lanes in islice(loader.steps(), steps):
            step = lanes[0]["step"]
            table = Table("lane", "pack", "source", "file", "row", "tokens", "begins", title=f"step {step}")
            left = samples
            for lane in lanes:
                rows = loader.samples(lane).slice(0, left).to_pylist()
                left -= len(rows)
                tokens = lane["input_ids"].flatten()
                bounds = lane["cu_seqlens"].tolist()
                starts = [at for at in bounds[:-1] if lane["segment_ids"].flatten()[at]]
                for row, start in zip(rows, starts, strict=False):
                    ids = tokens[start : start + row["end"] - row["start"]].tolist()[:width]
                    text = tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else str(ids)
                    table.add_row(
                        str(lane["lane"]),
                        str(row["pack"]),
                        escape(row["source"]),
                        escape(row["file"]),
                        f"{row['row']:,}",
                        f"{row['start']:,}–{row['end']:,}",
                        escape(" ".join(text.split())[:width]),
                    )
            console.print(table)
            total = sum(int((lane["segment_ids"] > 0).sum()) for lane in lanes)
            room = sum(lane["input_ids"].numel() for lane in lanes)
            console.print(f"{total:,} tokens in {room:,} places ({total / room:.2%} full)")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the mixture file, for editors: save it, and name it in the file's first line.

    # yaml-language-server: $schema=mixture.schema.json
    """
    from omniload.mixture_schema import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _first_sample_tokens(loader: SourceLoader) -> int | None:
    """Tokens of the first sample of a source; None if a whole pass gives none."""
    cursor, ends_epoch = Cursor(), False
    while not ends_epoch:
        chunk = loader.read(cursor, 1)
        if len(chunk.tokens):
            return int(chunk.tokens[0])
        cursor, ends_epoch = chunk.end, chunk.ends_epoch
    return None


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _size_of(mixture: Mixture) -> str:
    if mixture.packs is None:
        return f"{mixture.lanes * mixture.lane_budget:,} tokens, padding included,"
    packed = mixture.packing != "none"
    rows = "packs" if packed else "samples of at most"
    return f"{mixture.packs} {rows}{' of' if packed else ''} {mixture.seq_len:,} tokens"
