"""What the actors of a job know, and how they find each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from omniload.mixture import Mixture
from omniload.runtime.feed import LoaderLost
from omniload.runtime.options import Settings
from omniload.runtime.ray.layout import Layout

PLANNER = "planner"
_CONSTRUCTOR = "constructor-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A loader that the ranks of a training job share."""

    name: str
    """Tells it from other jobs on the cluster."""
    digest: str
    """Of what its ranks have to agree on."""
    mixture: Mixture
    """What is loaded."""
    settings: Settings
    """How."""
    layout: Layout
    """The loaders that it begins with."""
    log: str
    """Folder or URL of the plan log."""
    slow_s: float
    """A read that takes longer goes to another loader, if there is one."""
    loader_options: Mapping[str, Any]
    """What Ray reserves for each loader."""
    import_path: tuple[str, ...]
    """Where Python finds what the mixture names: functions, datasets."""

    @property
    def namespace(self) -> str:
        """Ray's name for what belongs to the job."""
        return f"omniload-{self.name}"

    def constructor(self, node: str) -> str:
        """Name of the constructor on a node."""
        return f"{_CONSTRUCTOR}{node}"

    def is_constructor(self, name: str) -> bool:
        """Whether an actor of that name is one."""
        return name.startswith(_CONSTRUCTOR)

    def find(self, name: str) -> Any:
        """The handle of an actor.

        Raises:
            LoaderLost: there is none of that name.
        """
        if not ray.is_initialized():  # this call would start a cluster
            raise LoaderLost(f"{name} is not there, as this process left the cluster")
        try:
            return ray.get_actor(name, namespace=self.namespace)
        except ValueError:
            raise LoaderLost(f"{name} is not there") from None

    def actors(self) -> set[str]:
        """Names of the actors that are there, be they just being made anew."""
        named: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
        return {one["name"] for one in named if one["namespace"] == self.namespace}

    def has(self, name: str) -> bool:
        """Whether there is an actor of that name, be it just being made anew."""
        try:
            self.find(name)
        except LoaderLost:
            return False
        return True

    def enter(self) -> None:
        """Make a process of an actor find the same modules as the ranks do."""
        sys.path += [entry for entry in self.import_path if entry not in sys.path]
