"""Tables of whole numbers, checked where they come in."""

from __future__ import annotations

import numpy as np

from omniload.errors import PlaceError
from omniload.placing.axes import MOST_RANKS


def whole_columns(what: str, **columns: np.ndarray) -> list[np.ndarray]:
    """Columns of a table as ``int64[n]``, each adding up to less than 2^63.

    Args:
        what: what a row is, for the message.
        columns: the columns by name, of any integer type.

    Raises:
        PlaceError: they differ in length, or one is not of whole numbers from 0 on, or adds up to too much.
    """
    if len({column.shape for column in columns.values()}) > 1 or any(
        one.ndim != 1 for one in columns.values()
    ):
        shapes = ", ".join(f"{name} {list(column.shape)}" for name, column in columns.items())
        raise PlaceError(f"{what}: columns have the shapes {shapes}; give one value of each per row")
    for name, column in columns.items():
        if column.dtype.kind not in "iu":
            raise PlaceError(f"{what}: {name} is of {column.dtype}; give whole numbers")
        if len(column) and column.min() < 0:
            raise PlaceError(f"{what}: {name} is {column.min()} in row {column.argmin()}, below 0")
        if sum(column.tolist()) >= 2**63:
            raise PlaceError(f"{what}: {name} adds up to more than 64 bits; give it in a larger unit")
    return [column.astype(np.int64, copy=False) for column in columns.values()]


def check_ranks(what: str, num_ranks: int, rank: np.ndarray | int = 0) -> None:
    """Ranks are among those there are.

    Raises:
        PlaceError: they are not, or there is none, or more than `MOST_RANKS`.
    """
    if not 1 <= num_ranks <= MOST_RANKS:
        raise PlaceError(f"{what}: num_ranks is {num_ranks}, not in 1..{MOST_RANKS}")
    highest = int(np.max(rank, initial=0))
    if highest >= num_ranks or np.min(rank, initial=0) < 0:
        raise PlaceError(f"{what}: a rank is {highest}, not in 0..{num_ranks - 1}")
