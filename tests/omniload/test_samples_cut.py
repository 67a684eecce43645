"""Samples are cut at multiples of seq_len; every token and target is accounted for, also under a loss mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.samples.cut import Labels, Overflow, cut

LENGTHS = st.lists(st.integers(1, 40), max_size=12)


def naive_targets(start: int, end: int, kept: int, trained: list[bool], labels: Labels) -> int:
    """Count, one by one, what the piece ``[start, end)`` of a sample of ``kept`` tokens is trained to predict."""
    if labels == "hf":
        return sum(trained[j] for j in range(start + 1, end))
    return sum(trained[j + 1] for j in range(start, end) if j + 1 < kept)


@settings(deadline=None)
@given(
    LENGTHS,
    st.integers(1, 10),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["shifted", "hf"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_cut_agrees_with_counting_one_by_one(
    lengths: list[int], seq_len: int, overflow: Overflow, labels: Labels, masked: bool, random: object
) -> None:
    trained = [[bool(random.getrandbits(1)) or not masked for _ in range(n)] for n in lengths]  # type: ignore[attr-defined]
    flat = np.array([flag for one in trained for flag in one], dtype=bool) if masked else None
    parts = cut(
        np.array(lengths, dtype=np.int64), seq_len=seq_len, overflow=overflow, labels=labels, trained=flat
    )
    for i, length in enumerate(lengths):
        kept = min(length, seq_len) if overflow == "truncate" else length
        if overflow == "drop" and length > seq_len:
            kept = 0
        expected = [
            (
                start,
                min(seq_len, kept - start),
                naive_targets(start, min(start + seq_len, kept), kept, trained[i], labels),
            )
            for start in range(0, kept, seq_len)
        ]
        own = slice(parts.first_piece[i], parts.first_piece[i + 1])
        columns = (parts.start[own], parts.length[own], parts.targets[own])
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
        emitted = int(parts.length[own].sum())
        assert length == emitted + parts.truncated[i] + parts.dropped[i]


@pytest.mark.parametrize(("labels", "targets"), [("shifted", [4, 4, 1]), ("hf", [3, 3, 1])])
def test_the_token_after_a_split_is_a_target_only_when_labels_are_shifted(
    labels: Labels, targets: list[int]
) -> None:
    parts = cut(np.array([10]), seq_len=4, overflow="split", labels=labels, trained=None)
    assert parts.length.tolist() == [4, 4, 2]
    assert parts.targets.tolist() == targets


def test_the_tokens_cut_off_by_truncation_are_no_targets() -> None:
    parts = cut(np.array([10]), seq_len=4, overflow="truncate", labels="shifted", trained=None)
    assert (parts.length.tolist(), parts.targets.tolist(), parts.truncated.tolist()) == ([4], [3], [6])
