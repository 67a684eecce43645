"""Side-car indices: kept where that is possible, used only if whole and of this version of the file."""

from __future__ import annotations

import io
import logging
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import storage
from omniload.errors import CorruptSource
from omniload.sources import FileEntry, Source
from omniload.sources.sidecar import load, load_or_build
from tests.omniload.reading import all_rows, open_path
from tests.omniload.test_source_webdataset import pack

OFFSETS = np.array([0, 512, 4096], dtype=np.int64)


def entry(**keys: object) -> FileEntry:
    digest = str(keys.pop("digest", "d"))
    values = {"path": "a/x.tar", "url": "/a/x.tar", "size": 5000, **keys}
    return FileEntry(**values, find_digest=lambda: digest)  # type: ignore[arg-type]


def refuse() -> np.ndarray:
    raise AssertionError("built again")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNILOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> storage.Store:
    store = storage.Store(tmp_path / "data")
    store.write("a/x.tar", bytes(5000))
    return store


def test_an_index_is_kept_beside_its_file_and_built_once(store: storage.Store, cache: Path) -> None:
    assert load(store, entry(), "kind") is None
    assert np.array_equal(load_or_build(store, entry(), "kind", lambda: OFFSETS), OFFSETS)
    found = load_or_build(store, entry(), "kind", refuse)
    assert found.dtype == np.int64
    assert np.array_equal(found, OFFSETS)
    assert [file.path for file in store.list()] == ["a/.omniload/x.tar.index", "a/x.tar"]
    assert not cache.exists()


def test_an_index_that_cannot_lie_beside_its_file_lies_in_the_cache(
    store: storage.Store, cache: Path
) -> None:
    store.write("a/.omniload", b"in the way")
    load_or_build(store, entry(), "kind", lambda: OFFSETS)
    assert len(list(cache.rglob("*.index"))) == 1
    assert np.array_equal(load_or_build(store, entry(), "kind", refuse), OFFSETS)
    assert load(store, entry(url="/b/x.tar"), "kind") is None


def test_the_cache_is_where_the_desktop_keeps_its_own(
    store: storage.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMNILOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store.write("a/.omniload", b"in the way")
    load_or_build(store, entry(), "kind", lambda: OFFSETS)
    assert len(list((tmp_path / "xdg" / "omniload").rglob("*.index"))) == 1


def test_an_index_that_can_be_kept_nowhere_is_made_each_time_with_a_warning(
    store: storage.Store, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.write("a/.omniload", b"in the way")
    cache.write_bytes(b"in the way too")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert np.array_equal(load_or_build(store, entry(), "kind", lambda: OFFSETS), OFFSETS)
    assert "the index of /a/x.tar is kept nowhere" in caplog.text
    assert "set OMNILOAD_CACHE" in caplog.text


@pytest.mark.parametrize("other", [{"size": 5001}, {"digest": "e"}])
def test_an_index_of_another_version_is_built_again(store: storage.Store, other: dict[str, object]) -> None:
    load_or_build(store, entry(), "kind", lambda: OFFSETS)
    assert load(store, entry(**other), "kind") is None
    newer = OFFSETS + 1
    assert np.array_equal(load_or_build(store, entry(**other), "kind", lambda: newer), newer)
    assert np.array_equal(load_or_build(store, entry(**other), "kind", refuse), newer)


def test_an_index_of_another_kind_is_built_again(store: storage.Store) -> None:
    load_or_build(store, entry(), "kind", lambda: OFFSETS)
    assert load(store, entry(), "other kind") is None


def test_a_damaged_index_is_ignored(store: storage.Store) -> None:
    load_or_build(store, entry(), "kind", lambda: OFFSETS)
    path = "a/.omniload/x.tar.index"
    good = store.read(path)
    for at in range(len(good)):
        store.write(path, good[:at])
        assert load(store, entry(), "kind") is None
        store.write(path, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert load(store, entry(), "kind") is None
    store.write(path, good)
    assert load(store, entry(), "kind") is not None


@pytest.mark.parametrize("offsets", [[], [4, 3], [-1, 3], [0, 5001]])
def test_offsets_that_cannot_be_are_ignored(store: storage.Store, offsets: list[int]) -> None:
    """Even under a right digest: nothing is allocated or read by them."""
    load_or_build(store, entry(), "kind", lambda: np.array(offsets, dtype=np.int64))
    assert load(store, entry(), "kind") is None


def test_builders_at_the_same_time_do_not_disturb_each_other(store: storage.Store) -> None:
    def one(_: int) -> bool:
        return np.array_equal(load_or_build(store, entry(), "kind", lambda: OFFSETS), OFFSETS)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(64)))
    assert [file.path for file in store.list()] == ["a/.omniload/x.tar.index", "a/x.tar"]


def test_a_source_goes_on_when_its_index_is_damaged_or_its_file_replaced(tmp_path: Path) -> None:
    def write(texts: list[str]) -> Source:
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for number, text in enumerate(texts):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
        return open_path(tmp_path / "x.tar")

    def texts(source: Source) -> list[str]:
        return [row["txt"] for row in all_rows(source)]  # type: ignore[index]

    assert texts(write(["a"])) == ["a"]
    index = tmp_path / ".omniload" / "x.tar.index"
    index.write_bytes(index.read_bytes()[:-1])
    assert texts(write(["a"])) == ["a"]
    assert texts(write(["a", "b" * 2_000_000, "c"])) == ["a", "b" * 2_000_000, "c"]


def test_an_index_does_not_outlive_a_file_of_the_same_size_and_the_same_end(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    ends = [("c.bin", bytes(100_000))]
    path.write_bytes(pack([("a.bin", b"a" * (1 << 20)), ("b.bin", b"b" * (3 << 20)), *ends]))
    before = open_path(path)
    assert before.num_blocks(0) == 3
    path.write_bytes(pack([("a.bin", b"a" * (3 << 20)), ("b.bin", b"b" * (1 << 20)), *ends]))
    after = open_path(path)
    assert after.fingerprint == before.fingerprint
    assert [len(row["bin"]) for row in all_rows(after)] == [3 << 20, 1 << 20, 100_000]  # type: ignore[index]
    with pytest.raises(CorruptSource, match=r"remove the index|copy or pack"):
        all_rows(before)


@pytest.mark.parametrize("pattern", ["", "/**", "/*", "/**/*"])
def test_what_lies_beside_the_data_is_no_data(tmp_path: Path, pattern: str) -> None:
    store = storage.Store(tmp_path)
    for name in ("a.tar", "b/c.tar"):
        store.write(name, bytes(10240))
        open_path(tmp_path / name).num_blocks(0)
    assert len(list(tmp_path.rglob("*.index"))) == 2
    found = open_path(f"{tmp_path}{pattern}")
    assert {"a.tar"} <= {file.path for file in found.files} <= {"a.tar", "b/c.tar"}
