"""The local backend: conformance, and what only a local disk has."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import AlreadyExists, BadRequest, NoSpace, NotFound, PermissionDenied, Store, UnsafePath
from storage.local_file import NewFile
from storage.local_space import reserve_space
from tests.storage.conformance import MIB, BackendConformance, content
from tests.storage.disks import tmpfs

HIDDEN = f".storage-{'0' * 32}.tmp"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


class TestLocal(BackendConformance):
    pass


def test_plain_paths_and_file_urls_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stores = [
        Store("runs/x/"),
        Store(tmp_path / "runs" / "x"),
        Store(f"file://{tmp_path}/runs/x"),
        Store(f"file://localhost{tmp_path}/runs/x"),
        Store("./runs/x"),
    ]
    assert {store.url for store in stores} == {f"{tmp_path}/runs/x"}
    monkeypatch.chdir("/")
    stores[0].write("a", b"1")
    assert stores[1].read("a") == b"1"
    assert stores[0].local_path("a") == tmp_path / "runs/x/a"


def test_options_without_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="storage_options \\['key'\\] mean nothing"):
        Store(tmp_path, storage_options={"key": "secret"})


def test_a_store_makes_nothing_until_it_writes(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    assert store.list() == []
    assert not store.exists("x")
    assert not (tmp_path / "root").exists()


def test_unfinished_writes_are_hidden_and_reserved(store: Store) -> None:
    store.write("d/x", b"1")
    (store.local_path("d") / HIDDEN).write_bytes(b"left by a crash")
    assert [one.path for one in store.list()] == ["d/x"]
    with pytest.raises(UnsafePath, match="reserved"):
        store.read(f"d/{HIDDEN}")
    store.delete_tree("d")
    assert not store.local_path("d").exists()


def test_an_open_writer_is_hidden_and_leaves_nothing_when_aborted(store: Store) -> None:
    writer = store.writer("d/x", header_bytes=4)
    writer.write(b"body")
    [hidden] = store.local_path("d").iterdir()
    assert hidden.name.startswith(".storage-")
    assert store.list() == []
    writer.abort()
    assert list(store.local_path("d").iterdir()) == []


def test_files_get_the_mode_that_the_umask_allows(store: Store) -> None:
    before = os.umask(0o027)
    try:
        store.write("x", b"")
    finally:
        os.umask(before)
    assert store.local_path("x").stat().st_mode & 0o777 == 0o640


def test_a_directory_in_the_way(store: Store) -> None:
    store.write("d/x", b"")
    with pytest.raises(AlreadyExists, match="directory"):
        store.write("d", b"")
    with pytest.raises(AlreadyExists):
        store.create("d", b"")
    with pytest.raises(AlreadyExists):
        store.write("d/x/y", b"")
    assert [one.path for one in store.list()] == ["d/x"]
    assert [path.name for path in store.local_path("d").parent.iterdir()] == ["d"]


def test_links_to_files_are_read_and_linked_directories_are_left_alone(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_bytes(b"12345")
    store.write("d/own", b"")
    (store.local_path("d") / "link").symlink_to(outside / "data")
    (store.local_path("d") / "dangling").symlink_to(outside / "gone")
    (store.local_path("d") / "dir").symlink_to(outside)
    assert [(one.path, one.size) for one in store.list("d")] == [("d/link", 5), ("d/own", 0)]
    store.delete_tree("d/dir")
    store.delete_tree("d")
    assert (outside / "data").read_bytes() == b"12345"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(store: Store) -> None:
    store.write("x", b"")
    store.local_path("x").chmod(0)
    with pytest.raises(PermissionDenied, match="x"):
        store.read("x")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with tmpfs(tmp_path / "disk", "size=8m") as mount:
        yield mount


def test_a_full_disk_is_reported_and_nothing_is_left(small_disk: Path) -> None:
    store = Store(small_disk)
    store.write("kept", content(MIB))
    with pytest.raises(NoSpace, match="bytes to write"):  # known beforehand
        store.write("kept", content(9 * MIB))
    writer = store.writer("streamed", header_bytes=16)
    for _ in range(6):
        writer.write(content(MIB))
    with pytest.raises(NoSpace):  # found out on the way
        writer.write(content(2 * MIB))
    assert [path.name for path in small_disk.iterdir()] == ["kept"]
    assert store.read("kept") == content(MIB)
    store.write("fits", content(5 * MIB))


def test_room_for_a_file_of_known_size_is_taken_before_its_first_byte(small_disk: Path) -> None:
    """Of two writers that each would fit alone the second is refused, and the first finishes."""
    with (
        (small_disk / "first").open("wb", buffering=0) as first,
        (small_disk / "second").open("wb") as second,
    ):
        reserve_space(first.fileno(), 5 * MIB)
        before = os.statvfs(small_disk).f_bavail
        with pytest.raises(OSError, match="5242880 bytes to write, and no room for them") as caught:
            reserve_space(second.fileno(), 5 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert os.statvfs(small_disk).f_bavail == before, "nothing is left of what was refused"
        with pytest.raises(NoSpace, match="5242880 bytes to write"):
            Store(small_disk).write("third", content(5 * MIB))
        assert first.write(content(5 * MIB)) == 5 * MIB


def test_on_a_disk_room_is_taken_before_the_first_byte(tmp_path: Path) -> None:
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("the directory for tests does not lie on a disk")
    with NewFile(tmp_path / "x", expected_bytes=3 * MIB) as file:
        [hidden] = tmp_path.iterdir()
        assert hidden.stat().st_blocks * 512 >= 3 * MIB
        file.append([memoryview(content(3 * MIB))])
        file.replace()
    assert (tmp_path / "x").read_bytes() == content(3 * MIB)


def test_where_room_cannot_be_taken_the_write_goes_on() -> None:
    reader, writer = os.pipe()  # knows no blocks, as some file systems
    try:
        reserve_space(writer, MIB)
    finally:
        os.close(reader)
        os.close(writer)


def test_threads_of_a_parent_do_not_matter_after_fork(store: Store) -> None:
    """A forked child has no pool threads; its reads must not wait for them."""
    store.write("x", content(20 * MIB))
    script = f"""
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from storage import Store
store = Store({store.url!r})
wanted = [("x", 0, 20 << 20)]
[before] = store.read_ranges(wanted)
child = os.fork()
if not child:
    [view] = store.read_ranges(wanted)
    os._exit(0 if view == before else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_not_found_names_the_full_path(store: Store) -> None:
    with pytest.raises(NotFound) as caught:
        store.read("a/b")
    assert str(caught.value) == f"{store.url}/a/b: No such file or directory"
