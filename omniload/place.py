"""Who runs which lane. The only place where the shape of the job enters, after every plan is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from omniload.errors import PlaceError
from omniload.mixture import Mixture
from omniload.placing.axes import DATA_AXES
from omniload.suggest import nearest_divisors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of one rank among the data-parallel ranks."""

    dp_rank: int = 0
    """Rank on the data-parallel axes, from 0. Ranks of all other axes share the lanes of theirs."""
    dp_size: int = 1
    """Product of the data-parallel axes."""

    @classmethod
    def of(cls, *, dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None) -> Self:
        """The place given by plain numbers, or by a mesh, or of a job with one rank.

        Raises:
            PlaceError: both are given, or half of the numbers.
        """
        if mesh is not None:
            if dp_rank is not None or dp_size is not None:
                raise PlaceError("mesh: given together with dp_rank or dp_size; pass one or the other")
            return cls.from_mesh(mesh)
        if (dp_rank is None) != (dp_size is None):
            raise PlaceError("dp_rank and dp_size go together; pass both or neither")
        return cls(dp_rank=dp_rank or 0, dp_size=1 if dp_size is None else dp_size)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Self:
        """The place of this rank in a mesh, or a part of one, by its axes of `omniload.placing.axes.DATA_AXES`.

        Raises:
            PlaceError: it has none of them.
        """
        names = mesh.mesh_dim_names or ()
        axes = [name for name in names if name in DATA_AXES]
        if not axes:
            raise PlaceError(
                f"mesh: no axis named {', '.join(DATA_AXES[:-1])} or {DATA_AXES[-1]} among {list(names)};"
                " name them so, or pass dp_rank and dp_size"
            )
        rank, size = 0, 1
        for axis in axes:
            length = mesh.size(names.index(axis))
            rank, size = rank * length + mesh.get_local_rank(axis), size * length
        return cls(dp_rank=rank, dp_size=size)

    def lanes_of(self, mixture: Mixture) -> list[int]:
        """The lanes this rank runs in every step, in order: those that are ``dp_rank`` modulo ``dp_size``.

        Raises:
            PlaceError: the ranks cannot share the lanes evenly.
        """
        if self.dp_size < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise PlaceError(
                f"dp_rank: {self.dp_rank} is not in 0..{self.dp_size - 1} (dp_size: {self.dp_size})"
            )
        if mixture.lanes % self.dp_size:
            of_packs = f" and {mixture.packs} packs" if mixture.packs else ""
            most = mixture.packs or mixture.lanes + self.dp_size
            fitting = [
                lanes
                for lanes in range(self.dp_size, most + 1, self.dp_size)
                if mixture.packs is None or mixture.packs % lanes == 0
            ]
            lanes = sorted(sorted(fitting, key=lambda n: abs(n - mixture.lanes))[:3])
            raise PlaceError(
                f"lanes: {mixture.lanes} cannot be shared by dp_size {self.dp_size}; nearest dp_size for these lanes:"
                f" {nearest_divisors(mixture.lanes, self.dp_size)}; nearest lanes for this dp_size"
                f"{of_packs}: {lanes or f'none, packs must be a multiple of {self.dp_size}'}"
            )
        return list(range(self.dp_rank, mixture.lanes, self.dp_size))
