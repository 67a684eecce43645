"""What another process answers, in another environment: results must not depend on either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

VECTOR_FEATURES: str = " ".join(
    np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])  # type: ignore[call-overload]
)
"""For ``NPY_DISABLE_CPU_FEATURES``: all vector instructions that numpy would choose at run time."""


def printed(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints, run from the folder that the tests lie in.

    Args:
        script: text of the program.
        arguments: of it.
        environment: variables that it has besides those of this process.
    """
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | environment,
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
