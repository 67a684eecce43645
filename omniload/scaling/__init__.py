"""Scaling: how many loaders each source of a job needs, in which actors, and when that changes.

Pure functions and values; what starts actors and moves leases is a runtime. None of it is an argument of the stream:
scaling changes who reads a window, never the order of the samples.

::

    profile.py      SourceProfile: what a source costs, measured on its own samples
    demand.py       Outlook: the share of the stream of each source, now and at most in the steps to come
    actors.py       Reader, ActorSpec: who reads what with how much; budgets and limits
    partition.py    profiles and demand -> Partition: readers and actors that keep up, within a budget
    grouping.py     cheap sources into shared actors
    layout.py       readers and actors for one rate, whatever they cost
    observation.py  what a scaler is told, and what it decides
    policy.py       when anything changes
    scaler.py       Scaler: observations -> decisions, with hysteresis and cool-down; replay of a log

A *reader* is one `omniload.loader.SourceLoader`: it reads one window at a time. The readers of a source share its
windows by leases (`omniload.runtime.leases`), as number ``index`` of ``of``.
"""

from __future__ import annotations

from omniload.scaling.actors import ActorLimits, ActorSpec, Budget, Reader, resized
from omniload.scaling.demand import Outlook, outlook, step_tokens
from omniload.scaling.observation import Observation, ScalingDecision, ScalingInputs, SourceLoad
from omniload.scaling.partition import Partition, Shortfall, partition
from omniload.scaling.policy import ScalingPolicy
from omniload.scaling.profile import SourceProfile, profile_source
from omniload.scaling.scaler import Scaler, ScalerStart, replay

__all__ = [
    "ActorLimits",
    "ActorSpec",
    "Budget",
    "Observation",
    "Outlook",
    "Partition",
    "Reader",
    "Scaler",
    "ScalerStart",
    "ScalingDecision",
    "ScalingInputs",
    "ScalingPolicy",
    "Shortfall",
    "SourceLoad",
    "SourceProfile",
    "outlook",
    "partition",
    "profile_source",
    "replay",
    "resized",
    "step_tokens",
]
