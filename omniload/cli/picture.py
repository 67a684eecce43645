"""Bar charts as SVG: a file that any browser shows, made without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _MARGIN = 760, 26, 16
_LABEL, _VALUE = 190, 90
"""Pixels to the left of the bars, for their names, and to the right, for their values."""
_COLOURS = ("#b8c4d6", "#2f6fb3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar, or two that are compared."""

    label: str
    """What it is of."""
    values: tuple[float, ...]
    """Lengths, not negative: one, or two of which the first is the yardstick."""
    text: str
    """What is written behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Some bars under a title."""

    title: str
    """What they show and in which unit."""
    bars: Sequence[Bar]
    """From top to bottom."""
    start: float = 0.0
    """Value at which bars begin."""
    mark: float | None = None
    """Value at which a line is drawn."""


def svg(charts: Sequence[Chart]) -> str:
    """One picture of several charts, one under the other."""
    parts: list[str] = []
    y = _MARGIN
    for chart in charts:
        y = _draw(chart, y, parts) + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
        ' font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw(chart: Chart, y: int, parts: list[str]) -> int:
    """Add a chart whose top is at ``y``; returns its bottom."""
    parts.append(_text(_MARGIN, y + 12, chart.title, ' font-weight="bold"'))
    top = y = y + 20
    shown = [value for bar in chart.bars for value in bar.values] + (
        [] if chart.mark is None else [chart.mark]
    )
    longest = max([value - chart.start for value in shown] + [1e-9])
    room = _WIDTH - _LABEL - _VALUE - _MARGIN

    def x(value: float) -> float:
        return _LABEL + room * max(0.0, value - chart.start) / longest

    for bar in chart.bars:
        parts.append(_text(_LABEL - 8, y + 16, bar.label, ' text-anchor="end"'))
        height = (_ROW - 6) // len(bar.values)
        colours = _COLOURS[-len(bar.values) :]
        for i, (value, colour) in enumerate(zip(bar.values, colours, strict=True)):
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 3 + i * height}" width="{x(value) - _LABEL:.1f}" height="{height}"'
                f' fill="{colour}"/>'
            )
        parts.append(_text(x(max(bar.values)) + 6, y + 16, bar.text))
        y += _ROW
    if chart.mark is not None:
        at = f"{x(chart.mark):.1f}"
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{top}" y2="{y}" stroke="#c0392b" stroke-dasharray="4 3"/>'
        )
    return y


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
