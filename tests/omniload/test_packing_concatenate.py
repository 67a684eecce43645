"""Documents end to end, cut where a pack is full."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.packing import Packing, concatenate
from omniload.planner.packing.first_fit import first_fit

CAPACITY = 20
some_documents = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3 * CAPACITY), st.just(True)),
        st.tuples(st.integers(1, CAPACITY), st.just(False)),
    ),
    max_size=60,
)


def packed(documents: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray, Packing]:
    lengths = np.array([length for length, _ in documents], np.int64)
    cuttable = np.array([may_be for _, may_be in documents], bool)
    return lengths, cuttable, concatenate(lengths, CAPACITY, cuttable=cuttable)


@settings(max_examples=1000)
@given(some_documents)
def test_every_token_is_placed_once_and_what_may_not_be_cut_is_whole(
    documents: list[tuple[int, bool]],
) -> None:
    lengths, cuttable, packing = packed(documents)
    assert (packing.length > 0).all()
    for piece, length in enumerate(lengths.tolist()):
        parts = np.flatnonzero(packing.piece == piece)
        ends = np.cumsum(packing.length[parts])
        assert packing.start[parts].tolist() == [0, *ends[:-1].tolist()], "from its start on, in order"
        assert ends[-1] == length
        assert cuttable[piece] or len(parts) == 1
    packs = np.unique(packing.pack)
    assert np.all(np.diff(packing.pack) >= 0)
    assert packs.tolist() == list(range(len(packs)))
    if len(packs):
        assert np.bincount(packing.pack, packing.length).max() <= CAPACITY


@settings(max_examples=1000)
@given(some_documents)
def test_a_pack_has_room_only_for_less_than_what_could_not_be_cut(documents: list[tuple[int, bool]]) -> None:
    """A document that may be cut never lies behind one with room left; one that may not, only if too long for it."""
    lengths, cuttable, packing = packed(documents)
    fill = np.bincount(packing.pack, packing.length).astype(np.int64)
    for piece, pack in zip(packing.piece.tolist(), packing.pack.tolist(), strict=True):
        left = CAPACITY - fill[:pack].min(initial=CAPACITY)
        assert left < (1 if cuttable[piece] else lengths[piece])


@settings(max_examples=1000)
@given(st.lists(st.integers(1, 3 * CAPACITY), max_size=60))
def test_what_may_all_be_cut_lies_end_to_end(lengths: list[int]) -> None:
    array, cuttable, packing = packed([(length, True) for length in lengths])
    piece, pack, part = first_fit(array, CAPACITY, cuttable)
    assert packing.piece.tolist() == piece.tolist() == sorted(piece.tolist())
    assert packing.pack.tolist() == pack.tolist()
    assert packing.length.tolist() == part.tolist()
    fill = np.bincount(packing.pack, packing.length).astype(np.int64)
    assert (fill[:-1] == CAPACITY).all()


def test_a_document_that_may_not_be_cut_lets_others_fill_what_it_leaves() -> None:
    _, _, packing = packed([(15, True), (10, False), (30, True)])
    assert packing.pack.tolist() == [0, 0, 1, 1, 2]
    assert packing.piece.tolist() == [0, 2, 1, 2, 2]
    assert packing.start.tolist() == [0, 0, 0, 5, 15]
    assert packing.length.tolist() == [15, 5, 10, 10, 15]
