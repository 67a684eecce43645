"""What was trained on against what the mixture asks for, source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.demo.charts import svg
from training.demo.evidence import GlobalBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShares:
    """One source's share of the tokens at each step, as fractions."""

    name: str
    """Name of the source."""
    realised: tuple[float, ...]
    """Share of the step's tokens."""
    cumulative: tuple[float, ...]
    """Share of all tokens up to and including the step."""
    declared: tuple[float, ...]
    """Share that the schedule asks for at the step."""
    declared_cumulative: tuple[float, ...]
    """Share that the schedule asks for on average up to the step, every step counting by its tokens."""


def source_shares(
    batches: Mapping[int, GlobalBatch], weights_at: Mapping[int, Mapping[str, float]]
) -> list[SourceShares]:
    """Counts tokens by source and step.

    Args:
        batches: Global batches by step.
        weights_at: The schedule: weights of the sources from a step on, by that step; needs a step 0.
    """
    steps = sorted(batches)
    names = sorted({name for weights in weights_at.values() for name in weights})
    tokens: list[Counter[str]] = []
    for step in steps:
        tokens.append(Counter())
        for samples in batches[step].values():
            for sample in samples:
                tokens[-1][sample.source] += sample.end - sample.start
    totals = [counter.total() for counter in tokens]
    declared = [_weights(weights_at, step) for step in steps]
    return [
        SourceShares(
            name=name,
            realised=tuple(
                counter[name] / max(1, total) for counter, total in zip(tokens, totals, strict=True)
            ),
            cumulative=_running([counter[name] for counter in tokens], totals),
            declared=tuple(weights.get(name, 0.0) for weights in declared),
            declared_cumulative=_running(
                [weights.get(name, 0.0) * total for weights, total in zip(declared, totals, strict=True)],
                totals,
            ),
        )
        for name in names
    ]


def schedule_of(mixture: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """The weights in force from each scheduled step on, read from a mixture file's content."""
    weights = {name: float(source["weight"]) for name, source in mixture["sources"].items()}
    schedule = {0: weights}
    for stage in sorted(mixture.get("schedule", []), key=lambda stage: int(stage["step"])):
        weights = {**weights, **stage.get("weights", {})}
        schedule[int(stage["step"])] = weights
    return schedule


def mixture_chart(shares: Sequence[SourceShares]) -> str:
    """One panel per source: bars for the steps, lines for the running shares."""
    columns, panel_width, panel_height = 2, 480, 232
    top = 34
    rows = -(-len(shares) // columns)
    parts = [
        svg.legend(
            60,
            16,
            [
                ("realised in the step", "#bfdbfe", ""),
                ("realised so far", "#1d4ed8", ""),
                ("declared so far", "#d97706", "6 4"),
                ("declared at the step", "#9ca3af", "2 3"),
            ],
        )
    ]
    for index, share in enumerate(shares):
        row, column = divmod(index, columns)
        parts.append(_panel(share, left=column * panel_width + 60, top=top + row * panel_height + 22))
    return svg.picture(
        960, top + rows * panel_height, "Realised and declared mixture by source and step", parts
    )


def _panel(share: SourceShares, *, left: float, top: float) -> str:
    count = len(share.realised)
    frame = svg.Frame(
        left=left, top=top, width=390, height=150, x_domain=(-0.5, max(1, count) - 0.5), y_domain=(0, 1)
    )
    parts = [
        svg.text(left, top - 8, share.name, bold=True),
        frame.axes(
            x_title="step",
            y_title="share of tokens",
            x_ticks=svg.linear_ticks(0, max(1, count - 1), whole=True),
            y_ticks=[0, 0.25, 0.5, 0.75, 1],
            y_label=lambda tick: f"{tick:.0%}",
        ),
    ]
    indices = svg.thin(range(count))
    width = frame.width / max(1, len(indices))
    for index in indices:
        y = frame.y(share.realised[index])
        title = (
            f"{share.name}, step {index}: {share.realised[index]:.1%} of the step, {share.cumulative[index]:.1%} "
            f"so far (declared {share.declared_cumulative[index]:.1%})"
        )
        x = frame.x(index) - width / 2 + 0.5
        parts.append(svg.rectangle(x, y, width - 1, frame.top + frame.height - y, "#bfdbfe", title=title))
    for values, color, dash, stroke in (
        (share.declared, "#9ca3af", "2 3", 1.5),
        (share.declared_cumulative, "#d97706", "6 4", 2),
        (share.cumulative, "#1d4ed8", "", 2),
    ):
        points = [(frame.x(index), frame.y(values[index])) for index in indices]
        parts.append(svg.line(points, color, dash=dash, width=stroke))
    return "".join(parts)


def _weights(weights_at: Mapping[int, Mapping[str, float]], step: int) -> dict[str, float]:
    """The schedule's weights at a step, scaled to sum to one."""
    weights = weights_at[max(begin for begin in weights_at if begin <= step)]
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _running(parts: Sequence[float], totals: Sequence[float]) -> tuple[float, ...]:
    """Sum of the parts so far over the sum of the totals so far."""
    part = total = 0.0
    shares = []
    for value, whole in zip(parts, totals, strict=True):
        part, total = part + value, total + whole
        shares.append(part / total if total else 0.0)
    return tuple(shares)
