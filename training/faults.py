"""Faults made on purpose. A proof that a run continued exactly is worth something only if these make it fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from training.config import FaultConfig
from training.errors import ConfigError
from training.runlog import LaneRecord
from training.step import Lane


class Faults:
    """Applies the faults of a configuration; with none configured, does nothing.

    Args:
        config: which faults.
        dp_rank: of this process; the fault of a repeated sample is made on data-parallel rank 0 only.
    """

    def __init__(self, config: FaultConfig, dp_rank: int) -> None:
        self._config = config
        self._dp_rank = dp_rank
        self._before: tuple[Lane, LaneRecord] | None = None

    def on_restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after state was restored."""
        if self._config.drop_optimizer:
            optimizer.state.clear()

    def on_lanes(
        self, step: int, lanes: Sequence[Lane], records: Sequence[LaneRecord]
    ) -> tuple[list[Lane], list[LaneRecord]]:
        """Called with the lanes of a step and their log records; returns those to train on and to log.

        The number of lanes never changes: the ranks would wait for one another's collectives.

        Raises:
            ConfigError: the fault needs the step before, which another process ran.
        """
        lanes, records = list(lanes), list(records)
        before, self._before = self._before, (lanes[0], records[0])
        if self._config.repeat_sample == step:
            if before is None:
                raise ConfigError(f"faults.repeat_sample: {step} is the first step here; name a later one")
            if self._dp_rank == 0:
                lanes[0] = {**before[0], **_place_in_step(lanes[0])}
                records[0] = replace(before[1], lane=records[0].lane)
        if self._config.skip_lane is not None and self._config.skip_lane[0] == step:
            skipped = self._config.skip_lane[1]
            lanes = [_without_targets(lane) if lane["lane"] == skipped else lane for lane in lanes]
            records = [record for record in records if record.lane != skipped]
        return lanes, records

    def on_step_end(self, step: int) -> None:
        """Called when a step is logged."""
        if self._config.kill_after_step == step:
            os.kill(os.getpid(), signal.SIGKILL)


def _place_in_step(lane: Lane) -> dict[str, Any]:
    return {key: lane[key] for key in ("step", "lane", "is_last_in_step", "num_target_tokens")}


def _without_targets(lane: Lane) -> Lane:
    return {**lane, "targets": torch.full_like(lane["targets"], -100)}
