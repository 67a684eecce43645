"""Where the time of saves and loads goes: phases by rank, stragglers over the mesh, a timeline, as one HTML page.

::

    with checkpoint.monitoring.recording("runs/x/spans"):  # on each rank
        ...  # train, save, load

    omniload ckpt report runs/x/spans/*.json --mesh 4x2 --out report.html
"""

from __future__ import annotations

from checkpoint.monitoring.page import report
from checkpoint.monitoring.phases import LOAD_PHASES, SAVE_PHASES, PhaseTimes, phase_times, stragglers
from checkpoint.monitoring.traces import read_spans, recording

__all__ = [
    "LOAD_PHASES",
    "SAVE_PHASES",
    "PhaseTimes",
    "phase_times",
    "read_spans",
    "recording",
    "report",
    "stragglers",
]
