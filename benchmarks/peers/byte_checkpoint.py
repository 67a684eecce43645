"""The published ByteCheckpoint, of a state that is cut with FSDP2; a contender where the library is installed.

It asks for PyTorch before 2.6 and runs with later ones, so that pip has to be told not to look:
``pip install --no-deps bytecheckpoint==0.0.2 mmh3 cachetools universal-pathlib grpcio==1.69.0 protobuf==3.20.3``.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from benchmarks.checkpointing.ranks import TIMEOUT_S
from benchmarks.checkpointing.state import TrainingState

_LIBRARY: Final = "bytecheckpoint"
_FRAMEWORK: Final = "fsdp2"


def installed() -> bool:
    """Whether the library is there."""
    return find_spec(_LIBRARY) is not None


class ByteCheckpoint:
    """Saves with ``bytecheckpoint.save``, each as another step of a run of its own; nothing is fsynced.

    Args:
        state: what is saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = {"model": state.model, "optimizer": state.optimizer}
        self._num_saves = 0

    def save(self, path: Path) -> None:
        """Return when every rank has written."""
        self._save(path, fast_saving=False)

    def begin(self, path: Path) -> Callable[[], object]:
        """See `AsyncFormat`; rank 0 waits for all, as it is the one that is told."""
        written = threading.Event()
        self._save(path, fast_saving=True, callback=written.set)

        def wait() -> None:
            if dist.get_rank() == 0 and not written.wait(TIMEOUT_S):
                raise TimeoutError(f"bytecheckpoint did not finish a save within {TIMEOUT_S:g} s")

        return wait

    def load(self, path: Path) -> None:
        """Fill the live tensors."""
        _library().load(str(path), self._state, framework=_FRAMEWORK)

    def _save(self, path: Path, **how: Any) -> None:
        self._num_saves += 1
        _library().save(
            str(path),
            self._state,
            framework=_FRAMEWORK,
            global_steps=self._num_saves,  # without, ranks do not wait for each other
            ignore_append_global_steps_to_folder=True,
            **how,
        )


def _library() -> Any:
    # Rank 0 starts a server, which the daemons that ranks are here may not.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    logging.getLogger(_LIBRARY).setLevel(logging.ERROR)
    return importlib.import_module(_LIBRARY)
