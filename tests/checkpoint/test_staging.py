"""Staging memory: a private copy, reused, bounded."""

from __future__ import annotations

import mmap
import resource
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.boxes import Box
from checkpoint.engine.files import lay_out, views_of
from checkpoint.engine.memory import fault_in
from checkpoint.engine.staging import StagingPool, stage, staging_bytes
from checkpoint.errors import CoordinationTimeout
from checkpoint.format.codec import CODEC_NONE
from tests.checkpoint.simulation import DTYPES, bits, held, random_bits, shapes


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6))
def test_the_image_holds_every_box_and_does_not_change_with_the_tensors(
    wanted: list[tuple[tuple[int, ...], torch.dtype, bool]],
) -> None:
    tensors = []
    for index, (shape, dtype, strided) in enumerate(wanted):
        if 0 in shape:
            continue
        tensor = random_bits((*shape, 2000), dtype, seed=index)
        tensor = tensor[..., ::2] if strided else tensor
        tensors.append(held(f"t{index}", tensor, [Box.whole(tensor.shape)], group="ab"[index % 2]))
    tensors.sort(key=lambda one: (one.group, one.key))
    layouts = lay_out(3, tensors, np.arange(len(tensors)), {"*/t[135]": "zstd"})
    views = views_of(layouts, tensors)
    expected = [[bits(view) for view in of_file] for of_file in views]
    buffer = torch.empty(staging_bytes(layouts), dtype=torch.uint8)
    images = stage(layouts, views, buffer)
    for tensor in tensors:
        tensor.tensor.zero_()
    for layout, image, of_file in zip(layouts, images, expected, strict=True):
        assert len(image) == layout.image_bytes
        boxes = zip(layout.image_offsets.tolist(), layout.entries, of_file, strict=True)
        for begin, entry, data in boxes:
            assert image[begin : begin + len(data)].tobytes() == data
            assert begin % entry.dtype.itemsize == 0
        codecs = [entry.codec for entry in layout.entries]
        assert codecs == sorted(codecs, key=CODEC_NONE.__ne__), "compressed boxes come last"


def test_a_buffer_given_back_is_used_again() -> None:
    pool = StagingPool()
    first = pool.take(1 << 20, timeout_s=1)
    place = first.data_ptr()
    pool.give_back(first)
    assert pool.take(1 << 19, timeout_s=1).data_ptr() == place


def test_the_largest_buffer_is_used_first() -> None:
    """Else a state a little larger than the smaller one would allocate while enough lies idle."""
    pool = StagingPool()
    small, large = pool.take(1 << 19, timeout_s=1), pool.take(1 << 20, timeout_s=1)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(1 << 20, timeout_s=1).data_ptr() == large.data_ptr()


def test_a_third_save_waits_for_a_buffer_and_says_so_when_none_comes() -> None:
    pool = StagingPool()
    taken = [pool.take(10, timeout_s=1) for _ in range(2)]
    with pytest.raises(CoordinationTimeout, match=r"2 earlier saves are still being written after 0\.05 s"):
        pool.take(10, timeout_s=0.05)
    waiting = threading.Thread(target=lambda: taken.append(pool.take(10, timeout_s=20)))
    waiting.start()
    pool.give_back(taken[0])
    waiting.join(20)
    assert len(taken) == 3


def test_a_buffer_made_ready_is_the_first_one_taken() -> None:
    pool = StagingPool()
    pool.prepare(1 << 20)
    buffer = pool.take(1 << 20, timeout_s=20)
    assert pool._free == []
    pool.give_back(buffer)
    assert pool.take(1 << 20, timeout_s=20).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, 1 << 20])
def test_fresh_memory_has_its_pages_before_it_is_used(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes + 3 * mmap.PAGESIZE) as whole:
        memory = torch.frombuffer(whole, dtype=torch.uint8)[100 : 100 + num_bytes]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        fault_in(memory)
        faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory[: num_bytes // mmap.PAGESIZE * mmap.PAGESIZE].fill_(1)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del memory
    assert used - faulted < 10 + num_bytes // mmap.PAGESIZE // 10, (before, faulted, used)


def test_nothing_to_stage_is_fine() -> None:
    assert StagingPool().take(0, timeout_s=1).numel() == 0
