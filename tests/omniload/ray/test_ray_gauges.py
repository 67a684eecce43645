"""The numbers of a job as metrics of Ray."""

from __future__ import annotations

import urllib.request

import pytest
import ray

from omniload.observing.metrics import METRICS
from omniload.runtime.ray.gauges import Gauges
from tests.omniload.mixtures import hard_mixture
from tests.omniload.observing import job
from tests.omniload.ray.jobs import Jobs, until


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_every_metric_is_one_that_ray_takes() -> None:
    gauges = Gauges()
    assert gauges._gauges.keys() == {metric.name for metric in METRICS}
    gauges.set(job())


@pytest.mark.slow
def test_rays_agent_exports_the_numbers_of_a_running_job(jobs: Jobs) -> None:
    pytest.importorskip("opentelemetry", reason="Ray's agents export metrics only with ray[default]")
    [node] = ray.nodes()  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def exported() -> set[str]:
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.partition("{")[0] for line in lines if f'job_name="{jobs.name}"' in line}

    with jobs.loader(hard_mixture(jobs.folder, steps=10_000)) as loader:
        next(loader.steps())
        until(
            lambda: {"ray_omniload_step", "ray_omniload_source_failures_total"} <= exported(),
            "they are there",
        )
