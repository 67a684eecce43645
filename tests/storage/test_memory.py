"""``memory://``, and with it every file system that only fsspec knows."""

from collections.abc import Iterator

import fsspec
import pytest

from storage import Store, Unsupported, UnsupportedURL
from tests.storage.conformance import BackendConformance


@pytest.fixture
def store() -> Iterator[Store]:
    yield Store("memory://conformance")
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


class TestMemory(BackendConformance):
    pass


def test_the_root_of_memory(store: Store) -> None:
    root = Store("memory://")
    root.write("a/b", b"1")
    assert [one.path for one in root.list()] == ["a/b"]
    assert root.list_dirs() == ["a"]
    assert root.local_path("a/b") is None


def test_chains_are_refused() -> None:
    with pytest.raises(UnsupportedURL, match="chains"):
        Store("simplecache::memory://x")


def test_writing_where_objects_need_not_appear_whole_is_refused() -> None:
    store = Store("http://127.0.0.1/x")  # refused before any connection
    with pytest.raises(Unsupported, match="objects that appear whole"):
        store.write("x", b"")
    with pytest.raises(Unsupported, match="create-if-absent"):
        store.create("x", b"")
    with pytest.raises(Unsupported, match="objects that appear whole"):
        store.writer("x")
