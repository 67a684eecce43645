"""Circles: a rank that loads and those that receive from it, and what of the lanes each of them is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from omniload.errors import PlaceError
from omniload.placing import ClientPlaceTree, Needs
from omniload.placing.slicing import SLICINGS

StageOrder: TypeAlias = Literal["loop", "v"]
"""How the stages of a model lie on the ranks of a pipeline: ``loop`` with the last one on the last rank, ``v`` there
and back, so that the first rank has the first and the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What of its lanes a rank gets."""

    needs: Needs = Needs.LAYOUT | Needs.INPUTS | Needs.TARGETS
    """Parts of a lane."""
    part: int = 0
    """Which slice of the tokens, from 0."""
    num_parts: int = 1
    """Slices that the tokens are cut into."""
    slicing: str = "contiguous"
    """How they are cut: one of `omniload.placing.slicing.SLICINGS`."""

    @classmethod
    def of(cls, tree: ClientPlaceTree, rank: int, *, slicing: str | None, stage_order: StageOrder) -> View:
        """The view of a rank of a mesh.

        Args:
            tree: the mesh.
            rank: the rank.
            slicing: how lanes are cut over ``cp``; None to leave them whole.
            stage_order: see `StageOrder`.

        Raises:
            PlaceError: there is no such way to cut, or no such order.
        """
        if slicing is not None and slicing not in SLICINGS:
            raise PlaceError(f"context_parallel: '{slicing}' is none of {', '.join(SLICINGS)}, or None")
        if stage_order not in ("loop", "v"):
            raise PlaceError(f"stage_order: '{stage_order}' is neither 'loop' nor 'v'")
        needs = tree.needs(rank)
        if stage_order == "v" and Needs.INPUTS in needs:
            needs |= Needs.TARGETS
        elif stage_order == "v":
            needs = Needs.LAYOUT
        part, num_parts = tree.slice_of(rank)
        if slicing is None or num_parts == 1:
            return cls(needs=needs)
        return cls(needs=needs, part=part, num_parts=num_parts, slicing=slicing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    """Ranks that go through the steps together."""

    ranks: tuple[int, ...]
    """The one that loads, the source, and then those that receive from it."""
    views: tuple[View, ...]
    """Of each of them."""

    @property
    def source(self) -> int:
        """The rank that loads."""
        return self.ranks[0]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The others."""
        return self.ranks[1:]

    def audiences(self) -> list[tuple[View, tuple[int, ...]]]:
        """The receivers by what they are sent, in the order of their first ranks."""
        found: dict[View, list[int]] = {}
        for rank, view in zip(self.receivers, self.views[1:], strict=True):
            found.setdefault(view, []).append(rank)
        return [(view, tuple(ranks)) for view, ranks in found.items()]


def circles_of(
    tree: ClientPlaceTree, axes: Sequence[str], *, slicing: str | None, stage_order: StageOrder
) -> list[Circle]:
    """The circles of a mesh, by source; every rank is in one. All have audiences of the same sizes, in the same order.

    Args:
        tree: the mesh.
        axes: those along which only the first rank loads.
        slicing: see `View.of`.
        stage_order: see `StageOrder`.

    Raises:
        PlaceError: the ranks of an axis need different lanes, or see `View.of`.
    """
    return [
        Circle(
            ranks=tuple(ranks),
            views=tuple(View.of(tree, rank, slicing=slicing, stage_order=stage_order) for rank in ranks),
        )
        for ranks in tree.broadcast_groups(axes).tolist()
    ]
