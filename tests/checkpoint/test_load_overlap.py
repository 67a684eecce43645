"""Wanted and stored boxes are intersected by columns; the answer is that of comparing every pair."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from checkpoint.boxes import Box, intersect, runs_within
from checkpoint.engine import overlap
from checkpoint.engine.overlap import Wants, find_overlaps, needed_pieces
from checkpoint.format.box_table import BoxTable
from checkpoint.format.index import Tables
from checkpoint.format.rows import TensorRow

_ITEMSIZE = 4
_PIECE = overlap.PIECE_BYTES


def tables_of(tensors: list[tuple[tuple[int, ...], list[Box]]]) -> Tables:
    """Tables of float32 tensors, each with its shape and boxes; nothing about files."""
    boxes = [box for _, of_tensor in tensors for box in of_tensor]
    sizes = np.asarray([box.num_elements * _ITEMSIZE for box in boxes], dtype=np.int64)
    num_pieces = -(-sizes // _PIECE)
    zeros = np.zeros(len(boxes), dtype=np.int64)

    def starts(counts: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    table = BoxTable(
        first=starts([len(of_tensor) for _, of_tensor in tensors]),
        corner_first=starts([len(box.offsets) for box in boxes]),
        offsets=np.asarray([at for box in boxes for at in box.offsets], dtype=np.int64),
        lengths=np.asarray([length for box in boxes for length in box.lengths], dtype=np.int64),
        file_id=zeros,
        byte_offset=zeros,
        stored_bytes=sizes,
        raw_bytes=sizes,
        compressed=np.zeros(len(boxes), dtype=np.bool_),
        piece_first=starts(num_pieces.tolist()),
        piece_offset=np.zeros(int(num_pieces.sum()), dtype=np.int64),
        piece_bytes=np.zeros(int(num_pieces.sum()), dtype=np.int64),
        digests=np.zeros(int(num_pieces.sum()), dtype=np.uint64),
    )
    rows = [
        TensorRow(group="g", key=str(index), dtype="float32", shape=shape, num_bytes=0)
        for index, (shape, _) in enumerate(tensors)
    ]
    return Tables(tensors=rows, boxes=table, files=[])


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes of a grid with random cuts, in order."""
    boxes = [((), ())]
    for extent in shape:
        cuts = sorted({0, extent, *draw(st.lists(st.integers(1, max(1, extent - 1)), max_size=9))})
        cuts = [cut for cut in cuts if cut <= extent]
        boxes = [
            ((*offsets, low), (*lengths, high - low))
            for offsets, lengths in boxes
            for low, high in itertools.pairwise(cuts)
        ]
    return [Box(offsets, lengths) for offsets, lengths in boxes]


def some_box(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, extent - 1)) for extent in shape]
    return Box(
        tuple(low),
        tuple(draw(st.integers(1, extent - at)) for at, extent in zip(low, shape, strict=True)),
    )


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_it_is_the_answer_of_comparing_every_pair(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 30), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = [(shape, data.draw(grids(shape))) for shape in shapes]
    wanted = [
        (index, data.draw(st.composite(some_box)(shapes[index])))
        for index in data.draw(st.lists(st.integers(0, len(shapes) - 1), max_size=6))
    ]
    tables = tables_of(tensors)
    event("indexed" if any(len(boxes) > overlap._COMPARE_ALL for _, boxes in tensors) else "compared")
    wants = Wants.of(wanted, overlap.max_dims(tables))
    found = find_overlaps(tables, wants)
    got = []
    for index, (want, row) in enumerate(zip(found.wanted.tolist(), found.row.tolist(), strict=True)):
        num_dims = len(shapes[wanted[want][0]])
        part = Box(
            tuple(found.offsets[index, :num_dims].tolist()), tuple(found.lengths[index, :num_dims].tolist())
        )
        stored = tables.boxes.box(row)
        starts, length = runs_within(part, stored)
        assert found.begin[index] == starts[0] * _ITEMSIZE
        assert found.end[index] == (starts[-1] + length) * _ITEMSIZE
        longest = max(np.diff(starts) - length, default=0) * _ITEMSIZE
        assert found.gap[index] == longest
        got.append((row, want, part))
    expected = [
        (row, want, part)
        for row in range(len(tables.boxes.file_id))
        for want, (tensor_id, box) in enumerate(wanted)
        if tensor_id == tables.boxes.tensor_id(row)
        and (part := intersect(tables.boxes.box(row), box)) is not None
    ]
    assert got == expected


@given(st.integers(1, 5), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_the_pieces_are_those_that_a_byte_of_the_part_lies_in(
    rows: int, extra: int, data: st.DataObject
) -> None:
    columns = (2 * _PIECE + extra * 1000) // _ITEMSIZE
    shape = (rows, columns)
    tables = tables_of([(shape, [Box.whole(shape)])])
    low = data.draw(st.integers(0, columns - 1))
    part = Box((0, low), (data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns - low))))
    overlaps = find_overlaps(tables, Wants.of([(0, part)], 2))
    _, first, end = needed_pieces(tables.boxes, overlaps)
    found = [
        piece for one, other in zip(first.tolist(), end.tolist(), strict=True) for piece in range(one, other)
    ]
    starts, length = runs_within(part, Box.whole(shape))
    expected = {
        piece
        for start in (starts * _ITEMSIZE).tolist()
        for piece in range(start // _PIECE, -(-(start + length * _ITEMSIZE) // _PIECE))
    }
    assert set(found) == expected
    event("scattered" if len(first) > 1 else "one range")


def test_a_grid_cut_along_two_dimensions_costs_no_memory_for_pairs_without_overlap() -> None:
    """A thousand boxes against themselves: each overlaps with itself alone."""
    boxes = [Box((row, column), (1, 1)) for row in range(40) for column in range(40)]
    tables = tables_of([((40, 40), boxes)])
    found = find_overlaps(tables, Wants.of([(0, box) for box in boxes], 2))
    assert np.array_equal(found.wanted, np.arange(1600))
    assert np.array_equal(found.row, np.arange(1600))
