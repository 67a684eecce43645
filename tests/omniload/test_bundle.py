"""Payload as it travels between processes: what arrives is what was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.payload import Payload
from omniload.runtime.bundle import Bundle

DTYPES = (np.uint8, np.uint16, np.uint32, np.int32, np.int64)
NAMES = ("pixel_values", "image_grid_thw", "labels")


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """Any payload: tokens of any integer type, some pieces masked, some with arrays of their own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1]))
    dtypes = st.sampled_from([one for one in DTYPES if np.iinfo(one).max >= most])
    tokens, masks, arrays = [], [], []
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.integers(0, 9))
        tokens.append(rng.integers(0, most, length, np.int64, endpoint=True).astype(draw(dtypes)))
        masks.append(rng.random(length) < 0.5 if draw(st.booleans()) else None)
        arrays.append({name: _rows(rng, name) for name in NAMES if draw(st.booleans())})
    return Payload.of(tokens, masks, arrays if any(arrays) else None)


def _rows(rng: np.random.Generator, name: str) -> np.ndarray:
    if name == "pixel_values":
        return rng.integers(0, 255, (int(rng.integers(0, 4)), 5), np.uint8)
    if name == "image_grid_thw":
        return rng.integers(0, 99, (int(rng.integers(0, 3)), 3))
    return rng.random(int(rng.integers(0, 5))).astype(np.float32)


def assert_equal(found: Payload, sent: Payload) -> None:
    for one, other in zip(found.tokens, sent.tokens, strict=True):
        assert one.tolist() == other.tolist()
    for one, other in zip(found.loss_mask, sent.loss_mask, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == bool
            assert one.tolist() == other.tolist()
    assert (found.arrays is None) == (sent.arrays is None)
    for one, other in zip(found.arrays or [], sent.arrays or [], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert one[name].shape == other[name].shape
            assert one[name].tobytes() == other[name].tobytes()


@given(payloads())
def test_what_arrives_is_what_was_sent(payload: Payload) -> None:
    assert_equal(Bundle.of(payload).payload(), payload)


@given(payloads(), st.data())
def test_a_part_of_it_arrives_as_a_part(payload: Payload, data: Any) -> None:
    begin = data.draw(st.integers(0, len(payload.tokens)))
    end = data.draw(st.integers(begin, len(payload.tokens)))
    part = Bundle.of(payload.part(begin, end)).payload()
    assert [one.tolist() for one in part.tokens] == [one.tolist() for one in payload.tokens[begin:end]]
    masks = [one if one is None else one.tolist() for one in payload.loss_mask[begin:end]]
    assert [one if one is None else one.tolist() for one in part.loss_mask] == masks


@pytest.mark.parametrize(
    ("most", "dtype"), [(255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)]
)
def test_wide_tokens_travel_in_the_narrowest_type_that_holds_them(most: int, dtype: type) -> None:
    bundle = Bundle.of(Payload.of([np.array([0, most]), np.array([1])], [None, None]))
    assert bundle.tokens.dtype == dtype
    assert [one.tolist() for one in bundle.payload().tokens] == [[0, most], [1]]


def test_pieces_that_all_count_send_no_mask_and_masks_are_bits() -> None:
    tokens = [np.zeros(80, np.uint16), np.zeros(80, np.uint16)]
    free = Bundle.of(Payload.of(tokens, [None, None]))
    masked = Bundle.of(Payload.of(tokens, [None, np.zeros(80, bool)]))
    assert masked.num_bytes == free.num_bytes + 160 // 8 + 2
    assert masked.payload().loss_mask[0] is None


def test_nothing_arrives_as_nothing() -> None:
    found = Bundle.of(Payload.of([], [])).payload()
    assert_equal(found, Payload.of([], []))


def test_what_arrives_shares_the_memory_it_arrived_in() -> None:
    bundle = Bundle.of(Payload.of([np.arange(9, dtype=np.uint16)] * 3, [None] * 3))
    assert all(np.shares_memory(one, bundle.tokens) for one in bundle.payload().tokens)
