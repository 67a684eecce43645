"""What every backend must do, as a class of tests. A new backend subclasses it and gives a ``store`` fixture."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import AlreadyExists, BadRequest, Corrupt, NotFound, StorageError, Store, UnsafePath

MIB = 1 << 20


def content(num_bytes: int, seed: int = 0) -> bytes:
    """Random bytes, the same for the same arguments."""
    return np.random.default_rng(seed).bytes(num_bytes)


class BackendConformance:
    """Subclass it and define a fixture ``store`` that gives an empty ``Store``."""

    large_bytes = 40 * MIB + 12_345  # above every threshold: several parts, several jobs

    # -- whole objects

    @pytest.mark.parametrize("num_bytes", [0, 1, 5000])
    def test_what_is_written_is_read(self, store: Store, num_bytes: int) -> None:
        store.write("a/b.bin", content(num_bytes))
        assert store.read("a/b.bin") == content(num_bytes)
        assert store.stat("a/b.bin").size == num_bytes
        assert store.stat("a/b.bin").path == "a/b.bin"

    def test_large_objects_survive(self, store: Store) -> None:
        data = content(self.large_bytes)
        store.write("large", data)
        assert store.stat("large").size == len(data)
        [view] = store.read_ranges([("large", 0, len(data))])
        assert view == data

    def test_buffers_of_any_kind_follow_each_other(self, store: Store) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        store.write("x", [b"head", bytearray(b""), array, np.empty((0, 3)), memoryview(b"tail")])
        assert store.read("x") == b"head" + array.tobytes() + b"tail"

    def test_a_buffer_with_holes_is_refused(self, store: Store) -> None:
        with pytest.raises(BadRequest, match="contiguous"):
            store.write("x", np.arange(12).reshape(3, 4)[:, ::2])
        assert not store.exists("x")

    def test_many_small_buffers(self, store: Store) -> None:
        parts = [content(i % 7, i) for i in range(3000)]
        store.write("x", parts)
        assert store.read("x") == b"".join(parts)

    def test_writing_again_replaces(self, store: Store) -> None:
        store.write("x", b"a long first version")
        store.write("x", b"second")
        assert store.read("x") == b"second"

    def test_names_that_need_care(self, store: Store) -> None:
        names = ["sp ace", "ünï/cödé", "a+b&c=d#e?f", "100%", "[x]*", "semi;colon", "key#0,0:1,2"]
        for name in names:
            store.write(name, name.encode())
        assert [one.path for one in store.list()] == sorted(names, key=str.encode)
        assert all(store.read(name) == name.encode() for name in names)

    # -- create if absent

    def test_create_makes_and_then_refuses(self, store: Store) -> None:
        store.create("m.json", [b"one", b"!"])
        with pytest.raises(AlreadyExists, match=r"m\.json"):
            store.create("m.json", b"two")
        assert store.read("m.json") == b"one!"

    def test_of_many_creators_exactly_one_wins(self, store: Store) -> None:
        for race in range(3):
            start = threading.Barrier(8)

            def attempt(writer: int, race: int = race, start: threading.Barrier = start) -> int | None:
                start.wait(timeout=30)
                try:
                    store.create(f"race-{race}", str(writer).encode())
                except AlreadyExists:
                    return None
                return writer

            with ThreadPoolExecutor(8) as pool:
                winners = [won for won in pool.map(attempt, range(8)) if won is not None]
            assert len(winners) == 1
            assert store.read(f"race-{race}") == str(winners[0]).encode()

    # -- streaming with the header last

    @pytest.mark.parametrize("body_bytes", [0, 1, 5000, 16 * MIB - 64, 16 * MIB - 63, 33 * MIB])
    def test_header_comes_last_and_lies_first(self, store: Store, body_bytes: int) -> None:
        body = content(body_bytes)
        with store.writer("f", header_bytes=64) as writer:
            for begin in range(0, body_bytes, 5 * MIB):
                writer.write(memoryview(body)[begin : begin + 5 * MIB])
            assert writer.num_bytes == 64 + body_bytes
            assert not store.exists("f")
            writer.set_header(b"h" * 64)
        assert store.read("f") == b"h" * 64 + body

    def test_several_buffers_are_written_at_once(self, store: Store) -> None:
        body = content(20 * MIB)
        ends = [0, 0, 1, 2000, 5 * MIB, 5 * MIB, 18 * MIB, 20 * MIB]
        with store.writer("f", header_bytes=64) as writer:
            writer.write([memoryview(body)[begin:end] for begin, end in itertools.pairwise(ends)])
            writer.write([body[:1]] * 3000)  # more than a system call takes
            writer.write([])
            assert writer.num_bytes == 64 + 20 * MIB + 3000
            writer.set_header(b"h" * 64)
        assert store.read("f") == b"h" * 64 + body + body[:1] * 3000

    def test_header_larger_than_a_part(self, store: Store) -> None:
        header = content(17 * MIB, 1)
        with store.writer("f", header_bytes=len(header)) as writer:
            writer.write(b"body")
            writer.set_header(header)
        assert store.read("f") == header + b"body"

    def test_a_buffer_may_be_reused_after_write(self, store: Store) -> None:
        buffer = bytearray(MIB)
        with store.writer("f") as writer:
            for value in range(20):
                buffer[:] = bytes([value]) * MIB
                writer.write(buffer)
        assert store.read("f") == b"".join(bytes([value]) * MIB for value in range(20))

    @pytest.mark.parametrize("body_bytes", [10, 40 * MIB])
    def test_an_exception_in_the_block_leaves_nothing(self, store: Store, body_bytes: int) -> None:
        store.write("f", b"old")

        def interrupted() -> None:
            with store.writer("f", header_bytes=8) as writer:
                writer.write(content(body_bytes))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interrupted()
        assert store.read("f") == b"old"
        assert [one.path for one in store.list()] == ["f"]

    def test_a_missing_or_misfit_header_is_refused(self, store: Store) -> None:
        with pytest.raises(BadRequest, match="never set"), store.writer("f", header_bytes=8) as writer:
            writer.write(b"x")
        misfit = pytest.raises(BadRequest, match="header of 3 bytes, 8 are reserved")
        with misfit, store.writer("f", header_bytes=8) as writer:
            writer.set_header(b"123")
        assert store.list() == []

    def test_a_closed_writer_refuses_more(self, store: Store) -> None:
        with store.writer("f") as writer:
            writer.write(b"x")
        writer.close()
        with pytest.raises(BadRequest, match="closed"):
            writer.write(b"y")
        assert store.read("f") == b"x"

    # -- ranges

    def test_ranges_into_the_callers_memory(self, store: Store) -> None:
        data = content(MIB)
        store.write("a", data)
        store.write("d/b", data[::-1])
        floats = np.zeros(25, dtype=np.float64)
        small = bytearray(3)
        views = store.read_ranges(
            [("d/b", 1000, 1200), ("a", MIB - 3, MIB), ("a", 7, 7)], into=[floats, small, bytearray()]
        )
        assert floats.tobytes() == data[::-1][1000:1200]
        assert small == data[-3:]
        assert [bytes(view) for view in views] == [floats.tobytes(), bytes(small), b""]

    @pytest.mark.parametrize(("start", "end"), [(90, 101), (100, 101), (5000, 5001), (0, 9 * MIB)])
    def test_a_range_past_the_end_is_corrupt(self, store: Store, start: int, end: int) -> None:
        store.write("short", content(100))
        with pytest.raises(Corrupt, match="short: bytes"):
            store.read_ranges([("short", 0, 100), ("short", start, end)])

    # One store for all examples is meant, and the subclasses are the "executors" that differ.
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_any_ranges_are_exact(self, store: Store, data: st.DataObject) -> None:
        stored = content(20_000)
        if not store.exists("r"):
            store.write("r", stored)
        bounds = st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)).map(sorted)
        ranges = data.draw(st.lists(bounds, max_size=12))
        views = store.read_ranges([("r", start, end) for start, end in ranges])
        assert [bytes(view) for view in views] == [stored[start:end] for start, end in ranges]

    def test_malformed_ranges_and_buffers_are_refused(self, store: Store) -> None:
        store.write("a", b"0123456789")
        with pytest.raises(BadRequest, match="0 <= start <= end"):
            store.read_ranges([("a", 5, 4)])
        with pytest.raises(BadRequest, match="0 <= start <= end"):
            store.read_ranges([("a", -2, 4)])
        with pytest.raises(BadRequest, match="buffer of 3 bytes for a range of 4"):
            store.read_ranges([("a", 0, 4)], into=[bytearray(3)])
        with pytest.raises(BadRequest, match="read-only"):
            store.read_ranges([("a", 0, 4)], into=[bytes(4)])
        with pytest.raises(BadRequest, match="0 buffers for 1 ranges"):
            store.read_ranges([("a", 0, 4)], into=[])

    # -- files

    def test_open_reads_and_seeks(self, store: Store) -> None:
        data = content(3 * MIB)
        store.write("f", data)
        with store.open("f") as file:
            assert file.read(10) == data[:10]
            assert file.seek(-5, 2) == len(data) - 5
            assert file.read() == data[-5:]
            file.seek(MIB)
            assert file.read(2 * MIB) == data[MIB:]
            assert file.read(1) == b""
        with pytest.raises(NotFound):
            store.open("g")

    def test_pyarrow_reads_what_open_gives(self, store: Store) -> None:
        table = pa.table({"n": list(range(10_000))})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        store.write("t.parquet", sink.getvalue())
        with store.open("t.parquet") as file:
            assert pq.read_table(file).equals(table)

    # -- names

    def test_list_is_recursive_and_sorted_by_bytes(self, store: Store) -> None:
        for path in ["b", "a/z", "a-b", "a/y/x", "a0", "é", "A"]:
            store.write(path, b"12")
        assert [one.path for one in store.list()] == ["A", "a-b", "a/y/x", "a/z", "a0", "b", "é"]
        assert [one.path for one in store.list("a")] == ["a/y/x", "a/z"]
        assert [one.path for one in store.list("a/")] == ["a/y/x", "a/z"]
        assert {one.size for one in store.list()} == {2}
        assert store.list("b") == []
        assert store.list("nothing/here") == []

    def test_list_shows_more_than_a_page(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: store.write(f"n/{i:04d}", b""), range(1010)))
        assert [one.path for one in store.list("n")] == [f"n/{i:04d}" for i in range(1010)]
        store.delete_tree("n")
        assert store.list() == []

    def test_list_dirs(self, store: Store) -> None:
        for path in ["step-2/m", "step-10/m", "step-10/data/x", "file", "é/x"]:
            store.write(path, b"")
        assert store.list_dirs() == ["step-10", "step-2", "é"]
        assert store.list_dirs("step-10") == ["data"]
        assert store.list_dirs("nothing") == []

    def test_directories_are_no_objects(self, store: Store) -> None:
        store.write("d/x", b"")
        assert not store.exists("d")
        with pytest.raises(NotFound):
            store.read("d")
        with pytest.raises(NotFound):
            store.stat("d")

    def test_what_is_absent_is_not_found(self, store: Store) -> None:
        for call in (store.read, store.stat, store.open, lambda path: store.read_ranges([(path, 0, 1)])):
            with pytest.raises(NotFound, match="no/such") as caught:
                call("no/such")
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.path == f"{store.url}/no/such"
            assert caught.value.__cause__ is not None
        assert not store.exists("no/such")

    def test_delete_is_idempotent(self, store: Store) -> None:
        store.write("d/x", b"")
        store.write("d/y", b"")
        store.delete("d/x")
        store.delete("d/x")
        store.delete("never/there")
        assert [one.path for one in store.list()] == ["d/y"]

    def test_delete_tree_takes_exactly_the_tree(self, store: Store) -> None:
        for path in ["d/x", "d/e/y", "d2/x", "dx"]:
            store.write(path, b"")
        store.delete_tree("d")
        store.delete_tree("d")
        store.delete_tree("dx")
        assert [one.path for one in store.list()] == ["d2/x", "dx"]
        with pytest.raises(UnsafePath, match="whole store"):
            store.delete_tree("")

    def test_sub_is_the_same_store_below(self, store: Store) -> None:
        below = store.sub("runs/x")
        below.write("a/b", b"1")
        assert below.url == f"{store.url}/runs/x"
        assert store.read("runs/x/a/b") == b"1"
        assert [one.path for one in below.list()] == ["a/b"]
        assert below.sub("a").read("b") == b"1"
        assert store.sub("").list() == store.list()

    @pytest.mark.parametrize(
        "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\0b", "a\\b"]
    )
    def test_paths_cannot_leave_the_store(self, store: Store, path: str) -> None:
        calls = (
            store.read,
            store.open,
            store.stat,
            store.exists,
            store.delete,
            store.delete_tree,
            store.list,
            store.list_dirs,
            store.sub,
            store.writer,
            store.local_path,
            lambda path: store.write(path, b""),
            lambda path: store.create(path, b""),
            lambda path: store.read_ranges([(path, 0, 1)]),
        )
        for call in calls:
            with pytest.raises(UnsafePath):
                call(path)

    @pytest.mark.parametrize("path", ["", "a/"])
    def test_an_object_needs_a_name(self, store: Store, path: str) -> None:
        with pytest.raises(UnsafePath, match="names a directory"):
            store.write(path, b"")

    def test_errors_of_io_share_one_base(self, store: Store) -> None:
        with pytest.raises(StorageError):
            store.read("missing")
        with pytest.raises(OSError, match="missing"):
            store.read("missing")
