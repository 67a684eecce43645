"""Which nodes the actors of a job run on: spare processors of nodes that train come first, then those of others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import Loader

_LEAST_CPUS = 1.0
"""What a loader that reserves nothing is taken to need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the cluster, as far as placement looks at it."""

    name: str
    """Ray's name."""
    cpus: float
    """Processors."""
    ranks: int = 0
    """Ranks of the job that run on it, each of which keeps a processor busy."""
    trains: bool = False
    """Whether the job trains on it."""
    resources: Mapping[str, float]
    """Custom resources."""
    addresses: frozenset[str] = frozenset()
    """What it is called in the network."""


def places(
    loaders: Sequence[Loader], nodes: Sequence[Node], *, cpus: float, resources: Mapping[str, float]
) -> dict[str, str]:
    """The nodes of loaders, by their names.

    Each goes to a node that has the resources: one that trains, if it has processors to spare; else any that has; else
    the one that is least overloaded. One that stands by goes where none that reads its sources is, if there is such a
    node. A pure function: whoever makes an actor comes to the same.

    Args:
        loaders: all of them, in order. One that no node has the resources for is left out.
        nodes: those alive.
        cpus: processors that each reserves.
        resources: custom resources likewise.
    """
    need = max(cpus, _LEAST_CPUS)
    room = {node.name: node.cpus - node.ranks for node in nodes}
    left = {node.name: dict(node.resources) for node in nodes}
    placed: dict[str, str] = {}
    for loader in sorted(loaders, key=lambda one: one.shadow):
        known = {
            placed[one.name]
            for one in loaders
            if one.name in placed and set(one.sources) & set(loader.sources) and loader.shadow
        }
        able = [
            node
            for node in nodes
            if all(left[node.name].get(name, 0) >= amount for name, amount in resources.items())
        ]
        if not able:
            continue
        chosen = min(
            able,
            key=lambda node: (
                node.name in known,
                room[node.name] < need,
                not node.trains,
                -room[node.name],
                node.name,
            ),
        )
        placed[loader.name] = chosen.name
        room[chosen.name] -= need
        for name, amount in resources.items():
            left[chosen.name][name] -= amount
    return placed


def home(nodes: Sequence[Node], own: str, master: str | None) -> str:
    """The node of rank 0: the one that the launcher named to all ranks; by default the own one."""
    named = [node.name for node in nodes if master in node.addresses]
    return own if own in named or not named else named[0]


def nodes_of(job: Job, own: str | None = None) -> list[Node]:
    """The nodes of the cluster. Those that train have a constructor of the job, or a GPU, or are the own one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    there = job.actors()
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = []
    for one in found:
        if not one["Alive"]:
            continue
        name, total = one["NodeID"], one["Resources"]
        ours = name == own or job.constructor(name) in there
        nodes.append(
            Node(
                name=name,
                cpus=total.get("CPU", 0.0),
                ranks=ranks if ours else 0,
                trains=ours or total.get("GPU", 0) > 0,
                resources=total,
                addresses=frozenset({one["NodeManagerAddress"], one["NodeManagerHostname"]}),
            )
        )
    return nodes


def preferring(node: str | None) -> dict[str, Any]:
    """Ray's option for an actor that is to run on a node if it can; elsewhere if the node is full, or gone."""
    if node is None:
        return {}
    strategy = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    return {"scheduling_strategy": strategy}
