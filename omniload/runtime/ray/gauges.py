"""The numbers of a job as metrics of Ray, whose agent on each node gives them to Prometheus with Ray's own."""

from __future__ import annotations

import math

from ray.util.metrics import Gauge

from omniload.observing.metrics import JOB_LABEL, METRICS
from omniload.observing.stats import JobStats


class Gauges:
    """A gauge for each of `omniload.observing.metrics.METRICS`, called as it is there, after Ray's prefix ``ray_``."""

    def __init__(self) -> None:
        self._gauges = {
            metric.name: Gauge(metric.name, metric.help, (JOB_LABEL, *metric.labels)) for metric in METRICS
        }

    def set(self, job: JobStats) -> None:
        """Set them all; what is not known stays as it was."""
        for metric in METRICS:
            for labels, value in metric.samples(job):
                if not math.isnan(value):
                    tags = dict(zip((JOB_LABEL, *metric.labels), (job.job, *labels), strict=True))
                    self._gauges[metric.name].set(value, tags)
