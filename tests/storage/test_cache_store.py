"""A store that reads through the cache, against a real S3 server."""

import pickle
import random
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import (
    BadRequest,
    BlockCache,
    Corrupt,
    NotFound,
    Span,
    Store,
    drain,
)
from tests.storage.conformance import MIB, BackendConformance, content
from tests.storage.seaweed import S3Server


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache", 256 * MIB, block_bytes=4 * MIB)


@pytest.fixture
def store(s3: S3Server, cache: BlockCache) -> Store:
    return Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}/", s3.storage_options, cache=cache)


class TestCachedS3(BackendConformance):
    pass


def num_bytes_of(spans: list[Span], name: str) -> int:
    return sum(int(str(one.attributes["num_bytes"])) for one in spans if one.name == name)


@pytest.mark.usefixtures("recording")
def test_bytes_cross_the_network_once(store: Store, s3: S3Server, cache: BlockCache) -> None:
    data = content(10 * MIB)
    store.write("x", data)
    drain()
    views = store.read_ranges([("x", 1000 * i, 1000 * i + 900) for i in range(200)] + [("x", 0, len(data))])
    assert views[-1] == data
    assert [bytes(view) for view in views[:200]] == [data[1000 * i : 1000 * i + 900] for i in range(200)]
    spans = drain()
    assert num_bytes_of(spans, "storage.cache_miss") == len(data)
    assert num_bytes_of(spans, "storage.cache_store") == len(data)
    other = Store(store.url, s3.storage_options, cache=cache)
    assert other.read("x") == data
    assert num_bytes_of(drain(), "storage.cache_hit") == len(data)


@pytest.mark.usefixtures("recording")
def test_what_is_here_and_what_is_missing_in_one_call(store: Store, cache: BlockCache) -> None:
    """Ranges of several objects, some of whose blocks are here, in any order and across borders."""
    dice = random.Random(3)
    contents = {"a": content(20 * MIB + 5, 1), "b": content(9 * MIB, 2), "empty": b""}
    for path, data in contents.items():
        store.write(path, data)
        store.read(path)
    blocks = sorted(path for path in (cache._root / "blocks").rglob("*") if path.is_file())
    for path in dice.sample(blocks, 4):
        path.unlink()
    wanted = [("empty", 0, 0)]
    for _ in range(120):
        path = dice.choice("ab")
        start = dice.randrange(len(contents[path]))
        longest = dice.choice([10, 70_000, 5 * MIB])
        wanted.append((path, start, min(len(contents[path]), start + dice.randrange(longest))))
    drain()
    views = store.read_ranges(wanted)
    assert all(
        view == contents[path][start:end] for view, (path, start, end) in zip(views, wanted, strict=True)
    )
    spans = drain()
    missing = [one.attributes["num_bytes"] for one in spans if one.name == "storage.cache_miss"]
    assert len(missing) == 4, "each of them once"
    assert num_bytes_of(spans, "storage.cache_hit") > 30 * MIB


def test_a_range_beyond_the_end_of_what_is_here_is_named(store: Store) -> None:
    store.write("x", content(5 * MIB))
    store.read("x")
    with pytest.raises(
        Corrupt, match=rf"/x: bytes {4 * MIB}..{6 * MIB} wanted, the object ends at {5 * MIB}"
    ):
        store.read_ranges([("x", 0, 10), ("x", 1, 6 * MIB)])


@pytest.mark.usefixtures("recording")
def test_hits_need_no_server(cache: BlockCache, s3: S3Server) -> None:
    """While the version is trusted, not even the credentials are used."""
    writer = Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}", s3.storage_options)
    data = content(5 * MIB)
    writer.write("x", data)
    reader = Store(writer.url, s3.storage_options, cache=cache)
    reader.read("x")
    writer.delete("x")
    assert reader.read("x") == data
    with pytest.raises(NotFound):
        reader.stat("x")


def test_own_writes_are_seen_at_once_also_below(store: Store) -> None:
    below = store.sub("a")
    for version in range(3):
        store.write("a/x", [b"store", bytes([version])])
        assert below.read("x") == store.read("a/x") == b"store" + bytes([version])
        with below.writer("x") as writer:
            writer.write(bytes([version]) * 5)
        assert below.read("x") == store.read("a/x") == bytes([version]) * 5
    store.delete_tree("a")
    with pytest.raises(NotFound):
        below.read("x")


def test_what_others_write_is_seen_when_it_is_asked_for(s3: S3Server, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 64 * MIB, block_bytes=MIB, recheck_s=0)
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    reader, writer = Store(url, s3.storage_options, cache=cache), Store(url, s3.storage_options)
    for seed in range(3):
        writer.write("x", content(3 * MIB, seed))
        assert reader.read("x") == content(3 * MIB, seed)
        [view] = reader.read_ranges([("x", 5, 3 * MIB)])
        assert view == content(3 * MIB, seed)[5:]


def test_an_open_file_never_mixes_versions(s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    cache = BlockCache(tmp_path, 64 * MIB, block_bytes=MIB)
    reader, writer = Store(url, s3.storage_options, cache=cache), Store(url, s3.storage_options)
    writer.write("x", content(8 * MIB, 1))
    with reader.open("x") as file:
        assert file.read(100) == content(8 * MIB, 1)[:100]
        writer.write("x", content(8 * MIB, 2))
        file.seek(6 * MIB)
        with pytest.raises(Corrupt, match=r"/x: was replaced while it was open"):
            file.read(100)
    with reader.open("x") as file:
        assert file.read() == content(8 * MIB, 2)


def test_parquet_through_the_cache(store: Store) -> None:
    table = pa.table({"n": list(range(200_000)), "s": [str(i) for i in range(200_000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=50_000)
    store.write("t.parquet", sink.getvalue())
    for _ in range(2):
        with store.open("t.parquet") as file:
            assert pq.ParquetFile(file).read_row_group(2).equals(table.slice(100_000, 50_000))


def test_a_store_with_a_cache_travels_to_other_processes(store: Store) -> None:
    store.write("x", b"1")
    store.read("x")
    assert pickle.loads(pickle.dumps(store)).read("x") == b"1"


def test_objects_without_a_tag_are_read_every_time(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 64 * MIB, block_bytes=MIB)
    reader, writer = Store("memory://cached", cache=cache), Store("memory://cached")
    for value in (b"1", b"2"):
        writer.write("x", value)
        assert reader.read("x") == value
        with reader.open("x") as file:
            assert file.read() == value
    assert cache.num_bytes() == 0


def test_a_cache_for_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="a cache means nothing for a local path"):
        Store(tmp_path, cache=BlockCache(tmp_path / "cache", 64 * MIB, block_bytes=MIB))
