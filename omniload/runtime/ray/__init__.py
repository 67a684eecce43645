"""The roles as actors of a Ray cluster: loaders, a planner and constructors, shared by all ranks of a job.

::

    LoaderActor ── metadata ──► PlannerActor ── plan ──► ConstructorActor ──► RayRuntime in each rank
    a group of sources          one per job              one per node          fetches ahead, builds lanes
         └──────────────── payload, through the object store ──┘

Every actor can die at any moment and be made again, because nothing it holds is more than a cache: payload is derived
from addresses, plans from the stream's state and the decisions in the plan log. Who asks an actor asks again until it
is back, within a time limit.
"""
