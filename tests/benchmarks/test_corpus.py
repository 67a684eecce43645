"""The corpora and the floors count what they say they count."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.loading import floors, ours, peers
from benchmarks.loading.corpus import VOCABULARY, Corpus, write_text, write_tokens
from benchmarks.loading.packing import derive, pack


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_tokens(tmp_path_factory.mktemp("corpus"), 4_000_000)


def test_lengths_are_heavy_tailed_and_ids_fit_uint16(corpus: Corpus):
    lengths = np.concatenate(
        [np.diff(pq.read_table(path)["input_ids"].combine_chunks().offsets) for path in corpus.files]
    )
    assert lengths.sum() == corpus.num_tokens
    assert len(lengths) == corpus.num_documents
    assert np.median(lengths) == pytest.approx(589, rel=0.05)
    assert lengths.mean() == pytest.approx(1215, rel=0.1)
    assert lengths.max() <= 65_536
    ids = pq.read_table(corpus.files[0])["input_ids"].combine_chunks().values.to_numpy()
    assert 0 < ids.min() <= ids.max() < VOCABULARY <= 2**16


def test_the_same_corpus_every_time(corpus: Corpus, tmp_path: Path):
    again = write_tokens(tmp_path, 4_000_000)
    assert pq.read_table(again.files[-1]) == pq.read_table(corpus.files[-1])


def test_floors_count_every_token_but_those_of_a_lane_not_full(corpus: Corpus):
    full = corpus.num_tokens // 32_768 * 32_768
    assert floors.decode(corpus.files) == corpus.num_tokens
    assert floors.decode_side_by_side(corpus) == corpus.num_tokens
    assert floors.decode_and_copy(corpus, 32_768) == full
    assert floors.decode_and_build(corpus, 32_768) == full
    assert floors.copy_contiguous(np.zeros(corpus.num_tokens, np.uint16), 32_768) == full


def test_packed_lanes_hold_whole_documents_between_their_bounds():
    """Documents of one value each: no value may change inside a segment, and each is there as often as given."""
    lengths = [1, 7, 8, 16, 3, 29]
    lanes = list(pack((np.full(length, i, np.uint16) for i, length in enumerate(lengths)), 8))
    assert np.bincount(np.concatenate([lane for lane, _ in lanes])).tolist() == lengths
    for lane, bounds in lanes:
        assert (bounds[0], bounds[-1]) == (0, 8)
        assert np.all(np.diff(bounds) > 0)
        for start, end in itertools.pairwise(bounds):
            assert len(set(lane[start:end].tolist())) == 1


def test_derived_arrays_end_with_each_document():
    targets, positions, segments = derive(np.array([5, 6, 7, 8, 9]), [0, 3, 5])
    assert targets.tolist() == [6, 7, -100, 9, -100]
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert segments.tolist() == [1, 1, 1, 2, 2]


def test_peers_count_what_they_deliver(tmp_path: Path):
    rows = peers.FixedRows(np.arange(100, dtype=np.uint16), 8)
    assert rows[1].tolist() == list(range(8, 16))
    assert peers.torch_loader_tokens(rows, 4) == 96
    text = write_text(tmp_path, 20_000)

    class Encoding:
        ids = (1, 2, 3)

    assert peers.plain_text_tokens(text, lambda texts: [Encoding()] * len(texts), 8) == 3 * text.num_documents


def test_ours_counts_the_tokens_of_whole_steps_and_leaves_no_thread(corpus: Corpus):
    mixture = corpus.mixture(seq_len=1024, packs=8, lanes=4, steps=5)
    assert 0.95 * 5 * 8 * 1024 < ours.packed_tokens(mixture) <= 5 * 8 * 1024
    ours.drain()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("omniload")]
