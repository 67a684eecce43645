"""How evenly the attention work of each step was spread over the ranks, as a heat map."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from training.demo.charts import svg
from training.demo.logs import RunLog

_COLD, _NEUTRAL, _HOT = (37, 99, 235), (248, 250, 252), (220, 38, 38)
_MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Work of each rank in each step, relative to the mean over the data-parallel ranks."""

    name: str
    """Name and layout of the run."""
    steps: tuple[int, ...]
    """Steps, in order."""
    ranks: tuple[str, ...]
    """What the rows are called."""
    ratios: tuple[tuple[float, ...], ...]
    """Work of a rank over the mean, by rank and step; 1 is even, 1.2 is 20 % more than its share."""

    @property
    def worst_by_step(self) -> tuple[float, ...]:
        """The busiest rank's ratio in each step: the factor by which the step waits for it."""
        return tuple(max(column) for column in zip(*self.ratios, strict=True))


def imbalance_of(name: str, log: RunLog) -> Imbalance:
    """Computes the ratios from the costs (squared segment lengths) of the lanes that each rank ran.

    Only steps that every rank logged count.
    """
    common = set.intersection(*({record.step for record in records} for records in log.steps.values()))
    steps = tuple(sorted(common))
    costs: dict[int, dict[int, int]] = {}
    places: dict[int, tuple[int, int]] = {}
    for rank, records in log.steps.items():
        costs[rank] = {record.step: sum(lane.cost for lane in record.lanes) for record in records}
        places[rank] = (records[0].dp_rank, records[0].tp_rank)
    # Ranks along the tensor axis share their work: one of each counts towards the mean.
    leaders = [rank for rank, (_, tp_rank) in places.items() if tp_rank == 0]
    means = [statistics.fmean(costs[rank][step] for rank in leaders) or 1.0 for step in steps]
    return Imbalance(
        name=name,
        steps=steps,
        ranks=tuple(f"rank {rank} (dp {dp}, tp {tp})" for rank, (dp, tp) in places.items()),
        ratios=tuple(
            tuple(costs[rank][step] / mean for step, mean in zip(steps, means, strict=True))
            for rank in places
        ),
    )


def imbalance_chart(runs: Sequence[Imbalance]) -> str:
    """One heat map per run over a common colour scale, which is symmetric around 1."""
    ratios = [ratio for run in runs for row in run.ratios for ratio in row]
    spread = max([abs(ratio - 1) for ratio in ratios], default=0.0) or 0.01
    left, width, cell_height, top = 140, 800, 22, 48
    parts = [_color_bar(spread)]
    for run in runs:
        columns = svg.thin(range(len(run.steps)))
        rows = list(zip(run.ranks, run.ratios, strict=True))[:_MAX_RANKS]
        cell_width = width / max(1, len(columns))
        worst = statistics.median(run.worst_by_step) if run.steps else 1.0
        parts.append(
            svg.text(
                8,
                top + 4,
                f"{run.name}: in the median step the busiest rank has {worst:.3f} × the mean",
                bold=True,
            )
        )
        for position, (rank, values) in enumerate(rows):
            y = top + 14 + position * cell_height
            parts.append(svg.text(left - 8, y + 15, rank, anchor="end"))
            for column, index in enumerate(columns):
                title = f"{rank}, step {run.steps[index]}: {values[index]:.3f} × the mean"
                parts.append(
                    svg.rectangle(
                        left + column * cell_width,
                        y,
                        cell_width - 1,
                        cell_height - 1,
                        _color((values[index] - 1) / spread),
                        title=title,
                    )
                )
        bottom = top + 14 + len(rows) * cell_height
        for column, index in enumerate(columns):
            if column % max(1, len(columns) // 10) == 0:
                x = left + (column + 0.5) * cell_width
                parts.append(svg.text(x, bottom + 15, str(run.steps[index]), anchor="middle"))
        parts.append(svg.text(left + width / 2, bottom + 34, "step", anchor="middle", color=svg.MUTED))
        top = bottom + 66
    return svg.picture(960, top - 22, "Attention cost of each rank relative to the mean, by step", parts)


def _color(position: float) -> str:
    """A colour between blue (-1: less than its share), near white (0) and red (+1)."""
    position = min(max(position, -1.0), 1.0)
    end = _HOT if position > 0 else _COLD
    mixed = (
        round(neutral + abs(position) * (extreme - neutral))
        for neutral, extreme in zip(_NEUTRAL, end, strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _color_bar(spread: float) -> str:
    """The legend of the colours."""
    left, width, count = 600, 200, 41
    cells = [
        svg.rectangle(
            left + index * width / count, 6, width / count + 0.5, 12, _color(2 * index / (count - 1) - 1)
        )
        for index in range(count)
    ]
    labels = [
        svg.text(left - 8, 16, "cost ÷ mean over dp ranks", anchor="end", color=svg.MUTED),
        svg.text(left, 32, f"{max(0.0, 1 - spread):.2f}", anchor="middle"),
        svg.text(left + width / 2, 32, "1", anchor="middle"),
        svg.text(left + width, 32, f"{1 + spread:.2f}", anchor="middle"),
    ]
    return "".join(cells + labels)
