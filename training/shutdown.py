"""How a run ends: on SIGTERM between two steps, and at last with its process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self


class StopRequest:
    """Turns SIGTERM into a flag while it is entered; read it at step boundaries.

    Nothing is done in the signal handler: what must be consistent across ranks is agreed in the step's own
    all-reduce and saved after it.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


def run_process(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end the process with its exit code, or 1 if it raises, without tearing the interpreter down.

    What is registered for the end of the process runs as ever. But a thread of gloo lets go of a collective's tensors
    some time after the collective is done, and needs the interpreter for it. If that is being torn down, the process
    aborts (https://github.com/pytorch/pytorch/issues/190489). `torch.distributed.destroy_process_group` does not see to
    that: the threads of a group end with the last reference to it, and torch keeps some.
    """
    try:
        code = main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
