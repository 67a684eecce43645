"""The bound of the cache: never exceeded, whoever writes or dies; what is old goes first."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import storage.cache
import storage.cache_space
from storage import (
    BadRequest,
    BlockCache,
    PermissionDenied,
    StorageError,
    drain,
)
from storage.cache_block import parts_of
from storage.cache_reader import CacheReader
from storage.cache_space import Space
from storage.file_lock import locked
from tests.storage.conformance import content
from tests.storage.disks import tmpfs
from tests.storage.versioned import VersionedObjects

BLOCK = 16 << 10
FILE = BLOCK + 4096  # a block with its header
BOUND = 20 * FILE


@pytest.fixture
def source() -> VersionedObjects:
    return VersionedObjects()


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache", BOUND, block_bytes=BLOCK)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with tmpfs(tmp_path / "disk", "size=2m") as mount:
        yield mount


def on_disk(cache: BlockCache) -> int:
    files = [path for name in ("new", "blocks") for path in (cache._root / name).rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)


def is_here(source: VersionedObjects, reader: CacheReader, path: str) -> bool:
    source.fetched.clear()
    reader.read_all(path)
    return not source.fetched


def age(cache: BlockCache, seconds: int) -> None:
    for path in (cache._root / "blocks").rglob("*"):
        facts = path.stat()
        os.utime(path, ns=(facts.st_atime_ns - seconds * 10**9, facts.st_mtime_ns))


def test_the_bound_holds_and_the_cache_is_used(cache: BlockCache, source: VersionedObjects) -> None:
    reader = CacheReader(cache, source)
    for index in range(100):
        source.put(f"x{index}", content(BLOCK, index))
        assert reader.read_all(f"x{index}") == content(BLOCK, index)
        assert on_disk(cache) <= cache.num_bytes() <= BOUND
    assert cache.num_bytes() >= 0.8 * BOUND


def test_small_objects_count_what_they_take(cache: BlockCache, source: VersionedObjects) -> None:
    reader = CacheReader(cache, source)
    for index in range(200):
        source.put(f"x{index}", b"1")
        reader.read_all(f"x{index}")
    assert on_disk(cache) <= BOUND


def test_what_was_not_read_for_longest_goes_first(cache: BlockCache, source: VersionedObjects) -> None:
    reader = CacheReader(cache, source)
    for index in range(20):
        source.put(f"x{index}", content(BLOCK, index))
        reader.read_all(f"x{index}")
        age(cache, 10)
    assert is_here(source, reader, "x0")
    source.put("new", content(BLOCK))
    reader.read_all("new")
    assert is_here(source, reader, "x0"), "it was read just now"
    assert is_here(source, reader, "x19")
    assert is_here(source, reader, "new")
    assert not is_here(source, reader, "x1")


def test_an_abandoned_file_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    space = Space(tmp_path, BOUND)
    living = space.make(BLOCK)
    dead = space.make(BLOCK)
    assert living is not None
    assert dead is not None
    os.close(dead[0])  # what the system does to a killed process
    for index in range(100):
        made = space.make(BLOCK)
        assert made is not None
        os.close(made[0])
        space.publish(made[1], f"{index:032x}")
        assert space.count() <= BOUND
    assert living[1].exists()
    assert not dead[1].exists()
    space.publish(living[1], "f" * 32)
    os.close(living[0])
    assert Path(space.path("f" * 32)).exists()


@pytest.mark.parametrize("books", [b"", b"rubbish", b"another-boot 00000000000000000000\n"])
def test_books_that_mean_nothing_are_made_anew(
    cache: BlockCache, source: VersionedObjects, books: bytes
) -> None:
    reader = CacheReader(cache, source)
    for index in range(60):
        source.put(f"x{index}", content(BLOCK, index))
        reader.read_all(f"x{index}")
        (cache._root / "usage").write_bytes(books)
        assert on_disk(cache) <= BOUND


def test_removing_the_directory_empties_the_cache(cache: BlockCache, source: VersionedObjects) -> None:
    reader = CacheReader(cache, source)
    source.put("x", content(BLOCK))
    reader.read_all("x")
    subprocess.run(["rm", "-rf", cache._root], check=True, timeout=30)
    assert not is_here(source, reader, "x")
    assert is_here(source, reader, "x")


@pytest.mark.usefixtures("recording")
def test_a_full_disk_only_means_that_nothing_is_kept(source: VersionedObjects, small_disk: Path) -> None:
    cache = BlockCache(small_disk / "cache", 1 << 30, block_bytes=BLOCK)
    reader = CacheReader(cache, source)
    data = content(4 << 20)
    source.put("x", data)
    assert reader.read_all("x") == data
    assert reader.read_all("x") == data
    failed = [one for one in drain() if one.name == "storage.cache_store" and "error" in one.attributes]
    assert failed, "the disk was not full"
    assert all(one.attributes["error"] == "OSError" for one in failed)
    assert not list((cache._root / "new").iterdir()), "what did not fit is removed"
    cache.release()  # or the disk could not be unmounted


def test_a_stuck_process_holds_up_nobody_for_ever(
    cache: BlockCache, source: VersionedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process stopped while it held the locks: blocks are fetched, and not kept."""
    monkeypatch.setattr(storage.cache, "_FETCH_TIMEOUT_S", 0.01)
    monkeypatch.setattr(storage.cache_space, "_LOCK_TIMEOUT_S", 0.01)
    reader = CacheReader(cache, source)
    source.put("x", content(BLOCK))
    with ExitStack() as held:
        held.enter_context(locked(cache._root / "usage", 0))
        version = source.look_up("x")
        assert version is not None
        [part] = parts_of(version, BLOCK, 0, memoryview(bytearray(BLOCK)))
        held.enter_context(cache.fetching(part.block))
        for _ in range(2):
            source.fetched.clear()
            buffer = bytearray(10)
            assert reader.read_range("x", 5, memoryview(buffer)) == 10
            assert buffer == content(BLOCK)[5:15]
            assert source.fetched == [("x", 0, BLOCK)]
    assert is_here(source, reader, "x") is False
    assert is_here(source, reader, "x") is True


def test_sizes_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="at least 16 blocks of 1048576 bytes"):
        BlockCache(tmp_path, 1 << 20, block_bytes=1 << 20)
    with pytest.raises(BadRequest, match="block_bytes is 0"):
        BlockCache(tmp_path, 1 << 20, block_bytes=0)
    with pytest.raises(BadRequest, match="recheck_s is -1"):
        BlockCache(tmp_path, 1 << 30, recheck_s=-1)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((StorageError, PermissionDenied), match="file/cache"):
        BlockCache(tmp_path / "file" / "cache", 1 << 30)


# Reads 20 objects of 8 blocks in a random order again and again, three times what the bound holds.
READER = """
import random, sys
from storage import BlockCache
from storage.cache_reader import CacheReader
from tests.storage.versioned import VersionedObjects
directory, bound, block, seed, rounds = sys.argv[1], *map(int, sys.argv[2:])
contents = [random.Random(index).randbytes(8 * block - index) for index in range(20)]
source = VersionedObjects()
for index, content in enumerate(contents):
    source.put(f"x{index}", content)
reader = CacheReader(BlockCache(directory, bound, block_bytes=block), source)
dice = random.Random(seed)
print("ready", flush=True)
for _ in range(rounds):
    index = dice.randrange(20)
    begin = dice.randrange(8 * block - 100)
    buffer = bytearray(dice.randrange(1, 8 * block))
    num_read = reader.read_range(f"x{index}", begin, memoryview(buffer))
    assert buffer[:num_read] == contents[index][begin : begin + len(buffer)], index
"""

SHARED_BLOCK = 64 << 10
SHARED_BOUND = 55 * (SHARED_BLOCK + 4096)


def start(cache: BlockCache, seed: int, rounds: int) -> "subprocess.Popen[str]":
    """A process that reads; it has begun when this returns."""
    arguments = [str(number) for number in (SHARED_BOUND, SHARED_BLOCK, seed, rounds)]
    command = [sys.executable, "-c", READER, str(cache._root), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def shared(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache", SHARED_BOUND, block_bytes=SHARED_BLOCK)


def test_processes_share_the_bound_and_the_blocks(shared: BlockCache) -> None:
    running = [start(shared, seed, 150) for seed in range(4)]
    try:
        while any(process.poll() is None for process in running):
            assert shared.num_bytes() <= SHARED_BOUND
            time.sleep(0.02)  # counting locks the books
        assert [process.wait(60) for process in running] == [0] * 4
    finally:
        for process in running:
            process.kill()
            process.wait(30)
    assert shared.num_bytes() > 0.7 * SHARED_BOUND


@pytest.mark.chaos
def test_killed_processes_leave_no_bad_block_and_no_lost_room(shared: BlockCache) -> None:
    dice = random.Random(7)
    num_kills = num_unfinished = 0
    while num_kills < 20 or (not num_unfinished and num_kills < 100):
        running = [start(shared, num_kills + one, 1 << 30) for one in range(2)]
        time.sleep(dice.uniform(0.0, 0.1))
        for process in running:
            process.kill()
        # A reader that got a wrong byte has ended by itself.
        assert [process.wait(30) for process in running] == [-signal.SIGKILL] * 2
        num_kills += len(running)
        num_unfinished += len(list((shared._root / "new").iterdir()))
        assert shared.num_bytes() <= SHARED_BOUND
    assert num_unfinished, "no kill came in the middle of a write"
    assert start(shared, 0, 200).wait(60) == 0
    assert list((shared._root / "new").iterdir()) == []
    assert shared.num_bytes() <= SHARED_BOUND
