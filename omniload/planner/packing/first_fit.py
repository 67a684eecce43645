"""First fit: each piece into the first pack that has room, in O(log packs) by a tournament of the rooms."""

from __future__ import annotations

import numpy as np

from omniload.kernels import KERNELS


def first_fit(
    length: np.ndarray, capacity: int, cuttable: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put pieces in the order given: whole ones into the first pack that holds them, others wherever there is room.

    Args:
        length: ``int64[n]`` tokens per piece, at least 1, and at most ``capacity`` of those that are not cut.
        capacity: tokens per pack.
        cuttable: ``bool[n]``: which may be cut, and are then cut so as to fill one pack after the other.

    Returns:
        Of each part, by piece and in its order: ``int64[m]`` the piece, the pack and the tokens. Packs are numbered
        in the order opened.
    """
    assert length.min(initial=1) > 0, "or a piece would be in no pack"
    assert length[~cuttable].max(initial=0) <= capacity, "or it would fit nowhere"
    room = tournament(length, capacity)
    if KERNELS is None:
        return first_fit_in_python(length, room, cuttable)
    piece, pack, part = (np.empty(len(length) + len(room) // 2, np.int64) for _ in range(3))
    may_be_cut = np.ascontiguousarray(cuttable).view(np.uint8)
    num_parts = KERNELS.first_fit(np.ascontiguousarray(length), may_be_cut, room, piece, pack, part)
    return piece[:num_parts], pack[:num_parts], part[:num_parts]


def tournament(length: np.ndarray, capacity: int) -> np.ndarray:
    """Empty packs, enough of them: a complete binary tree, of which node i is the larger of nodes 2i and 2i + 1.

    Returns:
        ``int64[2 * leaves]``, node 0 unused; the leaves are the rooms of the packs.
    """
    # Of two packs, the later was opened by a piece too long for the earlier, so on average they are half full.
    most_packs = min(int((-(-length // capacity)).sum()), 2 * int(length.sum()) // capacity + 2)
    return np.full(2 << max(most_packs - 1, 0).bit_length(), capacity, np.int64)


def first_fit_in_python(
    length: np.ndarray, room: np.ndarray, cuttable: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `first_fit`, given the `tournament`."""
    rooms, leaves = room.tolist(), len(room) // 2
    parts: list[tuple[int, int, int]] = []
    for i, (tokens, may_be_cut) in enumerate(zip(length.tolist(), cuttable.tolist(), strict=True)):
        left = tokens
        while left:
            wanted = 1 if may_be_cut else left
            node = 1
            while node < leaves:
                node *= 2
                node += rooms[node] < wanted
            part = min(left, rooms[node])
            parts.append((i, node - leaves, part))
            left -= part
            rooms[node] -= part
            while node > 1:
                node //= 2
                rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    piece, pack, taken = np.array(parts, np.int64).reshape(-1, 3).T
    return piece, pack, taken
