"""Where the tables of boxes are cut into row groups, so that who needs some tensors reads few rows of others.

A rank needs the tensors of some modules, and those are named alike: ``layers.7.attention.wq.weight`` follows
``layers.7.attention.wo.weight``. So a row group holds whole modules, as far up in the tree of names as its size allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]

# Smaller groups cost more in the footer than a reader of few rows saves. None is larger than the two together.
_MIN_ROWS: Final = 2048
_MAX_ROWS: Final = 14_336


def first_rows(names: Sequence[tuple[str, str]], counts: _Ints) -> list[int]:
    """First row of each row group.

    Args:
        names: Group and key of each tensor, in order.
        counts: How many rows each of them has; int64 ``[num_tensors]``.
    """
    ends = np.cumsum(counts)
    num_rows = int(counts.sum())
    paths = [(group, *key.split(".")) for group, key in names]
    shared = np.asarray([_num_shared(one, other) for one, other in pairwise(paths)], dtype=np.int64)
    # From the root of the tree of names on, what is too large is cut into its branches, and a tensor at last anywhere.
    cuts = np.zeros(1, dtype=np.int64)
    for depth in np.unique(shared).tolist():
        at = ends[:-1][shared == depth]
        part = np.searchsorted(cuts, at, side="right") - 1
        cuts = np.union1d(cuts, at[np.diff(cuts, append=num_rows)[part] > _MAX_ROWS])
    parts = zip(cuts.tolist(), np.append(cuts[1:], num_rows).tolist(), strict=True)
    found: list[int] = []
    for cut in chain.from_iterable(range(begin, end, _MAX_ROWS) for begin, end in parts):
        if not found or cut - found[-1] >= _MIN_ROWS:
            found.append(cut)
    return found


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many names two paths begin with alike."""
    return next((depth for depth, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
