"""What peers are given to work with delivers what it claims, and who cannot run here is told why."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import peers, registry
from benchmarks.peers.packed import BATCH_TOKENS, Packed, packed_tokens


def documents(worker: int, num_workers: int) -> Iterator[np.ndarray]:
    """Documents of 1000 tokens, numbered through."""
    for i in range(worker, 400, num_workers):
        yield np.arange(1000 * i, 1000 * (i + 1), dtype=np.int32)


def test_packed_batches_hold_the_documents_end_to_end():
    batches = list(Packed(documents))
    assert len(batches) == 400_000 // BATCH_TOKENS == 6
    laid = np.concatenate([batch.numpy().ravel() for batch in batches])
    assert laid.dtype == np.int64
    assert np.array_equal(laid, np.arange(6 * BATCH_TOKENS))


def test_workers_share_the_documents():
    assert packed_tokens(documents, 0) == packed_tokens(documents, 2) == 6 * BATCH_TOKENS
    assert packed_tokens(documents, 0, derived=True) == 6 * BATCH_TOKENS


def test_all_are_those_that_can_run_here():
    left_out = () if peers.installed() else registry.WITH_PEERS
    assert registry.names("all") == tuple(name for name in registry.NAMES if name not in left_out)
    assert set(registry.WITH_PEERS) < set(registry.NAMES)


@pytest.mark.skipif(peers.installed(), reason="the peers are installed")
def test_a_benchmark_without_its_peers_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"needs .*streaming.*; run make bench-peers"):
        registry.names(registry.WITH_PEERS[0])
    assert registry.names("loader_packed") == ("loader_packed",)


def test_the_loop_makes_the_patches_that_the_loader_delivers():
    image = pytest.importorskip("PIL.Image")
    from benchmarks.loading import pictures
    from omniload.samples.images import ImagePatches

    transform = ImagePatches(placeholder=pictures.PLACEHOLDER)
    write = transform.extras.arrays["pixel_values"].write
    jpegs = pictures.jpegs(3)
    assert len({image.open(io.BytesIO(jpeg)).size for jpeg in jpegs}) == 3
    for jpeg in jpegs:
        wanted = pictures.patches(image.open(io.BytesIO(jpeg)))
        kept = transform({"image": jpeg})["pixel_values"]
        found = np.empty_like(wanted)
        assert write is not None
        write(found, kept)
        assert np.array_equal(found, wanted)


def test_pictures_are_the_same_every_time_and_compress_as_photographs_do():
    pytest.importorskip("PIL")
    from benchmarks.loading import pictures

    jpegs = pictures.jpegs(4)
    assert jpegs == pictures.jpegs(4)
    assert all(a != b for a, b in itertools.pairwise(jpegs))
    assert all(40_000 < len(jpeg) < 160_000 for jpeg in jpegs)
