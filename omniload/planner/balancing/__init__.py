"""Balancing: which item, a pack or a document, goes into which lane.

Pure functions of integers. `methods` has what is to be called; each puts together an assignment (`lpt`, `kk`,
`bucketed`, `two_level`), the caps (`caps`) and exchanges between lanes (`refine`).
"""

from omniload.planner.balancing.items import Infeasible, Items, lane_sums
from omniload.planner.balancing.methods import METHODS, bucketed, hybrid, kk, lpt, none, two_level

__all__ = [
    "METHODS",
    "Infeasible",
    "Items",
    "bucketed",
    "hybrid",
    "kk",
    "lane_sums",
    "lpt",
    "none",
    "two_level",
]
