"""The phases of each save on each rank, as bars over time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.demo.charts import svg
from training.demo.logs import SpanRecord

_PREFIX = "checkpoint."
_GAP_S = 0.25
_MAX_PANELS = 6
_MAX_RANKS = 16
_BAR_HEIGHT = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The spans of one save, over all ranks."""

    start_s: float
    """Unix time of the first span."""
    end_s: float
    """Unix time of the end of the last span."""
    spans: tuple[SpanRecord, ...]
    """By start."""

    @property
    def duration_s(self) -> float:
        """From the first span's start to the last span's end, in seconds."""
        return self.end_s - self.start_s


def saves_of(spans: Sequence[SpanRecord]) -> list[Save]:
    """Groups a run's checkpoint spans into saves: spans that overlap or lie less than 0.25 s apart."""
    groups: list[list[SpanRecord]] = []
    end = float("-inf")
    for span in sorted(spans, key=lambda span: (span.start_s, span.rank)):
        if not span.name.startswith(_PREFIX):
            continue
        if span.start_s > end + _GAP_S:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span.start_s + span.duration_s)
    return [
        Save(
            start_s=group[0].start_s,
            end_s=max(span.start_s + span.duration_s for span in group),
            spans=tuple(group),
        )
        for group in groups
    ]


def timeline_chart(saves: Sequence[Save], *, run_start_s: float) -> str:
    """One panel per save, rows by rank, one colour per phase.

    Args:
        saves: The first few are drawn.
        run_start_s: Unix time that the panels' titles count from.
    """
    shown = saves[:_MAX_PANELS]
    names = sorted({span.name for save in shown for span in save.spans})
    colors = dict(zip(names, itertools.cycle(svg.PALETTE), strict=False))
    entries = [(name.removeprefix(_PREFIX), color, "") for name, color in colors.items()]
    half = -(-len(entries) // 2) if len(entries) > 6 else len(entries)
    parts = [svg.legend(8, 16, entries[:half]), svg.legend(8, 36, entries[half:])]
    longest = max((save.duration_s for save in shown), default=0.0) or 1e-3
    top = 62.0
    for save in shown:
        title = f"save at {save.start_s - run_start_s:.1f} s of the run: {save.duration_s * 1e3:,.0f} ms"
        parts.append(svg.text(8, top, title, bold=True))
        body, height = _panel(save, longest, top + 10, colors)
        parts.append(body)
        top += height + 74
    return svg.picture(960, max(60.0, top - 24), "Phases of each checkpoint save by rank over time", parts)


def _panel(save: Save, longest: float, top: float, colors: dict[str, str]) -> tuple[str, float]:
    """Draws one save; returns the markup and the height of its plotting area in pixels."""
    ranks = sorted({span.rank for span in save.spans})[:_MAX_RANKS]
    rows = [(rank, list(_stacked([span for span in save.spans if span.rank == rank]))) for rank in ranks]
    height = sum(_BAR_HEIGHT * _depth(placed) + 8 for _, placed in rows)
    frame = svg.Frame(
        left=80, top=top, width=860, height=height, x_domain=(0, longest * 1e3), y_domain=(0, 1)
    )
    parts = [
        frame.axes(
            x_title="milliseconds since the save began",
            y_title="",
            x_ticks=svg.linear_ticks(0, longest * 1e3, most=10),
            y_ticks=[],
        )
    ]
    y = top + 4
    budget = svg.MAX_POINTS // len(rows)
    for rank, placed in rows:
        depth = _depth(placed)
        parts.append(svg.text(72, y + _BAR_HEIGHT * depth / 2 + 4, f"rank {rank}", anchor="end"))
        for level, span in placed[:budget]:
            start = (span.start_s - save.start_s) * 1e3
            x = frame.x(start)
            width = frame.x(start + span.duration_s * 1e3) - x
            hint = f"rank {rank}, {span.name}: {span.duration_s * 1e3:.1f} ms from {start:.1f} ms"
            parts.append(
                svg.rectangle(
                    x, y + level * _BAR_HEIGHT, width, _BAR_HEIGHT - 2, colors[span.name], title=hint
                )
            )
        y += _BAR_HEIGHT * depth + 8
    return "".join(parts), height


def _stacked(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """Yields each span with the lowest free level, so that spans that overlap lie above each other."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    levels = 0
    for span in sorted(spans, key=lambda span: (span.start_s, -span.duration_s)):
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, levels)
            levels += 1
        level = heapq.heappop(free)
        heapq.heappush(busy, (span.start_s + span.duration_s, level))
        yield level, span


def _depth(placed: Sequence[tuple[int, SpanRecord]]) -> int:
    return max((level for level, _ in placed), default=0) + 1
