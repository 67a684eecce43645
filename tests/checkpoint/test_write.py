"""Payload files as they are written: digests of the right bytes, files side by side, failures that leave nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.boxes import Box
from checkpoint.engine.files import lay_out, views_of
from checkpoint.engine.staging import stage, staging_bytes
from checkpoint.engine.write import Live, Source, Staged, WrittenFile, write_files
from checkpoint.engine.yielding import Yielding
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.payload import decode_header
from checkpoint.frameworks.values import LocalTensor
from storage import Store
from storage.errors import NoSpace
from tests.checkpoint.simulation import bits, held, random_bits
from tests.checkpoint.watched_store import WatchedStore

SIZES = st.one_of(
    st.integers(1, 40),
    st.sampled_from(
        [(1 << 20) - 1, 1 << 20, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 3]
    ),
)


def locals_of(sizes: Sequence[int], *, group: str = "model") -> list[LocalTensor]:
    return [
        held(
            f"t{index:03d}", random_bits((size,), torch.uint8, seed=index), [Box((0,), (size,))], group=group
        )
        for index, size in enumerate(sizes)
    ]


def write(
    store: Store, tensors: list[LocalTensor], *, staged: bool, background: bool = False
) -> list[WrittenFile]:
    found = lay_out(0, tensors, np.arange(len(tensors)), {})
    views = views_of(found, tensors)
    sources: list[Source]
    if staged:
        buffer = torch.empty(staging_bytes(found), dtype=torch.uint8)
        sources = [Staged(*one) for one in zip(found, stage(found, views, buffer), strict=True)]
    else:
        sources = [Live(*one) for one in zip(found, views, strict=True)]
    return write_files(store, found, sources, patience_s=20 if background else None)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=8), st.booleans())
def test_every_piece_is_digested_and_lies_where_it_is_said_to(
    kinds: list[tuple[int, bool]], staged: bool
) -> None:
    """Some tensors have gaps, so that they are copied before they are written, beside others that are not."""
    store = Store("memory://write/digests")
    whole = [random_bits((size, 2), torch.uint8, seed=size) for size, _ in kinds]
    tensors = [
        held(f"t{index:03d}", one[:, 0] if gaps else one[:, 0].clone(), [Box((0,), (size,))])
        for index, (one, (size, gaps)) in enumerate(zip(whole, kinds, strict=True))
    ]
    (written,) = write(store, tensors, staged=staged)
    file = bytes(store.read(written.layout.name))
    assert len(file) == written.num_bytes
    header = file[: written.layout.header_bytes]
    assert xxhash.xxh3_64_intdigest(header) == written.header_xxh3
    entries = decode_header(header, "here")
    digests = iter(written.digests.tolist())
    for index, tensor in enumerate(tensors):
        data = bits(tensor.tensor)
        begin = int(written.byte_offset[index])
        assert file[begin : begin + len(data)] == data
        assert int(written.stored_bytes[index]) == len(data)
        at = [begin - len(header), begin - len(header) + len(data)]
        assert entries[tensor.key] == {"dtype": "U8", "shape": [len(data)], "data_offsets": at}
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        assert int(written.piece_counts[index]) == len(pieces)
        for piece in pieces:
            assert next(digests) == xxhash.xxh3_64_intdigest(piece)
    assert next(digests, None) is None


def test_files_of_several_groups_are_written_side_by_side() -> None:
    """Each file waits, before its first byte, for the other to come as far."""
    both = threading.Barrier(2)

    def hook(point: str) -> None:
        if point.startswith("before data"):
            both.wait(20)

    store = WatchedStore("memory://write/parallel", hook)
    tensors = [*locals_of([10], group="a"), *locals_of([10], group="b")]
    assert len(write(store, tensors, staged=False)) == 2


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the whole process")
@pytest.mark.parametrize(("background", "local"), [(True, True), (True, False), (False, True)])
def test_only_what_is_written_in_the_background_to_local_files_yields_the_cores(
    background: bool, local: bool, tmp_path: Path
) -> None:
    """Threads that remote clients start would inherit the priority for good, and so would this one."""
    before = niceness()
    seen = set()

    def hook(point: str) -> None:
        if "data" in point:
            seen.add((threading.get_native_id(), niceness()))

    place = str(tmp_path) if local else f"memory://write/priority-{background}"
    store = WatchedStore(place, hook)
    tensors = [*locals_of([10], group="a"), *locals_of([10], group="b")]
    assert len(write(store, tensors, staged=background, background=background)) == 2
    assert {nice for _, nice in seen} == {19 if background and local else before}
    assert len({thread for thread, _ in seen}) == 1 or not background
    assert niceness() == before


def test_ranks_that_share_the_cores_write_one_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    seen = set()
    store = WatchedStore(str(tmp_path), lambda point: seen.add((threading.get_native_id(), point)))
    write(store, [one for group in "abc" for one in locals_of([10], group=group)], staged=False)
    assert len({thread for thread, _ in seen}) == 1
    assert len({point for _, point in seen if point.startswith("before data")}) == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_is_raised_and_its_file_is_not_visible(background: bool) -> None:
    def hook(point: str) -> None:
        if point == "after data of b-00000-000.safetensors":
            raise NoSpace(point, "full")

    store = WatchedStore(f"memory://write/failure-{background}", hook)
    tensors = [one for group in "abc" for one in locals_of([10], group=group)]
    with pytest.raises(NoSpace):
        write(store, tensors, staged=False, background=background)
    assert "b-00000-000.safetensors" not in {file.path for file in store.list()}


def test_boxes_are_written_together() -> None:
    points = []
    store = WatchedStore("memory://write/gathered", points.append)
    write(store, locals_of([100] * 1000), staged=False)
    assert points.count("before data of model-00000-000.safetensors") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the whole process")
def test_patience_ends_and_the_rest_is_written_at_full_priority(tmp_path: Path) -> None:
    """Of a box of three blocks the first outlasts the patience."""
    seen = []

    def hook(point: str) -> None:
        if point.startswith("after data"):
            seen.append(niceness())
            time.sleep(1 if len(seen) == 1 else 0)

    tensors = locals_of([3 * PIECE_BYTES])
    found = lay_out(0, tensors, np.arange(1), {})
    sources = [Live(*one) for one in zip(found, views_of(found, tensors), strict=True)]
    before = niceness()
    (written,) = write_files(WatchedStore(str(tmp_path), hook), found, sources, patience_s=1)
    assert seen == [19, before, before]
    assert int(written.stored_bytes[0]) == 3 * PIECE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the whole process")
def test_what_somebody_waits_for_is_written_at_full_priority(tmp_path: Path) -> None:
    """The wait begins while the first of three blocks is written."""
    seen = []
    awaited = threading.Event()

    def hook(point: str) -> None:
        if point.startswith("after data"):
            seen.append(niceness())
            awaited.set()

    tensors = locals_of([3 * PIECE_BYTES])
    found = lay_out(0, tensors, np.arange(1), {})
    sources = [Live(*one) for one in zip(found, views_of(found, tensors), strict=True)]
    before = niceness()
    write_files(WatchedStore(str(tmp_path), hook), found, sources, patience_s=600, awaited=awaited)
    assert seen == [19, before, before]


def test_what_fails_on_the_yielding_thread_is_raised_by_the_caller() -> None:
    threads = []

    def fail() -> None:
        threads.append(threading.current_thread())
        raise NoSpace("here", "full")

    with Yielding(20, threading.Event()) as yielding, pytest.raises(NoSpace, match="here"):
        yielding.run(fail)
    assert threads != [threading.current_thread()]
