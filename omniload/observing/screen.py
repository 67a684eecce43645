"""The numbers of a job as text for a terminal, whatever its size; nothing is said by colour alone.

What is most likely to be the trouble comes first: in each table the worst rows, in each row the telling columns. On a
narrow terminal the last columns are left out, and on a low one the last rows, with their number.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from omniload.observing.job_dir import Published
from omniload.observing.stats import ActorStats, ClientStats, SourceStats

DRIFT_WARNED: Final = 0.1
"""Relative distance from the declared ratio at which a source is marked."""

_NOTHING: Final = "–"
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_ALERT: Final = "bold red"
_GAP: Final = 2
_SHORTEST_NAME: Final = 8
_OTHER_LINES: Final = 4
"""Of a table, besides its rows: an empty one, the title, the names of the columns, and how many are left out."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Column(Generic[_T]):
    title: str
    text: Callable[[_T], str]
    is_alert: Callable[[_T], bool] = lambda thing: False
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class _Rows(Generic[_T]):
    """One table: actors, say, and what is shown of each."""

    title: str
    columns: tuple[_Column[_T], ...]
    things: Sequence[_T]

    def lines(self, width: int, num_rows: int) -> Iterator[RenderableType]:
        """The first ``num_rows`` things, and at most `_OTHER_LINES` lines more."""
        cells = [[_printable(column.text(one)) for column in self.columns] for one in self.things[:num_rows]]
        longest = max(_SHORTEST_NAME, width // 3)
        columns = self.columns[: self._num_columns(width, longest, cells)]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for column in columns:
            if column.is_number:
                table.add_column(column.title, justify="right", no_wrap=True)
            else:
                table.add_column(column.title, max_width=longest, no_wrap=True)
        for one, row in zip(self.things, cells, strict=False):
            styles = [_ALERT if column.is_alert(one) else "" for column in columns]
            table.add_row(*(Text(text, style) for text, style in zip(row, styles, strict=False)))
        yield _line(f"\n{self.title}: {len(self.things):,}", "bold")
        yield table
        if num_rows < len(self.things):
            yield _line(f"and {len(self.things) - num_rows:,} more")

    def _num_columns(self, width: int, longest: int, cells: Sequence[Sequence[str]]) -> int:
        """How many of the columns the width has room for, at least one."""
        used = -_GAP
        for i, column in enumerate(self.columns):
            needed = max(map(cell_len, (column.title, *(row[i] for row in cells))))
            used += _GAP + (needed if column.is_number else min(needed, longest))
            if used > width:
                return max(1, i)
        return len(self.columns)


class JobScreen:
    """What rich prints of the numbers of a job. Where rich is given a height, it is kept to.

    Args:
        published: the numbers.
    """

    def __init__(self, published: Published) -> None:
        self._published = published

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stats = self._published.stats
        head = _head(self._published, options.max_width)
        yield head
        tables: list[_Rows[Any]] = [
            _Rows("actors", _ACTORS, _worst_first(stats.actors, lambda one: one.fetch_p99_ms)),
            _Rows("sources", _SOURCES, _worst_first(stats.sources, lambda one: abs(one.drift))),
            _Rows("ranks", _RANKS, _worst_first(stats.clients, lambda one: one.stall_p99_ms)),
        ]
        tables = [table for table in tables if table.things]
        num_rows = [len(table.things) for table in tables]
        if options.height is not None:
            taken = len(head.wrap(console, options.max_width)) + _OTHER_LINES * len(tables)
            num_rows = _shares(options.height - taken, num_rows)
        for table, rows in zip(tables, num_rows, strict=True):
            yield from table.lines(options.max_width, rows)


def _head(published: Published, width: int) -> Text:
    stats = published.stats
    # The others wait for the worst rank.
    stalls_p50 = _known(one.stall_p50_ms for one in stats.clients)
    stalls_p99 = _known(one.stall_p99_ms for one in stats.clients)
    facts = (
        f"tokens/s {_whole(sum(_known(one.tokens_per_s for one in stats.clients)))}",
        f"worst stall {_p50_p99(max(stalls_p50, default=math.nan), max(stalls_p99, default=math.nan))}",
        f"plan {_p50_p99(stats.plan_p50_ms, stats.plan_p99_ms)}",
        f"imbalance {_NOTHING if math.isnan(stats.imbalance) else f'{stats.imbalance:.3f}'}",
        f"object store {decimal(stats.object_store_bytes)}",
    )
    unbroken = "  ".join(fact.replace(" ", _NO_BREAK) for fact in facts)
    return Text.assemble(
        (_printable(stats.job), "bold"),
        f"  step {stats.step:,}",
        (f"  STALE: {published.stale}" if published.stale else "", _ALERT),
        "\n",
        textwrap.fill(unbroken, width).replace(_NO_BREAK, " "),
    )


def _worst_first(things: Iterable[_T], badness: Callable[[_T], float]) -> list[_T]:
    """Those of whose badness nothing is known last; the equally bad in the order they came in."""

    def key(thing: _T) -> float:
        bad = badness(thing)
        return -math.inf if math.isnan(bad) else bad

    return sorted(things, key=key, reverse=True)


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Share lines among tables: none gets more than it wants, and what one leaves goes to the others."""
    shares = [0] * len(wanted)
    left = max(0, room)
    for num_served, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[i] = min(wanted[i], left // (len(wanted) - num_served))
        left -= shares[i]
    return shares


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _printable(text: str) -> str:
    # A name with an escape sequence or a line break would take the screen apart.
    return "".join(one if one.isprintable() else "?" for one in text)


def _ms(value: float) -> str:
    return _NOTHING if math.isnan(value) else f"{value:,.1f} ms"


def _p50_p99(p50_ms: float, p99_ms: float) -> str:
    return f"{_ms(p50_ms)} (p99 {_ms(p99_ms)})"


def _percent(value: float) -> str:
    return _NOTHING if math.isnan(value) else f"{value:.2%}"


def _whole(value: float) -> str:
    return _NOTHING if math.isnan(value) else f"{value:,.0f}"


def _drifts(source: SourceStats) -> bool:
    return abs(source.drift) >= DRIFT_WARNED


def _drift(source: SourceStats) -> str:
    if math.isnan(source.drift):
        return _NOTHING
    return f"{'! ' if _drifts(source) else ''}{source.drift:+.1%}"


_ACTORS: Final[tuple[_Column[ActorStats], ...]] = (
    _Column("actor", lambda one: one.name, is_number=False),
    _Column("role", lambda one: one.role + (", shadow" if one.shadow else ""), is_number=False),
    _Column("fetch p99", lambda one: _ms(one.fetch_p99_ms)),
    _Column("queue", lambda one: decimal(one.queue_bytes)),
    _Column("memory", lambda one: decimal(one.rss_bytes)),
    _Column("restarts", lambda one: f"{one.restarts:,}", lambda one: one.restarts > 0),
    _Column("stale", lambda one: f"{one.stale_answers:,}"),
    _Column("calls", lambda one: f"{one.calls:,}"),
    _Column("busy", lambda one: f"{one.busy_s:,.1f} s"),
    _Column("fetch p50", lambda one: _ms(one.fetch_p50_ms)),
    _Column("pid", lambda one: str(one.pid)),
    _Column("node", lambda one: one.node, is_number=False),
    _Column("sources", lambda one: ", ".join(one.sources), is_number=False),
)
_SOURCES: Final[tuple[_Column[SourceStats], ...]] = (
    _Column("source", lambda one: one.name, is_number=False),
    _Column("drift", _drift, _drifts),
    _Column("declared", lambda one: _percent(one.declared_ratio)),
    _Column("realised", lambda one: _percent(one.realised_ratio)),
    _Column("failures", lambda one: f"{one.failures:,}"),
    _Column("tokens", lambda one: f"{one.emitted_tokens:,}"),
)
_RANKS: Final[tuple[_Column[ClientStats], ...]] = (
    _Column("rank", lambda one: str(one.rank)),
    _Column("stall p99", lambda one: _ms(one.stall_p99_ms)),
    _Column("stall p50", lambda one: _ms(one.stall_p50_ms)),
    _Column("step", lambda one: f"{one.step:,}"),
    _Column("ready", lambda one: f"{one.queue_steps:,}", lambda one: one.queue_steps == 0),
    _Column("tokens/s", lambda one: _whole(one.tokens_per_s)),
    _Column("fetch p50", lambda one: _ms(one.fetch_p50_ms)),
    _Column("queue", lambda one: decimal(one.queue_bytes)),
)
