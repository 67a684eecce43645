"""Directories that become visible whole or not at all."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    AlreadyExists,
    BadRequest,
    Corrupt,
    NotFound,
    PermissionDenied,
    Store,
    Transient,
    UnsafePath,
)
from storage.transaction import Transaction, remove_uncommitted
from storage.tree import (
    MARKER,
    CommittedTree,
    TreeFile,
    check_tree,
    decode_marker,
    encode_marker,
    verify_tree,
)
from tests.storage.conformance import content
from tests.storage.seaweed import S3Server


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """The place of a tree, empty."""
    if request.param == "local":
        yield Store(tmp_path / "tree")
    elif request.param == "memory":
        yield Store("memory://transaction/tree")
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    else:
        server: S3Server = request.getfixturevalue("s3")
        yield Store(f"s3://{server.bucket}/{tmp_path.name}", server.storage_options)


def test_files_appear_together(store: Store) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    with Transaction(store) as transaction:
        transaction.write("a/b.bin", [b"head", array])
        transaction.write("empty", b"")
        with transaction.writer("streamed", header_bytes=16) as writer:
            writer.write(content(50_000))
            writer.set_header(b"h" * 16)
            assert writer.num_bytes == 50_016
        assert not store.exists(MARKER)
        with pytest.raises(NotFound, match="nothing is committed here"):
            CommittedTree.open(store)
    tree = CommittedTree.open(store)
    assert tree.attempt == transaction.attempt
    assert list(tree.files) == ["a/b.bin", "empty", "streamed"]
    assert tree.read("a/b.bin") == b"head" + array.tobytes()
    assert tree.read("empty") == b""
    assert tree.read("streamed") == b"h" * 16 + content(50_000)
    with pytest.raises(NotFound, match="not a file of this tree"):
        tree.read("other")
    tree.verify()
    assert {one.path for one in store.list()} == {
        MARKER,
        *(f"data/{tree.attempt}/{path}" for path in tree.files),
    }


def test_an_empty_tree_can_be_committed(store: Store) -> None:
    with Transaction(store):
        pass
    assert CommittedTree.open(store).files == {}
    verify_tree(store)


def test_an_exception_leaves_nothing(store: Store) -> None:
    def interrupted() -> None:
        with Transaction(store) as transaction:
            transaction.write("a/b", b"1")
            transaction.write("c", b"2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert store.list() == []
    if (path := store.local_path("")) is not None:
        assert not path.exists()
    with Transaction(store) as transaction:
        transaction.write("a/b", b"3")
    assert CommittedTree.open(store).read("a/b") == b"3"


def test_of_many_attempts_one_wins_and_the_others_leave_nothing(store: Store) -> None:
    start = threading.Barrier(6)

    def attempt(number: int) -> int | None:
        transaction = Transaction(store)
        transaction.write("a", str(number).encode())
        transaction.write(f"only-{number}", b"")
        start.wait(timeout=30)
        try:
            transaction.commit()
        except AlreadyExists:
            return None
        return number

    with ThreadPoolExecutor(6) as pool:
        winners = [number for number in pool.map(attempt, range(6)) if number is not None]
    assert len(winners) == 1
    tree = CommittedTree.open(store)
    assert tree.read("a") == str(winners[0]).encode()
    assert list(tree.files) == ["a", f"only-{winners[0]}"]
    assert len(store.list()) == 3


def test_what_is_committed_cannot_be_written_again(store: Store) -> None:
    with Transaction(store) as first:
        first.write("a", b"1")
    with pytest.raises(AlreadyExists, match="committed here"):
        Transaction(store)
    assert CommittedTree.open(store).read("a") == b"1"


def test_several_processes_fill_one_tree(store: Store) -> None:
    leader = Transaction(store)
    with Transaction(store, attempt=leader.attempt) as member:
        member.write("rank-1", b"one")
        files = member.files
        member.close()
    leader.write("rank-0", b"zero")
    leader.include(files)
    with pytest.raises(BadRequest, match="'rank-1' was written before"):
        leader.include(files)
    leader.commit()
    tree = CommittedTree.open(store)
    assert (tree.read("rank-0"), tree.read("rank-1")) == (b"zero", b"one")


def test_a_transaction_says_what_is_wrong_with_a_call(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(BadRequest, match="not 32 hex digits"):
        Transaction(store, attempt="../x")
    transaction = Transaction(store)
    transaction.write("a", b"1")
    with pytest.raises(BadRequest, match="'a' was written before"):
        transaction.write("a", b"2")
    for path in ("/a", "../a", ""):
        with pytest.raises(UnsafePath):
            transaction.write(path, b"")
    writer = transaction.writer("b")
    with pytest.raises(BadRequest, match="'b' is still being written"):
        transaction.commit()
    writer.abort()
    writer.abort()
    with transaction.writer("b") as writer:
        writer.write(b"2")
        writer.close()
    transaction.commit()
    for call in (transaction.commit, lambda: transaction.write("c", b""), lambda: transaction.writer("c")):
        with pytest.raises(BadRequest, match="transaction is over"):
            call()
    transaction.abort()
    assert CommittedTree.open(store).read("b") == b"2"


def test_leaving_the_block_with_an_open_writer_aborts(tmp_path: Path) -> None:
    def careless() -> None:
        with Transaction(Store(tmp_path / "tree")) as transaction:
            transaction.writer("a").write(b"1")

    with pytest.raises(BadRequest, match="'a' is still being written"):
        careless()
    assert not (tmp_path / "tree").exists()


def test_a_failed_file_may_be_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    transaction = Transaction(store)

    def interrupted() -> None:
        with transaction.writer("a") as writer:
            writer.write(b"lost")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    with pytest.raises(BadRequest, match="never set"), transaction.writer("b", header_bytes=4) as writer:
        writer.write(b"lost")
    with pytest.raises(BadRequest, match="contiguous"):
        transaction.write("c", np.arange(12).reshape(3, 4)[:, ::2])
    for path in ("a", "b", "c"):
        transaction.write(path, path.encode())
    transaction.commit()
    verify_tree(store)
    assert CommittedTree.open(store).read("b") == b"b"


class _BadAnswer(Store):
    """A store whose ``create`` does or does not do its work, and then raises."""

    def __init__(self, url: Path, error: Exception, *, done: bool) -> None:
        super().__init__(url)
        self._error = error
        self._done = done

    def create(self, path: str, data: Any) -> None:
        if self._done:
            super().create(path, data)
        raise self._error


def test_a_success_that_comes_back_as_a_loss_is_one(tmp_path: Path) -> None:
    with Transaction(_BadAnswer(tmp_path, AlreadyExists("m", "412"), done=True)) as transaction:
        transaction.write("a", b"1")
    verify_tree(Store(tmp_path))


@pytest.mark.parametrize("done", [False, True])
def test_an_unknown_outcome_is_raised_and_removes_nothing(tmp_path: Path, done: bool) -> None:
    def commit() -> None:
        with Transaction(_BadAnswer(tmp_path, Transient("m", "reset"), done=done)) as transaction:
            transaction.write("a", b"1")

    with pytest.raises(Transient):
        commit()
    store = Store(tmp_path)
    assert [one.path.rpartition("/")[2] for one in store.list()] == ([MARKER] if done else []) + ["a"]
    if done:
        verify_tree(store)
    removed = remove_uncommitted(store)
    assert len(removed) == (0 if done else 1)
    assert store.exists(MARKER) is done
    assert bool(store.list()) is done


def test_a_refused_commit_leaves_nothing(tmp_path: Path) -> None:
    def commit() -> None:
        with Transaction(
            _BadAnswer(tmp_path / "tree", PermissionDenied("m", "403"), done=False)
        ) as transaction:
            transaction.write("a", b"1")

    with pytest.raises(PermissionDenied):
        commit()
    assert not (tmp_path / "tree").exists()


def test_leftovers_of_dead_attempts_are_removed_and_nothing_else(store: Store) -> None:
    dead = Transaction(store)
    dead.write("x", b"")
    dead.close()
    store.write("data/notes.txt", b"of somebody else")
    with Transaction(store) as transaction:
        transaction.write("a", b"1")
    assert remove_uncommitted(store) == [dead.attempt]
    assert store.list(f"data/{dead.attempt}") == []
    verify_tree(store)
    assert store.read("data/notes.txt") == b"of somebody else"


@pytest.fixture
def committed(tmp_path: Path) -> CommittedTree:
    """A tree with a file that has a header and one that has none."""
    with Transaction(Store(tmp_path)) as transaction:
        transaction.write("plain", content(1000))
        with transaction.writer("headed", header_bytes=10) as writer:
            writer.write(content(1000))
            writer.set_header(content(10, 1))
    return CommittedTree.open(Store(tmp_path))


@pytest.mark.parametrize(("path", "at"), [("plain", 0), ("plain", 999), ("headed", 3), ("headed", 700)])
def test_a_flipped_bit_is_found(committed: CommittedTree, path: str, at: int) -> None:
    data = bytearray(committed.data.read(path))
    data[at] ^= 1
    committed.data.write(path, data)
    committed.check()  # sizes say nothing
    with pytest.raises(Corrupt, match=f"{path}: .*not those that were committed"):
        committed.verify()
    with pytest.raises(Corrupt, match=path):
        committed.read(path)


def test_a_short_or_missing_file_is_found(committed: CommittedTree, tmp_path: Path) -> None:
    committed.data.write("plain", content(1000)[:-1])
    with pytest.raises(Corrupt, match="plain: 999 bytes, 1000 were committed"):
        check_tree(Store(tmp_path))
    with pytest.raises(Corrupt, match="plain"):
        committed.read("plain")
    committed.data.delete("plain")
    with pytest.raises(Corrupt, match="plain: missing"):
        check_tree(Store(tmp_path))


def test_large_files_are_verified_in_parts(tmp_path: Path) -> None:
    data = content(70 << 20)
    with (
        Transaction(Store(tmp_path)) as transaction,
        transaction.writer("large", header_bytes=4096) as writer,
    ):
        writer.write(data[4096:])
        writer.set_header(data[:4096])
    verify_tree(Store(tmp_path))
    with (tmp_path / "data" / transaction.attempt / "large").open("r+b") as file:
        file.seek(66 << 20)
        file.write(b"?" if data[66 << 20] != ord("?") else b"!")
    with pytest.raises(Corrupt, match="large"):
        verify_tree(Store(tmp_path))


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and not name.startswith(".storage-")
)
_FILES = st.builds(
    TreeFile,
    path=st.lists(_NAMES, min_size=1, max_size=3).map("/".join),
    num_bytes=st.integers(0, 2**60),
    xxh3=st.text("0123456789abcdef", min_size=16, max_size=16),
    header_bytes=st.integers(0, 2**20),
)


@settings(deadline=None)
@given(files=st.lists(_FILES, max_size=5), data=st.data())
def test_a_marker_says_what_was_written_or_that_it_is_damaged(
    files: list[TreeFile], data: st.DataObject
) -> None:
    attempt = "0123456789abcdef" * 2
    marker = encode_marker(attempt, files)
    assert decode_marker(marker, "m") == (attempt, files)
    at = data.draw(st.integers(0, len(marker) - 1))
    damaged = bytearray(marker)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        decode_marker(bytes(damaged), "m")
    with pytest.raises(Corrupt):
        decode_marker(marker[:at], "m")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", ""])
def test_a_marker_cannot_name_files_outside(path: str) -> None:
    marker = encode_marker("0" * 32, [TreeFile(path=path, num_bytes=1, xxh3="0" * 16)])
    with pytest.raises(Corrupt, match="malformed"):
        decode_marker(marker, "m")
