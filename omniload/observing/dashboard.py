"""The Grafana dashboard of the metrics of a job.

``python -m omniload.observing.dashboard > omniload/observing/dashboard.json`` writes the file that is imported into
Grafana. Its queries are put together from the definitions in `omniload.observing.metrics`, and its texts are theirs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Final

from omniload.observing import metrics
from omniload.observing.metrics import JOB_LABEL, Metric

NOT_SHOWN: Final = {
    metrics.SHADOW.name: "constant between failures; for joining with other series in queries",
    metrics.CALLS.name: "has no good or bad value; the busy time shows the load",
}
"""Metrics that no panel shows, and why."""

_RATE: Final = "rate({}[$__rate_interval])"
_INCREASE: Final = "increase({}[$__rate_interval])"
_DATA_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expression: str
    """PromQL, with ``{}`` for the series of each of `metrics` of the job looked at."""
    legend: str
    """Name of a series, with its labels as ``{{label}}``."""
    metrics: tuple[Metric, ...]
    """What it asks for."""

    def promql(self) -> str:
        """What Grafana sends."""
        return self.expression.format(*(f'{metric.name}{{{JOB_LABEL}="$job"}}' for metric in self.metrics))


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of series over time."""

    title: str
    """What it shows."""
    unit: str
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    """What it draws."""


def _panel(title: str, unit: str, expression: str, legend: str, *shown: Metric) -> Panel:
    return Panel(title, unit, (Query(expression, legend, shown),))


ROWS: Final = {
    "Does training wait?": (
        _panel("Stall of the worst rank", "s", "max by (quantile) ({})", "{{quantile}}", metrics.STALL),
        _panel("Tokens per second", "short", "sum({})", "all ranks", metrics.TOKENS),
        _panel("Imbalance of ranks", "none", "{}", "costliest over mean", metrics.IMBALANCE),
        _panel("Time to plan a step", "s", "{}", "{{quantile}}", metrics.PLAN),
        _panel("Time to fetch a step", "s", "max({})", "median of the worst rank", metrics.CLIENT_FETCH),
        _panel("Fewest steps held ready", "none", "min({})", "worst rank", metrics.CLIENT_QUEUE_STEPS),
        Panel(
            "Step",
            "none",
            (
                Query("{}", "given to all", (metrics.STEP,)),
                Query("max({})", "foremost rank", (metrics.CLIENT_STEP,)),
            ),
        ),
        _panel("Age of the numbers", "s", "time() - {}", "age", metrics.UPDATED),
        _panel("Left out of these charts", "none", "{}", "{{kind}}", metrics.LEFT_OUT),
    ),
    "What is trained on?": (
        _panel("Share of the stream", "percentunit", "{}", "{{source}}", metrics.REALISED),
        _panel("Share over declared", "none", "{} / {}", "{{source}}", metrics.REALISED, metrics.DECLARED),
        _panel("Tokens per second by source", "short", _RATE, "{{source}}", metrics.EMITTED),
        _panel("Rows quarantined", "short", _INCREASE, "{{source}}", metrics.FAILURES),
    ),
    "Which actor is slow?": (
        _panel("Busy share of time", "percentunit", _RATE, "{{actor}}", metrics.BUSY),
        _panel("Fetch of actors", "s", "{}", "{{actor}} {{quantile}}", metrics.ACTOR_FETCH),
        _panel("Restarts", "none", _INCREASE, "{{actor}}", metrics.RESTARTS),
        _panel("Stale answers refused", "none", _INCREASE, "{{actor}}", metrics.STALE_ANSWERS),
    ),
    "Where is memory?": (
        _panel("Queues of actors", "bytes", "{}", "{{actor}}", metrics.QUEUE),
        _panel("Queues of ranks", "bytes", "sum({})", "all ranks", metrics.CLIENT_QUEUE),
        _panel("Object store", "bytes", "{}", "all nodes", metrics.OBJECT_STORE),
        _panel("Resident memory of actors", "bytes", "{}", "{{actor}}", metrics.RESIDENT),
    ),
}
"""The panels, in rows under a title."""


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": _WIDTH * _PER_ROW, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        y += 1
        for i, panel in enumerate(row):
            x, down = _WIDTH * (i % _PER_ROW), _HEIGHT * (i // _PER_ROW)
            panels.append(_chart(panel) | {"gridPos": {"x": x, "y": y + down, "w": _WIDTH, "h": _HEIGHT}})
        y += _HEIGHT * -(-len(row) // _PER_ROW)
    return {
        "uid": "omniload",
        "title": "omniload",
        "tags": ["omniload"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _jobs()]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, start=1)],
    }


def _chart(panel: Panel) -> dict[str, Any]:
    about = dict.fromkeys(metric.help for query in panel.queries for metric in query.metrics)
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(about),
        "datasource": _DATA_SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _DATA_SOURCE,
                "expr": query.promql(),
                "legendFormat": query.legend,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _jobs() -> dict[str, Any]:
    query = f"label_values({metrics.STEP.name}, {JOB_LABEL})"
    return {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": _DATA_SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "jobs"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
