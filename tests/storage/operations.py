"""Everything one can do with a store, each able to tell whether it came out right."""

from collections.abc import Callable
from dataclasses import dataclass

from storage import Store
from tests.storage.conformance import content

__all__ = ["OPERATIONS", "PART_BYTES", "Operation", "visible_is_whole"]

OLD, NEW, SMALL = content(300_000, 1), content(280_000, 2), content(40_000, 3)
PART_BYTES = 5 << 20
"""Tests make the first part of an upload this small, the least that S3 allows, to be quick."""
BODY = content(PART_BYTES + 400_000, 4)
HEADER = b"h" * 64
TREE = {f"tree/{name}": SMALL for name in ("a", "b/c")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation, on a store where ``prepare`` was run before.

    Attributes:
        name: What it is called in the table.
        run: Does it, and fails if what it returned is not right.
        done: Whether the store, looked at by somebody else, holds what it should when ``run`` returned.
        request: HTTP method and a part of the URL of the S3 request that a single fault is to hit.
        uploads: That request has a body.
        downloads: Its answer has a body.
        writes: It changes the store.
        engines: Those that have requests of their own for it.
    """

    name: str
    run: Callable[[Store], None]
    done: Callable[[Store], bool] = lambda store: True
    request: tuple[str, str] = ("GET", "")
    uploads: bool = False
    downloads: bool = False
    writes: bool = False
    engines: tuple[str, ...] = ("s3fs",)

    @staticmethod
    def prepare(store: Store) -> None:
        """What every operation finds."""
        store.write("object", OLD)
        for path, data in TREE.items():
            store.write(path, data)


def visible_is_whole(store: Store) -> bool:
    """Whether every object is complete, in its old version or the new one."""
    versions = {"object": [OLD, NEW, HEADER + BODY], "new": [SMALL], **{path: [SMALL] for path in TREE}}
    return all(store.read(one.path) in versions[one.path] for one in store.list())


def _read(store: Store) -> None:
    assert store.read("object") == OLD


def _read_ranges(store: Store) -> None:
    views = store.read_ranges([("object", 7, 200_000), ("object", 299_000, 300_000)])
    assert [bytes(view) for view in views] == [OLD[7:200_000], OLD[299_000:]]


def _open(store: Store) -> None:
    with store.open("object") as file:
        assert file.read() == OLD


def _stat(store: Store) -> None:
    assert store.stat("object").size == len(OLD)


def _list(store: Store) -> None:
    assert [one.path for one in store.list("tree")] == sorted(TREE)


def _list_dirs(store: Store) -> None:
    assert store.list_dirs("tree") == ["b"]


def _writer(store: Store) -> None:
    with store.writer("object", header_bytes=64) as writer:
        writer.write(BODY)
        writer.set_header(HEADER)


def _streamed(store: Store) -> bool:
    return store.read("object") == HEADER + BODY


BOTH = ("s3fs", "obstore")
OPERATIONS = (
    Operation(name="read", run=_read, downloads=True, engines=BOTH),
    Operation(name="read_ranges", run=_read_ranges, downloads=True, engines=BOTH),
    Operation(name="open", run=_open, downloads=True, engines=BOTH),
    Operation(name="stat", run=_stat, request=("HEAD", "")),
    Operation(name="list", run=_list, downloads=True),
    Operation(name="list_dirs", run=_list_dirs, downloads=True),
    Operation(
        name="write",
        run=lambda store: store.write("object", NEW),
        done=lambda store: store.read("object") == NEW,
        request=("PUT", ""),
        uploads=True,
        writes=True,
        engines=BOTH,
    ),
    Operation(
        name="create",
        run=lambda store: store.create("new", SMALL),
        done=lambda store: store.read("new") == SMALL,
        request=("PUT", ""),
        uploads=True,
        writes=True,
    ),
    Operation(
        name="writer:begin",
        run=_writer,
        done=_streamed,
        request=("POST", "uploads"),
        downloads=True,
        writes=True,
    ),
    Operation(
        name="writer:part",
        run=_writer,
        done=_streamed,
        request=("PUT", "partNumber"),
        uploads=True,
        writes=True,
    ),
    Operation(
        name="writer:complete",
        run=_writer,
        done=_streamed,
        request=("POST", "uploadId"),
        downloads=True,
        writes=True,
    ),
    Operation(
        name="delete",
        run=lambda store: store.delete("object"),
        done=lambda store: not store.exists("object"),
        request=("DELETE", ""),
        writes=True,
    ),
    Operation(
        name="delete_tree",
        run=lambda store: store.delete_tree("tree"),
        done=lambda store: not store.list("tree"),
        request=("POST", "delete"),
        downloads=True,
        writes=True,
    ),
)
