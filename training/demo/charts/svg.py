"""The few pieces of SVG that the charts share: scales, axes, lines, text. No script, no outside resource.

All text goes through `text` or `tooltip` and all attributes through `element`, which escape; a chart's size is
bounded because every series is thinned to at most `MAX_POINTS` before it is drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

MAX_POINTS = 400
"""Most points of a series, columns of a heat map or bars of a timeline that are drawn."""
PALETTE = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#db2777")
"""Colours of series that need to be told apart."""
INK = "#1f2937"
"""Colour of text."""
MUTED = "#6b7280"
"""Colour of axis titles and notes."""
GRID = "#e5e7eb"
"""Colour of grid lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Maps values to pixels along one axis, linearly or by decades."""

    domain: tuple[float, float]
    """Values at both ends; must differ, and be positive for a logarithmic scale."""
    pixels: tuple[float, float]
    """Where the ends lie."""
    logarithmic: bool = False
    """Whether equal ratios take equal lengths."""

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside the domain are moved to its nearest end."""
        low, high = self.domain
        value = min(max(value, low), high)
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        start, end = self.pixels
        return start + (value - low) / (high - low) * (end - start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A plotting area inside a picture, with a scale for each direction."""

    left: float
    """Pixels from the left edge of the picture."""
    top: float
    """Pixels from its top edge."""
    width: float
    """Pixels of the plotting area."""
    height: float
    """Pixels of the plotting area."""
    x_domain: tuple[float, float]
    """Values at its left and right edge."""
    y_domain: tuple[float, float]
    """Values at its bottom and top edge."""
    y_logarithmic: bool = False
    """Whether the vertical axis is logarithmic."""

    @property
    def x(self) -> Scale:
        """Horizontal scale."""
        return Scale(domain=self.x_domain, pixels=(self.left, self.left + self.width))

    @property
    def y(self) -> Scale:
        """Vertical scale."""
        bottom = self.top + self.height
        return Scale(domain=self.y_domain, pixels=(bottom, self.top), logarithmic=self.y_logarithmic)

    def axes(
        self,
        *,
        x_title: str,
        y_title: str,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        y_label: Callable[[float], str] | None = None,
    ) -> str:
        """Grid lines, tick labels and titles of both axes."""
        x, y, bottom = self.x, self.y, self.top + self.height
        parts = []
        for tick in y_ticks:
            parts.append(line([(self.left, y(tick)), (self.left + self.width, y(tick))], GRID, width=1))
            label = y_label(tick) if y_label is not None else number(tick)
            parts.append(text(self.left - 8, y(tick) + 4, label, anchor="end"))
        for tick in x_ticks:
            parts.append(line([(x(tick), bottom), (x(tick), bottom + 4)], MUTED, width=1))
            parts.append(text(x(tick), bottom + 17, number(tick), anchor="middle"))
        parts.append(line([(self.left, bottom), (self.left + self.width, bottom)], MUTED, width=1))
        parts.append(text(self.left + self.width / 2, bottom + 36, x_title, anchor="middle", color=MUTED))
        middle = self.top + self.height / 2
        parts.append(text(self.left - 48, middle, y_title, anchor="middle", color=MUTED, vertical=True))
        return "".join(parts)


def picture(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A whole SVG that scales with the page; the label is what a screen reader says."""
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """One element; content is markup already, attribute values are escaped here."""
    written = []
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        written.append(f' {key.replace("_", "-") if key != "viewBox" else key}="{html.escape(shown)}"')
    return f"<{name}{''.join(written)}>{content}</{name}>"


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    color: str = INK,
    bold: bool = False,
    vertical: bool = False,
) -> str:
    """A line of text."""
    attributes: dict[str, str | float] = {"x": x, "y": y, "text_anchor": anchor, "fill": color}
    if bold:
        attributes["font_weight"] = "600"
    if vertical:
        attributes["transform"] = f"rotate(-90 {x:g} {y:g})"
    return element("text", html.escape(content), **attributes)


def tooltip(content: str) -> str:
    """What the browser shows when the pointer rests on the element that holds this."""
    return element("title", html.escape(content))


def line(
    points: Sequence[tuple[float, float]], color: str, *, width: float = 2, dash: str = "", opacity: float = 1
) -> str:
    """A line through points given in pixels."""
    attributes: dict[str, str | float] = {"fill": "none", "stroke": color, "stroke_width": width}
    attributes["stroke_linejoin"] = "round"
    if dash:
        attributes["stroke_dasharray"] = dash
    if opacity < 1:
        attributes["stroke_opacity"] = opacity
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


def rectangle(x: float, y: float, width: float, height: float, fill: str, *, title: str = "") -> str:
    """A filled rectangle, with a tooltip if a title is given."""
    content = tooltip(title) if title else ""
    return element("rect", content, x=x, y=y, width=max(width, 0.5), height=height, fill=fill)


def legend(x: float, y: float, entries: Sequence[tuple[str, str, str]], *, spacing: float = 22) -> str:
    """Names of series beside a stroke of each, in a row.

    Args:
        x: Left edge, in pixels.
        y: Base line of the text, in pixels.
        entries: Name, colour and dash pattern (empty for a solid line) of each series.
        spacing: Pixels between entries.
    """
    parts = []
    for name, color, dash in entries:
        parts.append(line([(x, y - 4), (x + 24, y - 4)], color, width=3, dash=dash))
        parts.append(text(x + 30, y, name))
        x += 30 + 6.6 * len(name) + spacing  # the width of text is estimated: SVG has no layout
    return "".join(parts)


def linear_ticks(low: float, high: float, *, most: int = 6, whole: bool = False) -> list[float]:
    """At most about `most` round values within the bounds, at steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A short decimal, with thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def thin(values: Sequence[_T], limit: int = MAX_POINTS) -> Sequence[_T]:
    """Every n-th value, with the smallest n that leaves at most `limit`."""
    return values[:: max(1, math.ceil(len(values) / limit))]
