"""``omniload data profile``: what the sources of a mixture cost, and the actors that would read them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.errors import OmniloadError
from omniload.loader import open_loader
from omniload.mixture import Mixture
from omniload.planner import StreamState
from omniload.samples.tokenize import Tokenizer
from omniload.scaling import Budget, Partition, SourceProfile, outlook, partition, profile_source

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", 1)
}
_MOST_NAMED = 8


def profile(
    mixture: Annotated[Path, typer.Argument(help="The mixture's YAML file.", metavar="MIXTURE")],
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="How long to read each source.")] = 2.0,
    cpus: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Processors for the loaders; by default those of this machine.", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory for them, like 8GiB; by default that of this machine.", show_default=False),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="What the trainer takes of the stream; by default as much as the processors can prepare.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    overrides: Annotated[
        list[str],
        typer.Argument(help="Keys that replace the file's.", metavar="KEY=VALUE", show_default=False),
    ] = [],  # noqa: B006 - typer makes a new one
) -> None:
    """Read a little of every source, and show what it costs and how many actors and workers it would be given.

    One source after the other is read from its beginning, in this process. Do it on a machine like those that will
    read, with nothing else running.
    """
    spec = Mixture.load(mixture, overrides=[*overrides, "quarantine=null"])
    budget = Budget(
        cpus=_processors() if cpus is None else cpus,
        memory_bytes=_memory() if memory is None else _num_bytes(memory),
    )
    tokenizer = Tokenizer.from_file(spec.tokenizer) if spec.tokenizer else None
    profiles = []
    with Console(stderr=True).status("") as status:
        for name in spec.names:
            status.update(f"reading {escape(name)}")
            loader = open_loader(name, spec, tokenizer=tokenizer)
            try:
                profiles.append(profile_source(loader, seconds=seconds))
            finally:
                loader.close()
    shares = outlook(spec, StreamState.initial(len(spec.names)), profiles, steps=0).now
    demand = _affordable(profiles, shares, budget.cpus) if tokens_per_second is None else tokens_per_second
    plan = partition(profiles, shares, demand, budget)
    if as_json:
        sources = [one.to_json() | {"share": shares[one.name]} for one in profiles]
        sys.stdout.write(json.dumps({"sources": sources, "partition": plan.to_json()}, indent=2) + "\n")
        return
    console = Console()
    console.print(_sources(profiles, shares, plan, str(mixture)))
    console.print(_actors(plan))
    console.print(
        f"{plan.tokens_per_s:,.0f} tokens/s of {demand:,.0f}, by {len(plan.actors)} actors with {plan.cpus:.2f} of"
        f" {budget.cpus:g} processors and {_mib(plan.memory_bytes)} of {_mib(budget.memory_bytes)} of memory"
    )
    for shortfall in plan.shortfalls:
        console.print(f"[yellow]![/] {shortfall}", soft_wrap=True)


def _affordable(profiles: list[SourceProfile], shares: Mapping[str, float], cpus: float) -> float:
    """Tokens per second that so many processors can prepare, and no rounding error more."""
    return cpus / sum(shares[one.name] * one.cpu_s_per_token for one in profiles) * (1 - 1e-9)


def _sources(
    profiles: list[SourceProfile], shares: Mapping[str, float], plan: Partition, title: str
) -> Table:
    table = Table(
        "source",
        "share",
        "tokens/s",
        "CPU ms per sample",
        "bytes per sample",
        "resident",
        "first after",
        "actors",
        title=title,
    )
    actors = plan.num_actors()
    for one in profiles:
        table.add_row(
            escape(one.name),
            f"{shares[one.name]:.2%}",
            f"{one.tokens_per_s:,.0f}",
            f"{1e3 * one.prepare_s_per_sample:.4g}",
            f"{one.bytes_per_sample:,.0f}",
            _mib(one.resident_bytes),
            f"{1e3 * one.open_s:,.0f} ms",
            str(actors[one.name]),
        )
    return table


def _actors(plan: Partition) -> Table:
    table = Table("actor", "workers", "processors", "memory", "reads")
    for actor in plan.actors:
        reads = [
            reader.source if reader.of == 1 else f"{reader.source} {reader.index + 1}/{reader.of}"
            for reader in actor.readers
        ]
        more = f" and {len(reads) - _MOST_NAMED} more" if len(reads) > _MOST_NAMED else ""
        table.add_row(
            escape(actor.name),
            str(actor.workers),
            f"{actor.cpus:.2f}",
            _mib(actor.memory_bytes),
            escape(", ".join(reads[:_MOST_NAMED])) + more,
        )
    return table


def _processors() -> float:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?", text.strip())
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes < 1:
        raise OmniloadError(
            f"--memory: {text!r} is not a size; write it like 8GiB, 500MB or a number of bytes"
        )
    return num_bytes


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
