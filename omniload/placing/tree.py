"""The trainer's mesh as a tree of places: who runs which lane, who fetches it, who is sent what.

Everything here is derived after a plan is made, from the plan's lanes and the mesh. A change of the mesh is another
tree; the plan stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from omniload.errors import PlaceError
from omniload.placing.axes import (
    AXES,
    DATA_AXES,
    SHARED_AXES,
    check_mesh,
    check_world_size,
    parse_mesh,
    text_of,
)
from omniload.placing.needs import Needs
from omniload.suggest import nearest_divisors, suggest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from omniload.place import Place

Ranks = TypeVar("Ranks", int, np.ndarray)
"""One rank, or ``int64[n]`` of them: what is asked of one is asked of many in the same way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientPlaceTree:
    """A mesh of ranks. Its axes are the levels of the tree, outermost first, and ranks the leaves from left to right.

    ========================  ==========================================================================
    `bucket_of`               who gets the same, when data are distributed over some of the axes
    `lanes_of`, `slice_of`    which lanes a rank runs, and which slice of their tokens
    `fetchers`, `root_of`     who fetches when some axes are served by broadcast, and whom the others hear
    `needs`                   what of a lane a rank has a use for
    ========================  ==========================================================================

    Where these take axes, ``dp`` stands for all `DATA_AXES` of the mesh together and ``world`` for all axes; an axis
    that the mesh lacks has the size 1. Where they take a rank, they take ``int64[n]`` of ranks as well.

    Raises:
        PlaceError: an axis is unknown or there twice, or its size is not a whole number from 1 on.
    """

    names: tuple[str, ...]
    """Axes of the mesh, outermost first: the ranks of the last are neighbours."""
    sizes: tuple[int, ...]
    """Ranks along each axis."""

    def __post_init__(self) -> None:
        check_mesh(self.names, self.sizes)

    @classmethod
    def of(cls, axes: Mapping[str, int], *, world_size: int | None = None) -> Self:
        """The tree of a mesh given by its axes, outermost first.

        Args:
            axes: size by name, some of `AXES`; none for a job of one rank.
            world_size: ranks of the job, if known; the sizes must multiply out to it.

        Raises:
            PlaceError: the mesh is not valid, or is not as large as the job.
        """
        return cls._checked(list(axes.items()), world_size)

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None) -> Self:
        """The tree of a mesh written like ``pp=4,dp=8,cp=2``, outermost first; otherwise as `of`."""
        return cls._checked(parse_mesh(text), world_size)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Self:
        """The tree of a mesh of all ranks of this job, numbered through from 0.

        Raises:
            PlaceError: its axes have no names, or it is a part of a mesh, or numbers the ranks in another order.
        """
        import torch.distributed as dist

        if mesh.mesh_dim_names is None:
            raise PlaceError(f"mesh: its axes have no names; give them some of {', '.join(AXES)}")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size() if dist.is_initialized() else len(ranks))):
            raise PlaceError(
                f"mesh: {text_of(mesh.mesh_dim_names, mesh.mesh.shape)} is not all ranks of the job in their order;"
                " pass the whole mesh, not a part of it"
            )
        return cls._checked(list(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)), None)

    @classmethod
    def _checked(cls, axes: Sequence[tuple[str, int]], world_size: int | None) -> Self:
        names = tuple(name for name, _ in axes)
        sizes = check_mesh(names, [size for _, size in axes])
        if world_size is not None:
            check_world_size(names, sizes, world_size)
        return cls(names=names, sizes=sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks: the product of `DATA_AXES`."""
        return self.num_buckets("dp")

    @property
    def ranks(self) -> np.ndarray:
        """``int64[world_size]``: all ranks."""
        return np.arange(self.world_size)

    def coordinate_of(self, rank: Ranks, axis: str) -> Ranks:
        """Where a rank stands on one axis, from 0."""
        self._check(rank)
        return self._index(rank, self._levels(axis))

    def coordinates_of(self, rank: Ranks) -> dict[str, Ranks]:
        """Where a rank stands on every axis of the mesh, outermost first."""
        self._check(rank)
        return {name: self._index(rank, [level]) for level, name in enumerate(self.names)}

    def num_buckets(self, axes: str | Sequence[str] = "dp", group_size: int = 1) -> int:
        """Number of buckets that `bucket_of` tells apart.

        Raises:
            PlaceError: an axis is unknown, or groups of that size do not fill the axes.
        """
        places = math.prod(self.sizes[level] for level in self._levels(axes))
        if group_size < 1 or places % group_size:
            over = axes if isinstance(axes, str) else " x ".join(axes)
            raise PlaceError(
                f"group_size: {group_size} does not divide the {places} places of {over}; nearest that do:"
                f" {nearest_divisors(places, group_size)}"
            )
        return places // group_size

    def bucket_of(self, rank: Ranks, axes: str | Sequence[str] = "dp", group_size: int = 1) -> Ranks:
        """The bucket of a rank when data are distributed over some axes: ranks of one bucket get the same data.

        Args:
            rank: the rank.
            axes: what the data are distributed over; ranks that differ on other axes only are in one bucket.
            group_size: that many neighbours on these axes make one bucket.

        Raises:
            PlaceError: as `num_buckets`.
        """
        self._check(rank)
        self.num_buckets(axes, group_size)
        return self._index(rank, self._levels(axes)) // group_size

    def lanes_of(self, rank: int | np.ndarray, num_lanes: int) -> np.ndarray:
        """The lanes that a rank runs in every step, in order: those that are its data-parallel rank modulo `dp_size`.

        Returns:
            ``int64[num_lanes / dp_size]``; for many ranks one such row each.

        Raises:
            PlaceError: the data-parallel ranks cannot share the lanes evenly.
        """
        size = self.dp_size
        if num_lanes < 1:
            raise PlaceError(
                f"lanes: {num_lanes} is below 1; give {size}, the data-parallel ranks, or a multiple"
            )
        if num_lanes % size:
            lanes = sorted({max(num_lanes // size, 1) * size, max(num_lanes // size + 1, 1) * size})
            raise PlaceError(
                f"lanes: {num_lanes} cannot be shared by the {size} data-parallel ranks of {self._text}; nearest"
                f" dp_size for these lanes: {nearest_divisors(num_lanes, size)}; nearest lanes for this mesh: {lanes}"
            )
        self._check(rank)
        first = np.asarray(self._index(np.asarray(rank), self._levels("dp")))
        shared: np.ndarray = first[..., None] + np.arange(0, num_lanes, size)
        return shared

    def slice_of(self, rank: Ranks) -> tuple[Ranks, int]:
        """Which slice of the tokens of its lanes a rank computes, and into how many they are cut: place on ``cp``."""
        return self.coordinate_of(rank, "cp"), self.num_buckets("cp")

    def needs(self, rank: int) -> Needs:
        """What of its lanes a rank has a use for, by its place on ``pp``."""
        return Needs.of_stage(self.coordinate_of(rank, "pp"), self.num_buckets("pp"))

    def root_of(self, rank: Ranks, broadcast_axes: str | Sequence[str]) -> Ranks:
        """Whom a rank receives its lanes from, when some axes are served by broadcast: itself if it fetches them.

        The root of a group is its rank at 0 on each of these axes.

        Args:
            rank: the rank.
            broadcast_axes: some of `SHARED_AXES`.

        Raises:
            PlaceError: the ranks of an axis need different lanes.
        """
        self._check(rank)
        strides = self._strides
        root = rank + 0
        for level in self._broadcast_levels(broadcast_axes):
            root = root - self._index(rank, [level]) * strides[level]
        return root

    def fetchers(self, broadcast_axes: str | Sequence[str]) -> np.ndarray:
        """``int64[k]``: the ranks that fetch lanes when the others receive them by broadcast, ascending.

        Over all `SHARED_AXES` there is one per data-parallel rank, in the order of these.
        """
        return np.flatnonzero(self.root_of(self.ranks, broadcast_axes) == self.ranks)

    def broadcast_groups(self, broadcast_axes: str | Sequence[str]) -> np.ndarray:
        """``int64[k, n]``: the groups of a broadcast, by root; every rank is in one, each begins with its root."""
        of_first = np.flatnonzero(self.root_of(self.ranks, broadcast_axes) == 0)
        groups: np.ndarray = self.fetchers(broadcast_axes)[:, None] + of_first
        return groups

    def place(self, rank: int) -> Place:
        """What `omniload.DataLoader` has to know of a rank: ``dp_rank`` and ``dp_size``."""
        from omniload.place import Place

        return Place(dp_rank=self.bucket_of(rank, "dp"), dp_size=self.dp_size)

    def describe(self) -> str:
        """One line for people: the mesh, and what it means for the data."""
        return (
            f"{self._text}, outermost first: world_size {self.world_size}, dp_size {self.dp_size},"
            f" ranks per lane {self.world_size // self.dp_size}"
        )

    @property
    def _text(self) -> str:
        return text_of(self.names, self.sizes)

    @property
    def _strides(self) -> list[int]:
        """How far apart neighbours on each axis are, in ranks."""
        return [math.prod(self.sizes[level + 1 :]) for level in range(len(self.sizes))]

    def _levels(self, axes: str | Sequence[str]) -> list[int]:
        """Positions of axes in the mesh, outermost first."""
        wanted: set[str] = set()
        for axis in [axes] if isinstance(axes, str) else axes:
            if axis not in (*AXES, "world"):
                raise PlaceError(f"mesh: there is no axis {axis!r:.40}{suggest(str(axis), (*AXES, 'world'))}")
            wanted.update({"dp": DATA_AXES, "world": AXES}.get(axis, (axis,)))
        return [level for level, name in enumerate(self.names) if name in wanted]

    def _broadcast_levels(self, axes: str | Sequence[str]) -> list[int]:
        levels = self._levels(axes)
        for axis in [axes] if isinstance(axes, str) else axes:
            if axis not in SHARED_AXES:
                raise PlaceError(
                    f"broadcast: the ranks of '{axis}' need different lanes; broadcast over {', '.join(SHARED_AXES)}"
                )
        return levels

    def _index(self, rank: Ranks, levels: Sequence[int]) -> Ranks:
        """Place of a rank among all places on some axes, counted through with the outermost the slowest."""
        strides = self._strides
        index = rank * 0
        for level in levels:
            index = index * self.sizes[level] + rank // strides[level] % self.sizes[level]
        return index

    def _check(self, rank: int | np.ndarray) -> None:
        wrong = np.atleast_1d(rank)
        wrong = wrong[(wrong < 0) | (wrong >= self.world_size)]
        if len(wrong):
            raise PlaceError(f"rank: {wrong[0]} is not in 0..{self.world_size - 1} of {self._text}")
