"""Who reads what several ranks need, so that a job reads each byte of storage once.

Rank 0 hears which boxes every rank wants and finds the pieces that more than one rank needs. Each of them is read by
one of those ranks, its *reader*, and handed on to the others. The ranks that need the same pieces share them by bytes;
each reads its share in *bundles* of a few MiB: large ones where a request takes long, small ones where it does not and
memory for them does.

Bundles have one order for the whole job: all first bundles of the readers by rank, all second ones, and so on. Every
rank sends its own, and receives those of others, in that order, and a bundle to one receiver after the other. So
whatever is the earliest transfer that is not done yet, nothing that either of its ends waits for comes before it, and
it goes on: no circle of ranks waits for each other, however little is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.engine.overlap import Ints, Overlaps, Wants, find_overlaps, needed_pieces, spread
from checkpoint.format.box_table import BoxTable
from checkpoint.format.codec import RAW_PIECE_BYTES
from checkpoint.format.index import Tables

_LOCAL_BUNDLE_BYTES: Final = 4 << 20
_REMOTE_BUNDLE_BYTES: Final = 8 << 20

# If reading twice costs no more than one byte in so many, connecting the ranks would cost more: counters that are
# replicated beside what is sharded.
_NEGLIGIBLE: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lots:
    """Runs of pieces of stored boxes that one rank reads for itself and others, in order of bundle and reader.

    Attributes:
        row: Stored box; int64 ``[n]``.
        first: First piece; int64 ``[n]``.
        end: One past the last piece; int64 ``[n]``.
        reader: Rank that reads it; int64 ``[n]``.
        bundle: Which of the reader's bundles it is in; int64 ``[n]``.
    """

    row: Ints
    first: Ints
    end: Ints
    reader: Ints
    bundle: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """What one rank has to do with the others.

    Attributes:
        lots: What this rank reads for others or has read for it.
        lot: Which lot each of the parts is of; int64 ``[m]``, ascending.
        receiver: Who gets it; int64 ``[m]``, ascending within a lot.
        offsets: Part of the global tensor that the receiver wants of the lot's stored box, in the order of its
            overlaps; int64 ``[m, max_dims]``. Only parts of lots that this rank reads are listed.
        lengths: Extent of the part; int64 ``[m, max_dims]``.
    """

    lots: Lots
    lot: Ints
    receiver: Ints
    offsets: Ints
    lengths: Ints


def share_reads(tables: Tables, wants: Sequence[Wants], *, verify: bool, is_local: bool) -> list[bytes]:
    """Decide who reads what; rank 0 does it for all.

    Args:
        tables: With the boxes of all tensors that anybody wants.
        wants: What each rank wants, by rank.
        verify: Whether only whole pieces are read. Otherwise only those are shared that all their ranks want whole:
            ranks that want other parts of a piece read them exactly.
        is_local: Whether payload is in local files.

    Returns:
        What to tell each rank, for :func:`decode_share`; empty for ranks that share nothing. Nobody does if that
        would save next to nothing.
    """
    boxes = tables.boxes
    joined = Wants(
        tensor_id=np.concatenate([one.tensor_id for one in wants]),
        offsets=np.concatenate([one.offsets for one in wants]),
        lengths=np.concatenate([one.lengths for one in wants]),
    )
    overlaps = find_overlaps(tables, joined)
    rank = np.repeat(np.arange(len(wants)), [len(one.tensor_id) for one in wants])[overlaps.wanted]
    piece, needer, is_whole = _needers(boxes, overlaps, rank, len(wants))
    starts = np.flatnonzero(np.diff(piece, prepend=-1))
    counts = np.diff(np.append(starts, len(piece)))
    shared = counts > 1
    if not verify and len(piece):
        row = np.searchsorted(boxes.piece_first, piece[starts], side="right") - 1
        shared &= boxes.compressed[row] | np.logical_and.reduceat(is_whole, starts)
    num_bytes = boxes.piece_bytes[piece[starts]]
    if np.sum((num_bytes * (counts - 1))[shared]) * _NEGLIGIBLE <= num_bytes.sum():
        return [b""] * len(wants)
    members = np.repeat(shared, counts)
    bundle_bytes = _LOCAL_BUNDLE_BYTES if is_local else _REMOTE_BUNDLE_BYTES
    lots, lot_members = _lots(boxes, piece[starts[shared]], needer[members], counts[shared], bundle_bytes)

    # Every lot once for each rank that needs it.
    lot = np.repeat(np.arange(len(lot_members)), [len(one) for one in lot_members])
    member = np.concatenate(lot_members)
    lots_of = _split(lot, member, len(wants))
    is_sent = lots.reader[lot] != member
    sent_by = _split(np.stack([lot, member])[:, is_sent].T, lots.reader[lot[is_sent]], len(wants))

    # The overlaps of each rank with each stored box, to be found by binary search.
    key = overlaps.row * len(wants) + rank
    by_key = np.argsort(key, kind="stable")
    key = key[by_key]
    answers = []
    for own, sent in zip(lots_of, sent_by, strict=True):
        if not len(own):
            answers.append(b"")
            continue
        sent_key = lots.row[sent[:, 0]] * len(wants) + sent[:, 1]
        begin, end = (np.searchsorted(key, sent_key, side=side) for side in ("left", "right"))
        at = by_key[spread(begin, end - begin)]
        parts = [
            np.repeat(np.searchsorted(own, sent[:, 0]), end - begin),
            np.repeat(sent[:, 1], end - begin),
            *overlaps.offsets[at].T,
            *overlaps.lengths[at].T,
        ]
        answers.append(_pack([_named(boxes, lots, own), parts]))
    return answers


def _split(values: Ints, rank: Ints, num_ranks: int) -> list[Ints]:
    """The values of each rank, in the order in which they are."""
    order = np.argsort(rank, kind="stable")
    return np.split(values[order], np.searchsorted(rank[order], np.arange(1, num_ranks)))


def _named(boxes: BoxTable, lots: Lots, own: Ints) -> list[Ints]:
    """Lots named by tensor, box of it and pieces of that: a rank may have the tables of fewer tensors than rank 0."""
    row = lots.row[own]
    tensor_id = np.searchsorted(boxes.first, row, side="right") - 1
    return [
        tensor_id,
        row - boxes.first[tensor_id],
        lots.first[own] - boxes.piece_first[row],
        lots.end[own] - boxes.piece_first[row],
        lots.reader[own],
        lots.bundle[own],
    ]


def _needers(
    boxes: BoxTable, overlaps: Overlaps, rank: Ints, num_ranks: int
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Every pair of a piece and a rank that needs it, once, in order, and whether it needs the whole piece."""
    which, first, end = needed_pieces(boxes, overlaps)
    piece, which = spread(first, end - first), np.repeat(which, end - first)
    pairs, at = np.unique(piece * num_ranks + rank[which], return_inverse=True)
    begin, stop = boxes.raw_ranges(overlaps.row[which], piece)
    num_bytes = np.minimum(stop, overlaps.end[which]) - np.maximum(begin, overlaps.begin[which])
    missing = np.zeros(len(pairs), dtype=np.int64)
    missing[at] = stop - begin
    np.subtract.at(missing, at, np.where(overlaps.gap[which] == 0, num_bytes, 0))
    return pairs // num_ranks, pairs % num_ranks, missing <= 0


def _lots(
    boxes: BoxTable, piece: Ints, needer: Ints, counts: Ints, bundle_bytes: int
) -> tuple[Lots, list[Ints]]:
    """Readers, bundles and lots of shared pieces, and the ranks that need each lot.

    Args:
        boxes: The stored boxes.
        piece: Shared pieces, ascending, ``[n]``.
        needer: Ranks that need each of them, ascending, one piece after the other.
        counts: How many ranks that are, ``[n]``.
        bundle_bytes: Size of bundles; up to a piece more.
    """
    begins = np.cumsum(counts) - counts
    group, groups = _groups(needer, begins, counts)
    row = np.searchsorted(boxes.piece_first, piece, side="right") - 1
    # What a compressed piece takes in memory and on its way.
    num_bytes = np.where(boxes.compressed[row], RAW_PIECE_BYTES, boxes.piece_bytes[piece])
    place = (boxes.piece_offset[piece], boxes.file_id[row])

    # Each group's pieces, as they lie in the files, are cut into as many shares of equal bytes as it has ranks.
    order = np.lexsort((*place, group))
    before = _running(num_bytes[order], group[order])
    total = np.bincount(group, weights=num_bytes, minlength=len(groups)).astype(np.int64)[group[order]]
    reader = np.empty_like(piece)
    reader[order] = needer[begins[order] + before * counts[order] // total]

    order = np.lexsort((*place, reader))
    bundle = np.empty_like(piece)
    bundle[order] = _running(num_bytes[order], reader[order]) // bundle_bytes

    order = np.lexsort((*place, reader, bundle))
    new = np.ones(len(order), dtype=bool)
    keys = np.stack([row, reader, bundle, group])[:, order]
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0) | (np.diff(piece[order]) != 1)
    heads = np.flatnonzero(new)
    lots = Lots(
        row=row[order][heads],
        first=piece[order][heads],
        end=piece[order][np.append(heads[1:], len(order)) - 1] + 1,
        reader=reader[order][heads],
        bundle=bundle[order][heads],
    )
    return lots, [groups[one] for one in group[order][heads].tolist()]


def _groups(needer: Ints, begins: Ints, counts: Ints) -> tuple[Ints, list[Ints]]:
    """Number the sets of ranks that need a piece; the number for each piece, and the ranks of each number."""
    # Most pieces are needed by the same ranks as the piece before: only where that changes is a set looked up.
    changes = np.ones(len(counts), dtype=bool)
    changes[1:] = counts[1:] != counts[:-1]
    same = np.flatnonzero(~changes)
    at = spread(begins[same], counts[same])
    equal = needer[at] == needer[at - np.repeat(counts[same], counts[same])]
    ends = np.concatenate([[0], np.cumsum(equal)])
    sizes = np.concatenate([[0], np.cumsum(counts[same])])
    changes[same] = ends[sizes[1:]] - ends[sizes[:-1]] != counts[same]
    numbers: dict[bytes, int] = {}
    groups: list[Ints] = []
    heads = np.flatnonzero(changes)
    of_head = np.empty(len(heads), dtype=np.int64)
    for index, (begin, count) in enumerate(zip(begins[heads].tolist(), counts[heads].tolist(), strict=True)):
        ranks = needer[begin : begin + count]
        of_head[index] = numbers.setdefault(ranks.tobytes(), len(groups))
        if of_head[index] == len(groups):
            groups.append(ranks)
    return of_head[np.cumsum(changes) - 1], groups


def _running(num_bytes: Ints, key: Ints) -> Ints:
    """Sum of the bytes before each element among those of its key; equal keys are neighbours."""
    before = np.cumsum(num_bytes) - num_bytes
    heads = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    lengths = np.diff(np.append(heads, len(key)))
    return before - np.repeat(before[heads], lengths)


def decode_share(data: bytes, boxes: BoxTable) -> Share | None:
    """What :func:`share_reads` told this rank; None: it reads all it needs itself, and nobody else needs it."""
    if not data:
        return None
    (tensor_id, box, first, end, reader, bundle), (lot, receiver, *corners) = _unpack(data)
    row = boxes.first[tensor_id] + box
    half = len(corners) // 2
    return Share(
        lots=Lots(
            row=row,
            first=boxes.piece_first[row] + first,
            end=boxes.piece_first[row] + end,
            reader=reader,
            bundle=bundle,
        ),
        lot=lot,
        receiver=receiver,
        offsets=np.column_stack(corners[:half]),
        lengths=np.column_stack(corners[half:]),
    )


def encode_wants(wants: Wants) -> bytes:
    """What one rank wants, for rank 0."""
    return _pack([[wants.tensor_id, *wants.offsets.T, *wants.lengths.T]])


def decode_wants(data: bytes) -> Wants:
    """What :func:`encode_wants` encoded."""
    ((tensor_id, *corners),) = _unpack(data)
    half = len(corners) // 2
    return Wants(
        tensor_id=tensor_id,
        offsets=np.column_stack(corners[:half]),
        lengths=np.column_stack(corners[half:]),
    )


def _pack(tables: Sequence[Sequence[Ints]]) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    for columns in tables:
        table = pa.table({str(index): column for index, column in enumerate(columns)})
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def _unpack(data: bytes) -> list[list[Ints]]:
    source = pa.BufferReader(data)
    tables = []
    while source.tell() < len(data):
        table = pa.ipc.open_stream(source).read_all()
        tables.append([np.asarray(column.to_numpy(), dtype=np.int64) for column in table.columns])
    return tables
