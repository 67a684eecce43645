"""Placing: from a plan and a mesh to who does what. Pure functions; no plan depends on any of this.

::

    plan (lanes) + mesh
      │
      ├─ axes.py       the axes a mesh may have, which of them bring other data, how one is written
      ├─ tree.py       ClientPlaceTree: who runs which lane, who fetches it, who hears whom
      ├─ needs.py      Needs: what of a lane a pipeline stage has a use for
      ├─ slicing.py    which tokens of a lane each context-parallel rank has
      ├─ groups.py     hybrid data parallelism: wide groups for long sequences, single ranks for short ones
      │   └─ filling.py    sequences into groups of given widths
      ├─ encoders.py   which of all ranks encodes which image or clip
      ├─ exchange.py   and how the rows get from there to the backbone
      └─ fanout.py     messages per actor and step

Start with `tree.py`. Everything takes and gives ``int64`` arrays, compares whole numbers only and breaks ties by the
lower number, so each rank may work it out for itself and all find the same. Something else that depends on the
mesh is a module of its own here: a function of columns of the plan and of a tree.
"""

from __future__ import annotations

from omniload.placing.encoders import assign_encoders
from omniload.placing.exchange import Exchange, Parts, parts_of_slices
from omniload.placing.fanout import Fanout
from omniload.placing.groups import HybridGroups, hybrid_groups, uniform_groups
from omniload.placing.needs import Needs
from omniload.placing.tree import ClientPlaceTree

__all__ = [
    "ClientPlaceTree",
    "Exchange",
    "Fanout",
    "HybridGroups",
    "Needs",
    "Parts",
    "assign_encoders",
    "hybrid_groups",
    "parts_of_slices",
    "uniform_groups",
]
