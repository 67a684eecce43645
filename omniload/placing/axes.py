"""The axes of a trainer's mesh, which of them bring other data, and how one is written."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from omniload.errors import PlaceError
from omniload.suggest import suggest

DATA_AXES = ("dp", "dp_replicate", "dp_shard", "ep")
"""Axes whose ranks train on different lanes.

``ep`` is one of them: expert parallelism cuts the experts only. Every other parameter is whole on each rank of the
axis, so these ranks are data parallel to each other, and the tokens that they route to each other's experts are
their own. An ``ep`` that reuses the ranks of another axis adds none to the mesh and is left out of it.
"""
SHARED_AXES = ("pp", "cp", "tp")
"""Axes whose ranks work together on the same lanes: by stages, by slices of the tokens, by parts of each matrix."""
AXES = DATA_AXES + SHARED_AXES
"""Every axis a mesh may have, each at most once and in any order."""

MOST_RANKS = 2**24
"""A mesh of more ranks is taken for a slip; it keeps tables by rank small."""


def check_mesh(names: Sequence[str], sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of the axes of a mesh, as plain integers.

    Raises:
        PlaceError: an axis is unknown or there twice, or its size is not a whole number from 1 on; or there are too
            many ranks.
    """
    if len(names) != len(sizes):
        raise PlaceError(f"mesh: {len(names)} axes and {len(sizes)} sizes; give one size per axis")
    whole: list[int] = []
    for position, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if name not in AXES:
            raise PlaceError(f"mesh: there is no axis {name!r:.40}{suggest(str(name), AXES)}")
        if name in names[:position]:
            raise PlaceError(
                f"mesh: axis '{name}' is there twice; multiply its sizes, or name one of them otherwise"
            )
        try:
            whole.append(operator.index(size))
        except TypeError:
            raise PlaceError(f"mesh: size of '{name}' is {size!r:.40}, not a whole number") from None
        if isinstance(size, bool) or whole[-1] < 1:
            raise PlaceError(
                f"mesh: size of '{name}' is {size}; give a whole number from 1 on, or leave it out"
            )
        if math.prod(whole) > MOST_RANKS:
            raise PlaceError(
                f"mesh: {text_of(names, whole):.200} is more than {MOST_RANKS} ranks; check the sizes"
            )
    return tuple(whole)


def check_world_size(names: Sequence[str], sizes: Sequence[int], world_size: int) -> None:
    """A mesh has as many ranks as the job.

    Raises:
        PlaceError: it has not; names the sizes of single axes that would do.
    """
    ranks = math.prod(sizes)
    if ranks == world_size:
        return
    fitting = [
        f"{name}={world_size // (ranks // size)}"
        for name, size in zip(names, sizes, strict=True)
        if world_size > 0 and world_size % (ranks // size) == 0
    ]
    remedy = (
        f"fitting would be {' or '.join(fitting)}" if fitting else f"start {ranks} ranks, or change the sizes"
    )
    raise PlaceError(
        f"mesh: {text_of(names, sizes)} is {ranks} ranks, but the job has {world_size}; {remedy}"
    )


def parse_mesh(text: str) -> list[tuple[str, int]]:
    """Axes and sizes of a mesh written like ``pp=4,dp=8,cp=2``, outermost first.

    Raises:
        PlaceError: it is not written like that.
    """
    axes = []
    for part in text.split(","):
        name, equals, size = (one.strip() for one in part.partition("="))
        if not equals or not size.isdecimal() or len(size) > 9:
            raise PlaceError(
                f"mesh: '{part.strip():.40}' is not an axis and its size; write it like pp=4,dp=8,cp=2, outermost first"
            )
        axes.append((name, int(size)))
    return axes


def text_of(names: Sequence[str], sizes: Sequence[int]) -> str:
    """A mesh as people write it, outermost axis first."""
    return " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=False)) or "dp=1"
