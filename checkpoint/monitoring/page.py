"""The report: one HTML page that needs nothing else. No script, no outside resource."""

from __future__ import annotations

import html
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from checkpoint.cli_common import size_text
from checkpoint.monitoring.phases import (
    LOAD_PHASES,
    SAVE_PHASES,
    PhaseTimes,
    phase_of,
    phase_times,
    rank_of,
    stragglers,
)
from storage import Span

_TEMPLATE: Final = Path(__file__).with_name("report.html")
_PALETTE: Final = (
    *("#2563eb", "#9333ea", "#d97706", "#65a30d", "#dc2626"),
    *("#0891b2", "#6366f1", "#059669", "#db2777", "#84cc16", "#f59e0b"),
)
_COLORS: Final = dict(zip((*SAVE_PHASES, *LOAD_PHASES), _PALETTE, strict=True))
_MAX_STRAGGLERS: Final = 20
_MAX_RANKS: Final = 64  # in the timeline
_MAX_LANES: Final = 256
_MAX_BARS: Final = 4000
_ROW_OF_RANKS: Final = 32  # cells in a row where no mesh is given
_MAX_CELLS: Final = 16_384


def report(spans: Sequence[Span], *, mesh: Sequence[int] | None = None) -> str:
    """The page for what some ranks recorded.

    Args:
        spans: Of any number of ranks, in any order.
        mesh: Sizes of the axes of the device mesh, outermost first; the last is across, all others down. By default
            rows of 32 ranks.

    Raises:
        ValueError: No span of a checkpoint in it, or the mesh has fewer places than there are ranks.
    """
    times = phase_times(spans)
    if not times.ranks:
        raise ValueError("no span of a checkpoint: was recording on during a save or a load?")
    num_ranks = times.ranks[-1] + 1
    width = _ROW_OF_RANKS if mesh is None else mesh[-1]
    if mesh is not None and (any(size < 1 for size in mesh) or int(np.prod(mesh)) < num_ranks):
        raise ValueError(f"mesh {'x'.join(map(str, mesh))}: too small for rank {times.ranks[-1]}")
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        num_ranks=len(times.ranks),
        facts=_facts(spans, times),
        phases="\n".join(_phase_row(times, index) for index in range(len(times.phases))),
        stragglers=_stragglers(times),
        maps="".join(_heat_map(times, index, width) for index in range(len(times.phases))),
        timeline=_timeline(spans, times),
    )


def _facts(spans: Sequence[Span], times: PhaseTimes) -> str:
    begin = min(one.start_ns for one in spans)
    end = max(one.start_ns + one.duration_ns for one in spans)
    bytes_of = dict(zip(times.phases, times.num_bytes.sum(axis=1).tolist(), strict=True))
    facts = [
        (str(len(times.ranks)), "ranks"),
        (str(sum(one.name == "checkpoint.commit" for one in spans)), "commits"),
        (size_text(bytes_of.get("write", 0)), "written"),
        (size_text(bytes_of.get("read", 0)), "read"),
        (_seconds((end - begin) / 1e9), "from first to last"),
    ]
    return "".join(f"<div><b>{html.escape(value)}</b><span>{name}</span></div>" for value, name in facts)


def _phase_row(times: PhaseTimes, index: int) -> str:
    row, num_bytes = times.seconds[index], int(times.num_bytes[index].sum())
    slowest = int(row.argmax())
    # Ranks work beside each other: the slowest one's time is that of all their bytes.
    rate = f"{num_bytes / row[slowest] / 1e9:.2f}" if num_bytes and row[slowest] else "–"
    cells = (
        times.phases[index],
        f"{int(times.counts[index].sum()):,}",
        _seconds(float(np.median(row))),
        _seconds(float(row[slowest])),
        str(times.ranks[slowest]),
        size_text(num_bytes) if num_bytes else "–",
        rate,
    )
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _stragglers(times: PhaseTimes) -> str:
    found = stragglers(times)
    if not found:
        return '<p class="note">None: no rank takes 1.5 times the median of a phase.</p>'
    rows = "".join(
        f'<li><span class="warn">rank {one.rank}</span>: {one.phase} {_seconds(one.seconds)}, '
        f"median {_seconds(one.median_s)}</li>"
        for one in found[:_MAX_STRAGGLERS]
    )
    more = f"<li>and {len(found) - _MAX_STRAGGLERS} more</li>" if len(found) > _MAX_STRAGGLERS else ""
    return f"<ul>{rows}{more}</ul>"


def _heat_map(times: PhaseTimes, index: int, width: int) -> str:
    """A grid of all ranks, from white for 0 to red for the slowest."""
    row = times.seconds[index]
    highest = float(row.max())
    side = 18 if width <= 32 else 6
    cells = []
    for rank, value in zip(times.ranks[:_MAX_CELLS], row.tolist(), strict=False):
        shade = round(235 * (1 - value / highest)) if highest else 235
        y, x = divmod(rank, width)
        cells.append(
            f'<rect x="{x * side}" y="{y * side}" width="{side - 1}" height="{side - 1}" '
            f'fill="rgb(235,{shade},{shade})"><title>rank {rank}: {_seconds(value)}</title></rect>'
        )
    last = times.ranks[min(len(times.ranks), _MAX_CELLS) - 1]
    size = f'width="{min(width, last + 1) * side}" height="{(last // width + 1) * side}"'
    return (
        f"<figure><figcaption>{times.phases[index]}, up to {_seconds(highest)}</figcaption>"
        f"<svg {size}>{''.join(cells)}</svg></figure>"
    )


def _timeline(spans: Sequence[Span], times: PhaseTimes) -> str:
    """A lane for each thread of each rank, the slowest ranks if there are too many."""
    slowest = sorted(times.ranks, key=lambda one: -float(times.seconds[:, times.ranks.index(one)].sum()))
    chosen = set(slowest[:_MAX_RANKS])
    shown = [one for one in spans if phase_of(one) is not None and rank_of(one) in chosen]
    shown = sorted(shown, key=lambda one: -one.duration_ns)[:_MAX_BARS]
    lanes = sorted({(rank_of(one), one.thread) for one in shown})[:_MAX_LANES]
    begin = min(one.start_ns for one in shown)
    length = max(max(one.start_ns + one.duration_ns for one in shown) - begin, 1)
    left, width, height = 190, 860, 14
    parts = []
    for number, (rank, thread) in enumerate(lanes):
        label = html.escape(f"rank {rank} {thread}"[:30])
        parts.append(f'<text x="0" y="{number * height + 11}">{label}</text>')
    number_of = {lane: number for number, lane in enumerate(lanes)}
    for one in shown:
        lane = (rank_of(one), one.thread)
        if lane not in number_of:
            continue
        phase = phase_of(one)
        assert phase is not None
        x = left + width * (one.start_ns - begin) / length
        bar = max(0.5, width * one.duration_ns / length)
        label = html.escape(
            f"{phase} {_seconds(one.duration_ns / 1e9)} {one.attributes.get('path', '')}"[:300]
        )
        parts.append(
            f'<rect x="{x:.1f}" y="{number_of[lane] * height + 2}" width="{bar:.1f}" height="{height - 4}" '
            f'fill="{_COLORS[phase]}"><title>{label}</title></rect>'
        )
    legend = " ".join(f'<span style="color:{_COLORS[phase]}">■</span> {phase}' for phase in times.phases)
    left_out = len(times.ranks) - len(chosen)
    note = (
        f'<p class="note">The {len(chosen)} slowest ranks; {left_out} more are not shown.</p>'
        if left_out
        else ""
    )
    size = f'width="{left + width}" height="{len(lanes) * height + 4}"'
    return f"<p>{legend}; {_seconds(length / 1e9)} from left to right</p><svg {size}>{''.join(parts)}</svg>{note}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 or not value else f"{value * 1e6:.3g} µs"
