"""Blocks that stay open: verified once, let go of when they are removed, never served damaged, within their bound."""

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import BlockCache
from storage.cache_block import PAGE_BYTES, parts_of
from storage.cache_open import MAX_OPEN, OPEN_BLOCKS
from storage.cache_reader import CacheReader
from tests.storage.conformance import content
from tests.storage.versioned import VersionedObjects

BLOCK = 2 * PAGE_BYTES


@pytest.fixture
def source() -> VersionedObjects:
    return VersionedObjects()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[BlockCache]:
    cache = BlockCache(tmp_path / "cache", 64 << 20, block_bytes=BLOCK)
    yield cache
    cache.release()


def read(reader: CacheReader, path: str, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    return bytes(buffer[: reader.read_range(path, start, memoryview(buffer))])


def block_files(cache: BlockCache) -> list[Path]:
    return [path for path in (cache._root / "blocks").rglob("*") if path.is_file()]


def num_open(cache: BlockCache) -> int:
    """Descriptors of this process that belong to files of the cache."""
    num = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            num += str(link.readlink()).startswith(f"{cache._root}/")
    return num


def flip(path: Path, offset: int, *, unseen: bool = False) -> None:
    """Change a byte in place; ``unseen``: as a disk does that decays, so that no time changes."""
    before = path.stat()
    with path.open("r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), offset)
    # Some systems count time in ticks of milliseconds, and the file may be as young as that.
    written_ns = before.st_mtime_ns + (0 if unseen else 1)
    os.utime(path, ns=(before.st_atime_ns, written_ns))


def in_page(number: int) -> int:
    """Offset in the file of a block of a byte of a page."""
    return 4096 + number * PAGE_BYTES + 77


def test_what_was_verified_is_not_hashed_again(cache: BlockCache, source: VersionedObjects) -> None:
    """A change that leaves no trace is seen at first use only: what verified once per open file means."""
    data = content(BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    assert reader.read_all("x") == data
    flip(block_files(cache)[0], in_page(0), unseen=True)
    assert reader.read_all("x") != data
    cache.release()
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert source.fetched == [("x", 0, BLOCK)]


def test_a_page_is_verified_when_it_is_first_read(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    assert read(reader, "x", 0, 10) == data[:10]
    flip(block_files(cache)[0], in_page(1), unseen=True)
    source.fetched.clear()
    assert read(reader, "x", 0, PAGE_BYTES) == data[:PAGE_BYTES]
    assert source.fetched == []
    assert read(reader, "x", PAGE_BYTES - 5, PAGE_BYTES + 5) == data[PAGE_BYTES - 5 : PAGE_BYTES + 5]
    assert source.fetched == [("x", 0, BLOCK)]


@pytest.mark.parametrize("change", ["overwritten", "cut short", "emptied", "removed", "replaced"])
def test_a_file_changed_after_it_was_verified_is_not_served(
    cache: BlockCache, source: VersionedObjects, change: str
) -> None:
    data = content(BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    assert reader.read_all("x") == data
    assert num_open(cache) == 1, "it is held"
    [path] = block_files(cache)
    if change == "overwritten":
        flip(path, in_page(0))
    elif change == "removed":
        path.unlink()
    elif change == "replaced":
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)
    else:
        os.truncate(path, 5000 if change == "cut short" else 0)
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert source.fetched == [("x", 0, BLOCK)]
    assert reader.read_all("x") == data
    assert len(source.fetched) == 1


ACTIONS = st.sampled_from(["read", "read", "read", "read all", "flip", "cut", "remove", "release"])


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=12))
def test_whatever_is_written_to_the_files_reads_are_exact(
    cache: BlockCache, source: VersionedObjects, plan: list[tuple[str, int, int]]
) -> None:
    data = content(3 * BLOCK + 777)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    for action, one, other in plan:
        files = sorted(block_files(cache))
        if action == "read":
            start, end = sorted((one % len(data), other % len(data)))
            assert read(reader, "x", start, end) == data[start:end]
        elif action == "read all":
            assert reader.read_all("x") == data
        elif action == "release":
            cache.release()
        elif files:
            path = files[one % len(files)]
            size = path.stat().st_size
            if action == "remove":
                path.unlink()
            elif action == "cut":
                os.truncate(path, other % (size + 1))
            elif size:
                flip(path, other % size)
    assert reader.read_all("x") == data


def test_no_more_files_are_held_than_allowed(cache: BlockCache, source: VersionedObjects) -> None:
    num_blocks = MAX_OPEN + 40
    data = content(num_blocks * BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    for _ in range(3):
        assert reader.read_all("x") == data
    assert num_open(cache) == MAX_OPEN
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert source.fetched == [], "a block that is held no more is still here"
    cache.release()
    assert num_open(cache) == 0


def test_caches_of_one_process_share_the_bound(tmp_path: Path, source: VersionedObjects) -> None:
    data = content((MAX_OPEN // 2 + 9) * BLOCK)
    source.put("x", data)
    caches = [BlockCache(tmp_path / name, 64 << 20, block_bytes=BLOCK) for name in ("a", "ab")]
    for _ in range(2):
        for cache in caches:
            assert CacheReader(cache, source).read_all("x") == data
    assert sum(map(num_open, caches)) == MAX_OPEN
    caches[0].release()
    assert num_open(caches[0]) == 0
    assert num_open(caches[1]) == MAX_OPEN // 2 + 9, "a directory with a longer name is another one"
    caches[1].release()


def test_what_is_evicted_takes_no_room_though_somebody_has_it_open(
    tmp_path: Path, source: VersionedObjects
) -> None:
    cache = BlockCache(tmp_path, 20 * (BLOCK + 4096), block_bytes=BLOCK)
    reader = CacheReader(cache, source)
    source.put("x", content(BLOCK))
    reader.read_all("x")
    elsewhere = os.open(block_files(cache)[0], os.O_RDONLY)  # as another process would
    try:
        for number in range(40):
            source.put(f"{number}", content(BLOCK, number))
            reader.read_all(f"{number}")
            assert cache.num_bytes() <= 20 * (BLOCK + 4096)
        facts = os.fstat(elsewhere)
        assert facts.st_nlink == 0, "it was not evicted"
        assert (facts.st_size, facts.st_blocks) == (0, 0)
    finally:
        os.close(elsewhere)
        cache.release()


def test_a_removed_directory_is_let_go_of(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(4 * BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    for _ in range(2):
        reader.read_all("x")
    assert num_open(cache) == 4
    subprocess.run(["rm", "-rf", cache._root], check=True, timeout=30)
    source.fetched.clear()
    assert read(reader, "x", 0, len(data)) == data
    assert [one[1] for one in source.fetched] == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert num_open(cache) == 0, "new blocks are opened when they are read again"


def test_threads_read_exactly_while_blocks_come_and_go(tmp_path: Path, source: VersionedObjects) -> None:
    bound = 20 * (BLOCK + 4096)
    cache = BlockCache(tmp_path, bound, block_bytes=BLOCK)
    contents = [content(8 * BLOCK - number, number) for number in range(5)]
    for number, data in enumerate(contents):
        source.put(f"{number}", data)
    reader = CacheReader(cache, source)

    def work(seed: int) -> int:
        dice = random.Random(seed)
        num_read = 0
        for _ in range(60):
            number = dice.randrange(len(contents))
            start = dice.randrange(8 * BLOCK - 100)
            end = min(start + dice.randrange(1, 3 * BLOCK), len(contents[number]))
            assert read(reader, f"{number}", start, end) == contents[number][start:end]
            num_read += end - start
        return num_read

    with ThreadPoolExecutor(8) as pool:
        num_read = sum(pool.map(work, range(8)))
    num_fetched = sum(one[2] for one in source.fetched)
    assert num_fetched > sum(map(len, contents)), "nothing was evicted"
    assert num_fetched < num_read + len(source.fetched) * BLOCK
    assert cache.num_bytes() <= bound
    cache.release()


def test_a_copy_reads_what_the_first_one_has(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(2 * BLOCK)
    source.put("x", data)
    CacheReader(cache, source).read_all("x")
    copy = pickle.loads(pickle.dumps(cache))
    source.fetched.clear()
    assert CacheReader(copy, source).read_all("x") == data
    assert source.fetched == []


def test_a_forked_child_reads_what_its_parent_has_open(cache: BlockCache) -> None:
    """Also when a thread, which the child lacks, holds the lock at that moment."""
    script = f"""
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from storage import BlockCache
from storage.cache_open import OPEN_BLOCKS
from storage.cache_reader import CacheReader
from tests.storage.conformance import content
from tests.storage.versioned import VersionedObjects
data, source = content({4 * BLOCK}), VersionedObjects()
source.put("x", data)
reader = CacheReader(BlockCache({str(cache._root)!r}, 64 << 20, block_bytes={BLOCK}), source)
for _ in range(2):
    assert reader.read_all("x") == data
assert len(OPEN_BLOCKS) == 4
source.fetched.clear()
held, done = threading.Event(), threading.Event()
def hold():
    with OPEN_BLOCKS._lock:
        held.set()
        done.wait(60)
threading.Thread(target=hold).start()
held.wait(60)
child = os.fork()
if not child:
    right = reader.read_all("x") == data and not source.fetched
    reader._cache.release()
    os._exit(0 if right else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
assert reader.read_all("x") == data and not source.fetched
sys.exit(code)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_a_block_let_go_of_is_closed_when_its_last_reader_is_done(
    cache: BlockCache, source: VersionedObjects
) -> None:
    """Closed earlier, its number could go to another file while somebody reads from it."""
    data = content(BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    for _ in range(2):
        reader.read_all("x")
    version = reader.version("x")
    assert version is not None
    into = bytearray(BLOCK)
    [part] = parts_of(version, BLOCK, 0, memoryview(into))
    reading = OPEN_BLOCKS.get(str(block_files(cache)[0]))
    assert reading is not None
    cache.release()
    assert num_open(cache) == 1
    assert reading.read([part])
    assert into == data
    del reading
    assert num_open(cache) == 0
