"""``torchrun --nproc-per-node N -m training --config FILE [key=value ...]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from training.config import TrainConfig
from training.errors import ConfigError
from training.shutdown import run_process

_FIRST_TELLS_S = 10.0
"""What rank 0 has to find a mistake that all ranks find, and to tell it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code: 0, or 2 for bad input, told in one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m training", description="Train a small decoder.")
    parser.add_argument("--config", required=True, help="YAML file, see training/configs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for instance optimizer.lr=3e-4")
    options = parser.parse_args(arguments)
    try:
        config = TrainConfig.load(options.config, options.overrides)
    except ConfigError as error:
        # Under torchrun all ranks find the same mistake in the same file: the first tells it. It ends the others, and
        # would be ended untold if one of them were faster.
        if _rank() > 0:
            time.sleep(_FIRST_TELLS_S)
        return _refuse(error)

    # Only now, so that a mistake in the configuration is told at once: torch takes seconds to import.
    from checkpoint.errors import CheckpointError
    from omniload.errors import OmniloadError
    from storage.errors import BadRequest, StorageError
    from training.errors import TrainingError
    from training.train import train

    try:
        train(config)
    except (BadRequest, CheckpointError, OmniloadError, StorageError, TrainingError) as error:
        if isinstance(error, (ValueError, LookupError, FileNotFoundError)):
            return _refuse(error)
        raise
    return 0


def _refuse(error: Exception) -> int:
    where = f"rank {_rank()}: " if _rank() else ""
    sys.stderr.write(f"{where}error: {error}\n")
    return 2


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    run_process(main)
