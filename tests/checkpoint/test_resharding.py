"""Whatever layout a state is saved in, it loads into any other, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from checkpoint.boxes import Box
from checkpoint.engine.views import flat_range_boxes
from checkpoint.format.digest import PIECE_BYTES
from storage import Store
from tests.checkpoint.simulation import (
    DTYPES,
    Layout,
    layouts,
    load_simulated,
    random_bits,
    run_ranks,
    save_simulated,
    shapes,
)

_numbers = itertools.count()


def fresh_store() -> Store:
    """An empty in-memory place."""
    return Store(f"memory://resharding/{next(_numbers)}")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_layout_loads_into_any_other(data: st.DataObject) -> None:
    w, v = data.draw(st.integers(1, 4), label="w"), data.draw(st.integers(1, 4), label="v")
    tensors = {}
    saved: dict[str, Layout] = {}
    loaded: dict[str, Layout] = {}
    for index in range(data.draw(st.integers(1, 3))):
        shape = data.draw(shapes)
        key = f"t{index}"
        tensors[key] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), seed=index)
        saved[key] = data.draw(layouts(shape, w))
        loaded[key] = data.draw(layouts(shape, v))
        event(
            "no elements" if math.prod(shape) == 0 else "one element" if math.prod(shape) == 1 else "elements"
        )
    boxes = [box for layout in saved.values() for rank in layout for box in rank]
    event("cut" if any(0 not in box.lengths and any(box.offsets) for box in boxes) else "whole")

    store = fresh_store()
    reports = save_simulated(store, w, tensors, saved, background=data.draw(st.booleans(), label="async"))
    assert len(set(reports)) == 1
    assert reports[0].num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    load_simulated(
        store,
        v,
        tensors,
        loaded,
        verify=data.draw(st.booleans(), label="verify"),
        flat=data.draw(st.booleans(), label="flat"),
    )
    store.delete_tree("data")
    store.delete("manifest.json")


# Large enough for several pieces and chunks; cut so that reads begin and end inside of pieces.
_BIG = (3 * PIECE_BYTES // 4096 + 5, 1024)  # float32, about 12 MiB + 20 KiB

_SMALL = 50_001  # large enough to be worth sharing

_CUTS: dict[str, list[list[Box]]] = {
    "whole": [[Box.whole(_BIG)]],
    "rows": [[Box((0, 0), (1001, 1024))], [Box((1001, 0), (_BIG[0] - 1001, 1024))]],
    "columns": [[Box((0, 0), (_BIG[0], 100))], [Box((0, 100), (_BIG[0], 924))]],
    "corner": [
        [Box((0, 0), (_BIG[0], 513))],
        [Box((0, 513), (7, 511))],
        [Box((7, 513), (_BIG[0] - 7, 511))],
    ],
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(_CUTS, _CUTS)))
def test_boxes_of_many_pieces(source: str, target: str, verify: bool) -> None:
    tensors = {
        "big": random_bits(_BIG, torch.float32, seed=3),
        "small": random_bits((_SMALL,), torch.int8, seed=4),
    }
    store = fresh_store()
    w, v = len(_CUTS[source]), len(_CUTS[target])
    small_w, small_v = ([[Box.whole((_SMALL,))]] * count for count in (w, v))
    save_simulated(store, w, tensors, {"big": _CUTS[source], "small": small_w}, background=source == "rows")
    reports = load_simulated(
        store, v, tensors, {"big": _CUTS[target], "small": small_v}, verify=verify, flat=target != "columns"
    )
    wanted = sum(report.num_bytes_wanted for report in reports)
    read = sum(report.num_bytes_read for report in reports)
    assert wanted == tensors["big"].nbytes + _SMALL * v
    # Each byte once, whoever needs it; exact too without verification, except that gaps of up to 64 KiB are read
    # over: here those between the parts of a row.
    needed = tensors["big"].nbytes + _SMALL
    assert read == needed or (not verify and {"columns", "corner"} & {source, target})
    store.delete_tree("data")
    store.delete("manifest.json")


def test_only_the_pieces_of_a_slice_are_read() -> None:
    """A rank that wants a hundredth of a tensor does not read all of it."""
    tensors = {"t": random_bits((64, 1 << 18), torch.float32, seed=5)}  # 64 MiB in rows of 1 MiB
    store = fresh_store()
    save_simulated(store, 1, tensors, {"t": [[Box.whole((64, 1 << 18))]]})
    part = Box((31, 1000), (1, 2000))
    for verify, expected in ((True, PIECE_BYTES), (False, 8000)):
        (report,) = load_simulated(store, 1, tensors, {"t": [[part]]}, verify=verify)
        assert report.num_bytes_wanted == 8000
        assert report.num_bytes_read == expected


def test_a_column_with_long_rows_reads_one_piece_per_row() -> None:
    tensors = {"t": random_bits((3, 3 * PIECE_BYTES), torch.uint8, seed=6)}
    store = fresh_store()
    save_simulated(store, 1, tensors, {"t": [[Box.whole((3, 3 * PIECE_BYTES))]]})
    column = {"t": [[Box((0, 10), (3, 20))]]}
    assert load_simulated(store, 1, tensors, column)[0].num_bytes_read == 3 * PIECE_BYTES
    assert load_simulated(store, 1, tensors, column, verify=False)[0].num_bytes_read == 60


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.data())
@settings(max_examples=200, deadline=None)
def test_a_flat_range_is_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = Box(tuple(data.draw(st.integers(0, 5)) for _ in shape), shape)
    begin = data.draw(st.integers(0, box.num_elements))
    end = data.draw(st.integers(begin, box.num_elements))
    parts = list(flat_range_boxes(box, begin, end))
    assert len(parts) <= 2 * len(shape) - 1
    positions = torch.arange(box.num_elements).view(shape)
    found = []
    for part in parts:
        where = tuple(
            slice(o - base, o - base + n)
            for o, base, n in zip(part.offsets, box.offsets, part.lengths, strict=True)
        )
        found += positions[where].reshape(-1).tolist()
    assert sorted(found) == list(range(begin, end))


def test_run_ranks_reports_what_ranks_raise() -> None:
    with pytest.raises(BaseExceptionGroup):
        run_ranks(2, lambda _: 1 / 0)
