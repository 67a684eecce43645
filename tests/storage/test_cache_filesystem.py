"""The cached fsspec file system: fsspec's own suites, and that it is really cached."""

import hashlib
import pickle
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.tests.abstract
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import s3fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from storage import BlockCache, Corrupt, drain
from storage.cache_filesystem import CachedFileSystem
from tests.storage.conformance import MIB, content
from tests.storage.seaweed import S3Server


class TaggedMemory(MemoryFileSystem):
    """Files in memory that have a tag."""

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found = dict(super().info(path, **kwargs))
        if found["type"] == "file":
            found["ETag"] = hashlib.sha256(self.store[self._strip_protocol(path)].getvalue()).hexdigest()
        return found


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    return BlockCache(tmp_path / "cache", 64 * MIB, block_bytes=MIB)


class MemoryFixtures(AbstractFixtures):
    @pytest.fixture
    def fs(self, cache: BlockCache) -> Iterator[CachedFileSystem]:
        memory = TaggedMemory()
        yield CachedFileSystem(memory, cache)
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return ""


class TestMemoryCopy(AbstractCopyTests, MemoryFixtures):
    pass


class TestMemoryGet(AbstractGetTests, MemoryFixtures):
    pass


class TestMemoryOpen(AbstractOpenTests, MemoryFixtures):
    pass


class TestMemoryPipe(AbstractPipeTests, MemoryFixtures):
    pass


class TestMemoryPut(AbstractPutTests, MemoryFixtures):
    pass


class TestS3Get(AbstractGetTests, AbstractFixtures):
    """Reading from a real server; what writes is passed on, so its suites would test s3fs and the server."""

    @pytest.fixture
    def fs(self, s3: S3Server, cache: BlockCache) -> CachedFileSystem:
        return CachedFileSystem(s3fs.S3FileSystem(**s3.storage_options), cache)

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self, s3: S3Server) -> str:
        return f"{s3.bucket}/{uuid.uuid4().hex}"


def test_every_suite_that_fsspec_has_is_run() -> None:
    suites = {name for name in vars(fsspec.tests.abstract) if re.fullmatch("Abstract.+Tests", name)}
    ours = {name.replace("TestMemory", "Abstract") for name in globals() if name.startswith("TestMemory")}
    assert suites == {f"{name}Tests" for name in ours}


@pytest.fixture
def memory() -> Iterator[TaggedMemory]:
    memory = TaggedMemory()
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def fs(memory: TaggedMemory, cache: BlockCache) -> CachedFileSystem:
    return CachedFileSystem(memory, cache)


def test_what_was_read_is_not_fetched_again(fs: CachedFileSystem, memory: TaggedMemory) -> None:
    data = content(3 * MIB)
    fs.pipe_file("/x", data)
    assert fs.cat_file("/x") == data
    memory.store["/x"].write(b"changed behind its back")
    assert fs.cat_file("/x") == data
    assert fs.cat_file("memory:///x", 5, 9) == data[5:9]
    with fs.open("/x") as file:
        assert file.read() == data
    fs.invalidate_cache()
    assert fs.cat_file("/x") != data


def test_slices_are_those_of_python(fs: CachedFileSystem) -> None:
    data = content(2 * MIB + 5)
    fs.pipe_file("/x", data)
    for start, end in [(None, 7), (3, None), (-4, None), (-9, -2), (None, -5), (5, 5), (9, 2), (10, 1 << 40)]:
        assert fs.cat_file("/x", start, end) == data[start:end]
    assert fs.head("/x", 3) == data[:3]
    assert fs.tail("/x", 3) == data[-3:]


def test_many_ranges_at_once(fs: CachedFileSystem) -> None:
    data = content(2 * MIB)
    fs.pipe_file("/x", data)
    starts, ends = [0, MIB - 1, 7], [10, MIB + 1, 7]
    assert fs.cat_ranges(["/x"] * 3, starts, ends) == [data[:10], data[MIB - 1 : MIB + 1], b""]
    assert fs.cat_ranges(["/x", "/x"], 0, 2) == [data[:2]] * 2
    found = fs.cat_ranges(["/x", "/missing"], [0, 0], [1, 1])
    assert found[0] == data[:1]
    assert isinstance(found[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["/x", "/missing"], [0, 0], [1, 1], on_error="raise")


def test_own_changes_are_seen_at_once(fs: CachedFileSystem) -> None:
    def write_open(path: str, data: bytes) -> None:
        with fs.open(path, "wb") as file:
            file.write(data)

    for data, change in [
        (b"1", lambda: fs.pipe_file("/x", b"1")),
        (b"2", lambda: fs.pipe({"/x": b"2"})),
        (b"3", lambda: write_open("/x", b"3")),
        (b"4", lambda: (write_open("/y", b"4"), fs.copy("/y", "/x"))),
        (b"5", lambda: (write_open("/y", b"5"), fs.mv("/y", "/x"))),
        (b"6", lambda: fs.write_text("/x", "6")),
        (b"", lambda: fs.touch("/x")),
    ]:
        change()
        assert fs.cat_file("/x") == fs.open("/x").read() == data
    fs.rm("/x")
    with pytest.raises(FileNotFoundError):
        fs.cat_file("/x")


def test_a_file_that_cannot_be_moved_stays_as_it_is(cache: BlockCache, tmp_path: Path) -> None:
    """What the one module of fsspec's suites that has no class asserts of a local file system."""
    fs = CachedFileSystem(LocalFileSystem(), cache)
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(FileNotFoundError):
        fs.mv(str(tmp_path / "x"), str(tmp_path / "missing" / "x"))
    assert fs.cat_file(str(tmp_path / "x")) == b"1"
    assert list(tmp_path.glob("missing*")) == []


def test_a_file_being_written_is_read_as_it_is(fs: CachedFileSystem) -> None:
    fs.pipe_file("/x", b"old")
    with fs.open("/x", "wb") as file:
        for text in (b"n", b"ne", b"new"):
            file.write(text[-1:])
            file.flush()
            assert fs.cat_file("/x") == text
    assert fs.cat_file("/x") == b"new"


def test_an_open_file_never_mixes_versions(fs: CachedFileSystem) -> None:
    fs.pipe_file("/x", content(4 * MIB, 1))
    with fs.open("/x") as file:
        file.read(1)
        fs.pipe_file("/x", content(4 * MIB, 2))
        with pytest.raises(Corrupt, match="replaced while it was open"):
            file.read()


def test_files_without_a_tag_are_read_every_time(cache: BlockCache, memory: TaggedMemory) -> None:
    fs = CachedFileSystem(MemoryFileSystem(), cache)
    for data in (b"1", b"2"):
        memory.store.clear()
        memory.pipe_file("/x", data)
        assert fs.cat_file("/x") == fs.open("/x").read() == data
    assert cache.num_bytes() == 0


def test_text_and_compression(fs: CachedFileSystem) -> None:
    with fs.open("/x.gz", "wt", compression="gzip") as file:
        file.write("two\nlines")
    with fs.open("/x.gz", "rt", compression="infer") as file:
        assert file.readlines() == ["two\n", "lines"]


@pytest.mark.usefixtures("recording")
def test_pyarrow_reads_data_sets_on_s3_through_it(s3: S3Server, cache: BlockCache) -> None:
    """A copy that travelled to another process reads from the blocks of the first."""
    fs = CachedFileSystem(s3fs.S3FileSystem(**s3.storage_options), cache)
    root = f"{s3.bucket}/{uuid.uuid4().hex}"
    tables = [pa.table({"n": list(range(i * 1000, i * 1000 + 1000))}) for i in range(3)]
    for index, table in enumerate(tables):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        fs.pipe_file(f"{root}/{index}.parquet", sink.getvalue().to_pybytes())
    wanted = pa.concat_tables(tables)
    assert ds.dataset(root, filesystem=fs, format="parquet").to_table().sort_by("n").equals(wanted)
    copy = pickle.loads(pickle.dumps(fs))
    drain()
    assert ds.dataset(root, filesystem=copy, format="parquet").to_table().sort_by("n").equals(wanted)
    names = {one.name for one in drain()}
    assert "storage.cache_hit" in names
    assert "storage.cache_miss" not in names
