"""Reads through the cache: exact, of one version, fetched once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import BlockCache, Corrupt, Transient
from storage.cache_block import Version
from storage.cache_reader import CacheReader, OneVersion
from storage.range_file import open_ranges
from tests.storage.conformance import content
from tests.storage.versioned import VersionedObjects

BLOCK = 128 << 10  # two pages


@pytest.fixture
def source() -> VersionedObjects:
    return VersionedObjects()


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache", 64 << 20, block_bytes=BLOCK)


def read(reader: CacheReader, path: str, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    return bytes(buffer[: reader.read_range(path, start, memoryview(buffer))])


def block_files(cache: BlockCache) -> list[Path]:
    return [path for path in (cache._root / "blocks").rglob("*") if path.is_file()]


def test_only_missing_blocks_are_fetched_and_each_once(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(3 * BLOCK + 1000)
    source.put("x", data)
    reader = CacheReader(cache, source)
    assert read(reader, "x", BLOCK + 5, BLOCK + 9) == data[BLOCK + 5 : BLOCK + 9]
    assert source.fetched == [("x", BLOCK, BLOCK)]
    assert read(reader, "x", 0, len(data)) == data
    assert source.fetched[1:] == [("x", 0, BLOCK), ("x", 2 * BLOCK, BLOCK), ("x", 3 * BLOCK, 1000)]
    source.fetched.clear()
    assert read(CacheReader(cache, source), "x", 0, len(data)) == data
    assert reader.read_all("x") == data
    assert source.fetched == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_any_ranges_are_exact(cache: BlockCache, source: VersionedObjects, drawn: st.DataObject) -> None:
    size = drawn.draw(st.sampled_from([0, 1, 65536, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 777]))
    data = content(size, seed=size)
    source.put("x", data)
    reader = CacheReader(cache, source)
    bounds = st.tuples(st.integers(0, size + 10), st.integers(0, size + 10)).map(sorted)
    for start, end in drawn.draw(st.lists(bounds, min_size=1, max_size=6)):
        assert read(reader, "x", start, end) == data[start:end]
    assert reader.read_all("x") == data


def test_a_whole_object_is_one_request(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(5 * BLOCK + 3)
    source.put("x", data)
    reader = CacheReader(cache, source)
    assert reader.read_all("x") == data
    assert source.fetched == [("x", 0, len(data))]
    block_files(cache)[0].unlink()
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert len(source.fetched) == 1, "and so is what is missing from it"
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert source.fetched == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap", "unreadable"])
def test_damaged_blocks_are_fetched_again(cache: BlockCache, source: VersionedObjects, damage: str) -> None:
    data = content(2 * BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    first, second = block_files(cache)
    if damage == "flip":
        for path in (first, second):
            for offset in (3, 4096 + 70_000):
                stored = bytearray(path.read_bytes())
                stored[offset] ^= 1
                path.write_bytes(stored)
                source.fetched.clear()
                assert reader.read_all("x") == data
                assert source.fetched, "the damage was not seen"
        return
    if damage == "truncate":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "empty":
        first.write_bytes(b"")
    elif damage == "swap":
        stored = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(stored)
    else:
        first.unlink()
        first.mkdir()
    source.fetched.clear()
    assert reader.read_all("x") == data
    assert source.fetched


def test_a_page_that_is_not_read_need_not_be_sound(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(BLOCK)
    source.put("x", data)
    reader = CacheReader(cache, source)
    reader.read_all("x")
    [path] = block_files(cache)
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 1
    path.write_bytes(stored)
    source.fetched.clear()
    assert read(reader, "x", 0, 65536) == data[:65536]
    assert source.fetched == []
    assert read(reader, "x", 65536, 65540) == data[65536:65540]
    assert source.fetched == [("x", 0, BLOCK)]


def test_a_replaced_object_is_read_anew(tmp_path: Path, source: VersionedObjects) -> None:
    cache = BlockCache(tmp_path, 64 << 20, block_bytes=BLOCK, recheck_s=0)
    reader = CacheReader(cache, source)
    for seed in range(4):
        source.put("x", content(2 * BLOCK, seed))  # the same size each time
        assert reader.read_all("x") == content(2 * BLOCK, seed)
        assert read(reader, "x", 0, 2 * BLOCK) == content(2 * BLOCK, seed)


def test_a_version_is_asked_for_once_per_recheck_time(cache: BlockCache, source: VersionedObjects) -> None:
    source.put("x", b"1")
    reader = CacheReader(cache, source)
    reader.read_all("x")
    asked = source.num_look_ups
    for _ in range(10):
        reader.read_all("x")
    assert source.num_look_ups == asked
    source.put("x", b"2")
    assert reader.read_all("x") == b"1"
    reader.forget("x")
    assert reader.read_all("x") == b"2"


def test_growth_is_noticed_at_once_by_reads_beyond_the_end(
    cache: BlockCache, source: VersionedObjects
) -> None:
    source.put("x", b"12")
    reader = CacheReader(cache, source)
    assert read(reader, "x", 0, 2) == b"12"
    source.put("x", b"345")
    assert read(reader, "x", 0, 3) == b"345"


def test_a_read_never_mixes_versions(cache: BlockCache, source: VersionedObjects) -> None:
    """The object is replaced while its second block is being fetched."""
    old, new = content(3 * BLOCK, 1), content(3 * BLOCK, 2)
    source.put("x", old)
    reader = CacheReader(cache, source)
    assert read(reader, "x", 0, BLOCK) == old[:BLOCK]

    def replace(path: str) -> None:
        source.before_fetch = lambda path: None
        source.put(path, new)

    source.before_fetch = replace
    assert read(reader, "x", 0, 3 * BLOCK) == new
    assert CacheReader(cache, source).read_all("x") == new


def test_a_whole_read_never_mixes_versions(cache: BlockCache, source: VersionedObjects) -> None:
    old, new = content(3 * BLOCK, 1), content(3 * BLOCK, 2)
    source.put("x", old)
    reader = CacheReader(cache, source)
    read(reader, "x", 0, BLOCK)

    def replace(path: str) -> None:
        source.before_fetch = lambda path: None
        source.put(path, new)

    source.before_fetch = replace
    assert reader.read_all("x") == new


def test_an_object_replaced_again_and_again_is_given_up(cache: BlockCache, source: VersionedObjects) -> None:
    source.put("x", b"0")
    source.before_fetch = lambda path: source.put(path, b"0")
    with pytest.raises(Transient, match="fake://x: was replaced 5 times"):
        CacheReader(cache, source).read_all("x")
    assert block_files(cache) == []


def test_an_open_file_shows_one_version_or_fails(cache: BlockCache, source: VersionedObjects) -> None:
    old = content(40 * BLOCK, 1)
    source.put("x", old)
    reader = CacheReader(cache, source)
    version = reader.version("x")
    assert version is not None
    with open_ranges(OneVersion(reader, version), "x", version.url) as file:
        assert file.read(10) == old[:10]
        source.put("x", content(40 * BLOCK, 2))
        assert file.read(10) == old[10:20], "this block is here"
        file.seek(-5, 2)
        with pytest.raises(Corrupt, match="fake://x: was replaced while it was open"):
            file.read(5)
    assert reader.read_all("x") == content(40 * BLOCK, 2)


def test_what_has_no_tag_is_not_kept(cache: BlockCache, source: VersionedObjects) -> None:
    reader = CacheReader(cache, source)
    for value in (b"1", b"2"):
        source.put("x", value, tagged=False)
        assert reader.read_all("x") == value
        assert read(reader, "x", 0, 9) == value
    assert block_files(cache) == []


def test_what_is_absent_is_not_found(cache: BlockCache, source: VersionedObjects) -> None:
    with pytest.raises(FileNotFoundError):
        CacheReader(cache, source).read_all("x")


def test_many_readers_of_one_block_fetch_it_once(cache: BlockCache, source: VersionedObjects) -> None:
    data = content(BLOCK)
    source.put("x", data)
    start = threading.Barrier(16)

    def attempt(index: int) -> bytes:
        reader = CacheReader(cache, source)
        start.wait(30)
        return read(reader, "x", 100 * index, 100 * index + 100)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(attempt, range(16))) == [data[100 * i : 100 * i + 100] for i in range(16)]
    assert len(source.fetched) == 1


def test_a_write_during_a_look_up_is_not_missed(cache: BlockCache) -> None:
    """The old version was seen before the write and is remembered after it: the next read must ask again."""

    class Slow(VersionedObjects):
        def look_up(self, path: str) -> Version | None:
            version = super().look_up(path)
            if self.num_look_ups == 1:
                self.put(path, b"new")
                reader.forget(path)
            return version

    slow = Slow()
    slow.put("x", b"old")
    reader = CacheReader(cache, slow)
    reader.version("x")
    assert reader.read_all("x") == b"new"
