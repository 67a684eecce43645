"""Packing: the candidates of a step into packs. Pure functions of arrays, exact in integers.

- `decreasing` – whole pieces, longest first: first fit and best fit;
- `concatenate` – pieces end to end in the order given, cut where a pack is full;
- `workload` – as many packs as there are lanes, of any length up to a bound and of as equal cost as can be;
- `delay` – which long documents wait for a step in which every lane gets one of their kind;
- `choose` – which of the packs a step takes.
"""

from omniload.planner.packing.choose import MAX_WAIT_STEPS, choose_packs
from omniload.planner.packing.concatenate import concatenate
from omniload.planner.packing.decreasing import best_fit_decreasing, first_fit_decreasing
from omniload.planner.packing.delay import DelayReport, default_thresholds, delay_report, held_back
from omniload.planner.packing.parts import Packing
from omniload.planner.packing.workload import workload, workload_by_rank

__all__ = [
    "MAX_WAIT_STEPS",
    "DelayReport",
    "Packing",
    "best_fit_decreasing",
    "choose_packs",
    "concatenate",
    "default_thresholds",
    "delay_report",
    "first_fit_decreasing",
    "held_back",
    "workload",
    "workload_by_rank",
]
