"""A Ray cluster for as long as a benchmark runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from omniload.runtime.ray.cluster import system_config


@contextmanager
def cluster(*, object_store_bytes: int = 512 << 20) -> Iterator[str]:
    """One node that this process has joined; its address.

    Args:
        object_store_bytes: shared memory that it may take.
    """
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _system_config=system_config(),
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
