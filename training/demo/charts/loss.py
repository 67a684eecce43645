"""Loss curves laid over each other, and how far each is from the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from training.demo.charts import svg
from training.demo.evidence import Difference

# Colour, width and dash of the curves, such that equal ones on top of each other can all be seen.
_REFERENCE = ("#94a3b8", 9.0, "")
_OTHERS = (("#d97706", 2.5, ""), ("#2563eb", 2.5, "7 4"), ("#059669", 2.5, "2 4"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """The loss of one run."""

    name: str
    """What the legend calls it."""
    points: Sequence[tuple[int, float]]
    """Step and loss in nats per token."""
    killed: bool = False
    """Whether the run was killed after its last point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceCurve:
    """How far one run's loss is from the reference."""

    name: str
    """What the legend calls it."""
    points: Sequence[Difference]
    """By step."""
    color: int
    """Index of its colour, in the order of the curves that `loss_chart` draws after the first."""


def loss_chart(curves: Sequence[LossCurve]) -> str:
    """Loss over steps; the first curve is drawn broad so that the others lie visibly inside it."""
    losses = [loss for curve in curves for _, loss in curve.points if math.isfinite(loss)] or [0.0]
    last_step = max((step for curve in curves for step, _ in curve.points), default=1)
    low, high = min(losses), max(losses)
    margin = 0.06 * (high - low) or 1.0
    frame = svg.Frame(
        left=70,
        top=36,
        width=870,
        height=290,
        x_domain=(0, max(1, last_step)),
        y_domain=(low - margin, high + margin),
    )
    parts = [
        frame.axes(
            x_title="step",
            y_title="loss (nats per token)",
            x_ticks=svg.linear_ticks(0, last_step, most=10, whole=True),
            y_ticks=svg.linear_ticks(low - margin, high + margin),
        )
    ]
    styles = [_REFERENCE, *itertools.islice(itertools.cycle(_OTHERS), len(curves))]
    for curve, (color, width, dash) in zip(curves, styles, strict=False):
        points = [
            (frame.x(step), frame.y(loss)) for step, loss in svg.thin(curve.points) if math.isfinite(loss)
        ]
        parts.append(svg.line(points, color, width=width, dash=dash))
        if curve.killed and points:
            parts.append(_kill_mark(*points[-1], color))
    parts.append(_hover_columns(frame, curves))
    entries = [(curve.name, color, dash) for curve, (color, _, dash) in zip(curves, styles, strict=False)]
    parts.append(svg.legend(70, 16, entries))
    return svg.picture(960, 376, "Training loss of every run by step", parts)


def difference_chart(curves: Sequence[DifferenceCurve], *, rtol: float, floor: float, title: str) -> str:
    """Relative loss difference over steps on a logarithmic axis, with the tolerance as a line.

    Args:
        curves: One per run that is compared.
        rtol: The tolerance.
        floor: The smallest value of the axis; exact equality is drawn there and labelled 0.
        title: Shown above the plot.
    """
    steps = [point.step for curve in curves for point in curve.points] or [0, 1]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    top = 10.0 ** (math.log10(rtol) + 1)
    frame = svg.Frame(
        left=76,
        top=56,
        width=380,
        height=210,
        x_domain=(first, last),
        y_domain=(floor, top),
        y_logarithmic=True,
    )
    decades = round(math.log10(top / floor))
    ticks = [floor * 10.0**exponent for exponent in range(0, decades + 1, max(1, decades // 5))]
    parts = [
        svg.text(8, 16, title, bold=True),
        frame.axes(
            x_title="step",
            y_title="relative difference",
            x_ticks=svg.linear_ticks(first, last, whole=True),
            y_ticks=ticks,
            y_label=lambda tick: "0" if tick <= floor else f"1e{round(math.log10(tick))}",
        ),
        svg.line([(76, frame.y(rtol)), (456, frame.y(rtol))], "#dc2626", dash="6 4", width=1.5),
        svg.text(452, frame.y(rtol) - 6, f"allowed: {rtol:.0e}", anchor="end", color="#dc2626"),
    ]
    entries = []
    for curve in curves:
        color = _OTHERS[curve.color % len(_OTHERS)][0]
        entries.append((curve.name, color, ""))
        for point in svg.thin(curve.points):
            x, y = frame.x(point.step), frame.y(point.relative if math.isfinite(point.relative) else top)
            hint = svg.tooltip(f"{curve.name}, step {point.step}: {point.relative:.2e}")
            parts.append(svg.element("circle", hint, cx=x, cy=y, r=3.2, fill=color, fill_opacity=0.8))
    parts.append(svg.legend(76, 40, entries))
    return svg.picture(470, 316, f"{title}: relative loss difference by step", parts)


def _kill_mark(x: float, y: float, color: str) -> str:
    """A cross where a run was killed."""
    strokes = [[(x - 7, y - 7), (x + 7, y + 7)], [(x - 7, y + 7), (x + 7, y - 7)]]
    return "".join(svg.line(stroke, color, width=3) for stroke in strokes) + svg.text(
        x + 10, y - 10, "killed", color=color, bold=True
    )


def _hover_columns(frame: svg.Frame, curves: Sequence[LossCurve]) -> str:
    """Invisible columns, one per step, whose tooltips give every run's loss there."""
    at: dict[int, list[str]] = {}
    for curve in curves:
        for step, loss in curve.points:
            at.setdefault(step, []).append(f"{curve.name}: {loss:.6f}")
    width = frame.width / max(1, len(at))
    parts = []
    for step in svg.thin(sorted(at)):
        title = "\n".join([f"step {step}", *at[step]])
        x = frame.x(step) - width / 2
        parts.append(svg.rectangle(x, frame.top, width, frame.height, "transparent", title=title))
    return "".join(parts)
