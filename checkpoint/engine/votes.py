"""What each rank tells rank 0 that it wrote, and the votes of all ranks joined into columns."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkpoint.engine.write import WrittenFile
from checkpoint.format.objects import encode_objects

Ints = npt.NDArray[np.int64]

# Bytes of the text; boxes; pieces. After the text the columns follow, in the order of the two below.
_HEAD: Final = struct.Struct("<QQQ")
_OF_BOXES: Final = {
    "file": "<i8",
    "position": "<i8",
    "byte_offset": "<i8",
    "stored_bytes": "<i8",
    "codec": "<u1",
    "piece_counts": "<i8",
}
_OF_PIECES: Final = {"piece_bytes": "<i8", "digests": "<u8"}


class VotedFile(NamedTuple):
    """A payload file that was written; ordered as files are numbered."""

    group: str
    rank: int
    number: int
    name: str
    num_bytes: int
    header_bytes: int
    header_xxh3: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Votes:
    """What all ranks wrote; n boxes, by rank and then in the order in which they were written.

    Attributes:
        files: Payload files, by rank.
        rank_objects: Rank, key and encoded value.
        rank: Who wrote each box; int64 ``[n]``.
        file: In which of ``files``; int64 ``[n]``.
        position: Which of the boxes it is that the rank described to the planner; int64 ``[n]``.
        byte_offset: First stored byte in the file; int64 ``[n]``.
        stored_bytes: Stored bytes; int64 ``[n]``.
        codec: Index in :data:`checkpoint.format.codec.CODECS`; uint8 ``[n]``.
        piece_counts: Number of pieces; int64 ``[n]``.
        piece_bytes: Stored size of each piece, box after box; int64.
        digests: xxh3-64 of each piece, likewise; uint64.
    """

    files: list[VotedFile]
    rank_objects: list[tuple[int, str, str]]
    rank: Ints
    file: Ints
    position: Ints
    byte_offset: Ints
    stored_bytes: Ints
    codec: npt.NDArray[np.uint8]
    piece_counts: Ints
    piece_bytes: Ints
    digests: npt.NDArray[np.uint64]


def encode_vote(files: Sequence[WrittenFile], rank_objects: Mapping[str, object]) -> bytes:
    """What one rank wrote, for :func:`join_votes`.

    Raises:
        StateError: A rank-local object cannot be stored; names it.
    """
    counts = [len(file.layout.positions) for file in files]
    columns: dict[str, Sequence[npt.NDArray[Any]]] = {
        "file": [np.repeat(np.arange(len(files)), counts)],
        "position": [file.layout.positions for file in files],
        "byte_offset": [file.byte_offset for file in files],
        "stored_bytes": [file.stored_bytes for file in files],
        "codec": [file.layout.codecs for file in files],
        "piece_counts": [file.piece_counts for file in files],
        "piece_bytes": [file.piece_bytes for file in files],
        "digests": [file.digests for file in files],
    }
    text = json.dumps(
        {
            "files": [
                [
                    file.layout.group,
                    file.layout.index,
                    file.layout.name,
                    file.num_bytes,
                    file.layout.header_bytes,
                    file.header_xxh3,
                ]
                for file in files
            ],
            "objects": {
                key: encode_objects(value, f"{key} (rank-local)").decode()
                for key, value in rank_objects.items()
            },
        }
    ).encode()
    num_pieces = sum(len(file.digests) for file in files)
    parts = [_HEAD.pack(len(text), sum(counts), num_pieces), text]
    for name, dtype in (_OF_BOXES | _OF_PIECES).items():
        parts += [np.ascontiguousarray(one, dtype=dtype).tobytes() for one in columns[name]]
    return b"".join(parts)


def join_votes(votes: Sequence[bytes]) -> Votes:
    """What all ranks wrote.

    Args:
        votes: From :func:`encode_vote`, by rank.
    """
    files: list[VotedFile] = []
    rank_objects: list[tuple[int, str, str]] = []
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _OF_BOXES | _OF_PIECES}
    counts = []
    for rank, vote in enumerate(votes):
        text_bytes, num_boxes, num_pieces = _HEAD.unpack_from(vote)
        at = _HEAD.size + text_bytes
        text = json.loads(vote[_HEAD.size : at])
        for kinds, count in ((_OF_BOXES, num_boxes), (_OF_PIECES, num_pieces)):
            for name, dtype in kinds.items():
                column = np.frombuffer(vote, dtype=dtype, count=count, offset=at)
                parts[name].append(column + len(files) if name == "file" else column)
                at += column.nbytes
        counts.append(num_boxes)
        files += [VotedFile(file[0], rank, *file[1:]) for file in text["files"]]
        rank_objects += [(rank, key, value) for key, value in text["objects"].items()]
    columns = {name: np.concatenate(one) for name, one in parts.items()}
    return Votes(
        files=files, rank_objects=rank_objects, rank=np.repeat(np.arange(len(votes)), counts), **columns
    )
