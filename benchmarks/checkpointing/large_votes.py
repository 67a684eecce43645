"""What the ranks of a very large job would report to have written, from the plan of its save."""

from __future__ import annotations

import numpy as np

from checkpoint.engine.votes import VotedFile, Votes
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.payload import file_name
from checkpoint.planner import Plan
from checkpoint.ragged import starts

_HEADER_BYTES = 32_768


def votes_of(plan: Plan) -> Votes:
    """Votes as the ranks would cast them if all wrote what the plan says, uncompressed; digests are noise."""
    itemsize = np.asarray([DTYPES[tensor.dtype].itemsize for tensor in plan.tensors])[plan.tensor_id]
    groups = sorted({tensor.group for tensor in plan.tensors})
    group = np.asarray([groups.index(tensor.group) for tensor in plan.tensors])[plan.tensor_id]
    num_ranks = len(plan.held_first) - 1
    # One file for each rank and group, in which boxes lie by falling element size, then by key.
    order = np.lexsort((plan.tensor_id, -itemsize, group, plan.rank))
    rank, file = plan.rank[order], plan.rank[order] * len(groups) + group[order]
    used, file = np.unique(file, return_inverse=True)
    num_bytes = (plan.lengths.prod(axis=0) * itemsize)[order]
    first = starts(np.bincount(file, minlength=len(used)))
    before = starts(num_bytes)
    sizes = np.diff(before[first])
    pieces = -(-num_bytes // PIECE_BYTES)
    piece_bytes = np.full(int(pieces.sum()), PIECE_BYTES)
    piece_bytes[np.cumsum(pieces) - 1] = num_bytes - (pieces - 1) * PIECE_BYTES
    noise = np.random.default_rng(0)
    return Votes(
        files=[
            VotedFile(
                groups[one % len(groups)],
                one // len(groups),
                0,
                file_name(groups[one % len(groups)], one // len(groups), 0),
                _HEADER_BYTES + size,
                _HEADER_BYTES,
                int(digest),
            )
            for one, size, digest in zip(
                used.tolist(), sizes.tolist(), noise.integers(0, 1 << 63, len(used)), strict=True
            )
        ],
        rank_objects=[(one, "rng", "null") for one in range(num_ranks)],
        rank=rank,
        file=file,
        position=plan.held[order] - plan.held_first[rank],
        byte_offset=_HEADER_BYTES + before[:-1] - before[first[file]],
        stored_bytes=num_bytes,
        codec=np.zeros(len(order), dtype=np.uint8),
        piece_counts=pieces,
        piece_bytes=piece_bytes,
        digests=noise.integers(0, 1 << 64, len(piece_bytes), dtype=np.uint64),
    )
