"""The tables of a checkpoint, from the plan and from what the ranks wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.engine.votes import Votes
from checkpoint.format.codec import CODEC_NONE, CODECS
from checkpoint.format.grouping import first_rows
from checkpoint.format.tables import encode_table
from checkpoint.planner import Plan
from checkpoint.ragged import ranges, starts

Ints = npt.NDArray[np.int64]


class TableEncoder:
    """Encodes the tables of all saves with one plan; what is the same for each of them once only.

    Args:
        plan: What is written by whom.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        names = [(tensor.group, tensor.key) for tensor in plan.tensors]
        self._first_rows = first_rows(names, np.diff(plan.first))
        self._tensors: bytes | None = None
        self._shards: tuple[Ints, bytes] | None = None  # with the file ids that are in it

    def encode(self, votes: Votes) -> dict[str, bytes]:
        """The Parquet files of one save by name.

        Args:
            votes: What the ranks wrote: what the plan says.
        """
        plan = self.plan
        # Both sides sorted by rank and position line up; so each row of the plan finds its row of the votes.
        held = plan.held_first[votes.rank] + votes.position
        planned, voted = np.argsort(plan.held), np.argsort(held)
        assert np.array_equal(plan.held[planned], held[voted]), "votes and plan differ"
        row = np.empty(len(planned), dtype=np.int64)
        row[planned] = voted

        # Numbered by group, rank and index, so that the numbers are the same for every save of a run.
        order = sorted(range(len(votes.files)), key=votes.files.__getitem__)
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        file_id = number[votes.file[row]]
        files = [votes.files[one] for one in order]
        if self._tensors is None:
            self._tensors = self._encode_tensors()
        if self._shards is None or not np.array_equal(self._shards[0], file_id):
            self._shards = file_id, self._encode_shards(file_id)
        return {
            "tensors.parquet": self._tensors,
            "shards.parquet": self._shards[1],
            "stored.parquet": _encode_stored(votes, row, file_id, self._first_rows),
            "files.parquet": encode_table(
                "files.parquet",
                {
                    "file_id": range(len(files)),
                    "path": [file.name for file in files],
                    "num_bytes": [file.num_bytes for file in files],
                    "header_bytes": [file.header_bytes for file in files],
                    "header_xxh3": [file.header_xxh3 for file in files],
                },
            ),
            "rank_objects.parquet": encode_table(
                "rank_objects.parquet",
                {
                    name: [one[index] for one in votes.rank_objects]
                    for index, name in enumerate(("rank", "key", "value"))
                },
            ),
        }

    def _encode_tensors(self) -> bytes:
        tensors = self.plan.tensors
        columns = {
            "tensor_id": range(len(tensors)),
            "group": [tensor.group for tensor in tensors],
            "key": [tensor.key for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "shape": [tensor.shape for tensor in tensors],
            "nbytes": [tensor.num_bytes for tensor in tensors],
            "box_count": np.diff(self.plan.first),
            "splits": [None] * len(tensors),
        }
        return encode_table("tensors.parquet", columns)

    def _encode_shards(self, file_id: Ints) -> bytes:
        plan = self.plan
        has_dim = np.arange(len(plan.offsets)) < plan.num_dims[:, None]  # [n, max_dims]
        columns = {
            "tensor_id": plan.tensor_id,
            "offsets": _lists(plan.num_dims, plan.offsets.T[has_dim]),
            "lengths": _lists(plan.num_dims, plan.lengths.T[has_dim]),
            "file_id": file_id,
        }
        return encode_table("shards.parquet", columns, first_rows=self._first_rows)


def _encode_stored(votes: Votes, row: Ints, file_id: Ints, first_rows: Sequence[int]) -> bytes:
    codec = votes.codec[row]
    plain = codec == CODECS.index(CODEC_NONE)
    counts = votes.piece_counts[row]
    begin = starts(votes.piece_counts)[:-1][row]
    sizes = votes.piece_bytes[ranges(begin[~plain], counts[~plain])]
    columns = {
        "file_id": file_id,
        "byte_offset": votes.byte_offset[row],
        "stored_bytes": votes.stored_bytes[row],
        "codec": pa.array(CODECS, type=pa.string()).take(pa.array(codec)),
        "piece_bytes": _lists(np.where(plain, 0, counts), sizes, null=plain),
        "xxh3": _lists(counts, votes.digests[ranges(begin, counts)]),
    }
    return encode_table("stored.parquet", columns, first_rows=first_rows)


def _lists(counts: Ints, values: npt.NDArray[Any], null: npt.NDArray[np.bool_] | None = None) -> pa.ListArray:
    """A column of lists; where ``null`` is true there is none."""
    first = pa.array(starts(counts), type=pa.int32())
    return pa.ListArray.from_arrays(first, pa.array(values), mask=None if null is None else pa.array(null))
