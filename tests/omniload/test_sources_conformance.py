"""What every source must do, as a class of tests that each format subclasses."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import storage
from omniload.mixture import SourceSpec
from omniload.sources import InMemorySource, Source, open_source
from omniload.sources.lines import BLOCK_BYTES
from omniload.sources.parquet import ParquetSource
from tests.omniload.token_files import put_mds, put_megatron

FILES = {"a": 7, "b/c": 0, "b/d": 23, "z": 1}
"""Rows of each file."""


def rows_of(path: str) -> list[dict[str, Any]]:
    return [{"text": f"{path} row {i} é " * (i % 3 + 1), "number": i} for i in range(FILES[path])]


def open_files(root: str | Path, ending: str) -> Source:
    return open_source("s", SourceSpec(path=(f"{root}/**/*{ending}", f"{root}/*{ending}"), weight=1))


class SourceConformance:
    """Subclass it and define ``ending`` and ``encode``; ``source`` gives the files of `FILES`."""

    ending: str

    def expected(self, path: str) -> list[dict[str, Any]]:
        """Rows of a file as the source gives them, for formats that name the columns in their own way."""
        return rows_of(path)

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        raise NotImplementedError

    @pytest.fixture(params=["local", "remote"])
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
        """A folder or an object store that holds the files."""
        parent = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
        self.fill(f"{parent}/data")
        yield f"{parent}/data"
        for folder in ("data", "data-copy"):
            storage.Store(parent).delete_tree(folder)

    @pytest.fixture
    def source(self, root: str) -> Source:
        return open_files(root, self.ending)

    def fill(self, root: str) -> None:
        for path in FILES:
            self.put(storage.Store(root), path, rows_of(path))

    def put(self, store: storage.Store, path: str, rows: list[dict[str, Any]]) -> None:
        """Write one file, and what belongs to it."""
        store.write(f"{path}{self.ending}", self.encode(rows))

    def test_files_are_sorted_and_listed_once(self, source: Source) -> None:
        """Though two overlapping patterns match them."""
        assert [entry.path for entry in source.files] == [f"{path}{self.ending}" for path in sorted(FILES)]

    def test_blocks_hold_every_row_once_in_order(self, source: Source) -> None:
        for file, path in enumerate(sorted(FILES)):
            rows: list[Any] = []
            for block in range(source.num_blocks(file)):
                raw = source.read_block(file, block)
                assert raw.num_rows == len(raw.row_ids)
                rows += raw.rows(np.arange(raw.num_rows))
            assert rows == self.expected(path)

    def test_row_ids_identify_rows_of_a_file(self, source: Source) -> None:
        for file in range(len(source.files)):
            ids: list[int] = []
            for block in range(source.num_blocks(file)):
                of_block = source.row_ids(file, block)
                assert of_block.dtype == np.int64
                assert np.array_equal(of_block, source.read_block(file, block).row_ids)
                ids += of_block.tolist()
            assert ids == sorted(set(ids))

    def test_rows_are_given_in_the_order_asked_for(self, source: Source) -> None:
        raw = source.read_block(2, 0)
        picked = np.array([3, 0, 0, 2])
        everything = raw.rows(np.arange(raw.num_rows))
        assert raw.rows(picked) == [everything[i] for i in picked]

    def test_reading_again_gives_the_same(self, source: Source) -> None:
        first = source.read_block(2, 0).rows(np.arange(3))
        source.close()
        assert source.read_block(2, 0).rows(np.arange(3)) == first

    def test_schema_names_the_columns(self, source: Source) -> None:
        schema = source.schema(0)
        assert schema is not None
        assert schema.names == list(self.expected("a")[0])

    def test_memory_is_accounted_for(self, source: Source) -> None:
        assert source.read_block(2, 0).num_bytes > 23

    def test_a_copy_elsewhere_has_the_same_fingerprint(self, source: Source, root: str) -> None:
        self.fill(f"{root}-copy/elsewhere")
        assert open_files(f"{root}-copy/elsewhere", self.ending).fingerprint == source.fingerprint

    def test_a_changed_renamed_or_missing_file_changes_the_fingerprint(
        self, source: Source, root: str
    ) -> None:
        store, last = storage.Store(root), f"z{self.ending}"
        seen = {source.fingerprint}
        changed: list[dict[str, Any]] = [{"text": "Z row 0 é ", "number": 0}]
        self.put(store, "z", changed)
        seen.add(open_files(root, self.ending).fingerprint)
        store.delete(last)
        seen.add(open_files(root, self.ending).fingerprint)
        self.put(store, "y", changed)
        seen.add(open_files(root, self.ending).fingerprint)
        assert len(seen) == 4


class TestParquet(SourceConformance):
    ending = ".parquet"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        sink = io.BytesIO()
        pq.write_table(_table(rows), sink, row_group_size=5)
        return sink.getvalue()

    def test_a_block_is_a_row_group(self, source: Source) -> None:
        assert [source.num_blocks(file) for file in range(4)] == [2, 1, 5, 1]
        assert source.row_ids(2, 4).tolist() == [20, 21, 22]

    def test_only_the_columns_asked_for_are_read(self, source: Source) -> None:
        assert source.read_block(0, 0, ["number"]).rows(np.arange(2)) == [{"number": 0}, {"number": 1}]

    def test_few_files_are_open_at_a_time(self, source: Source) -> None:
        assert isinstance(source, ParquetSource)
        for file in range(4):
            source.num_blocks(file)
        assert len(source._open) <= 2

    def test_memory_stays_flat_over_many_reads(self, tmp_path: Path) -> None:
        """Arrow's pool after the hundredth row group holds what it held after the tenth."""
        table = pa.table({"input_ids": pa.array([[1] * 1000] * 200, pa.list_(pa.int32()))})
        for i in range(10):
            pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=20)
        source = open_files(tmp_path, self.ending)
        held = []
        for file in range(10):
            for block in range(10):
                source.read_block(file, block)
            held.append(pa.total_allocated_bytes())
        assert max(held[1:]) <= held[0] + (1 << 20)


class TestJsonl(SourceConformance):
    ending = ".jsonl"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


class TestJsonlGzip(TestJsonl):
    ending = ".jsonl.gz"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return gzip.compress(super().encode(rows), mtime=0)


class TestJsonlZstandard(TestJsonl):
    ending = ".jsonl.zst"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return zstandard.compress(super().encode(rows))


class TestWebDataset(SourceConformance):
    ending = ".tar"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as tar:
            for number, row in enumerate(rows):
                for field, value in (("text", row["text"]), ("number.cls", str(row["number"]))):
                    member = tarfile.TarInfo(f"{number:06}.{field}")
                    member.size = len(value.encode())
                    tar.addfile(member, io.BytesIO(value.encode()))
        return sink.getvalue()

    def expected(self, path: str) -> list[dict[str, Any]]:
        return [
            {"__key__": f"{number:06}", "text": row["text"], "number.cls": row["number"]}
            for number, row in enumerate(rows_of(path))
        ]


class TestWebDatasetGzip(TestWebDataset):
    ending = ".tar.gz"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return gzip.compress(super().encode(rows), mtime=0)


class TestWebDatasetZstandard(TestWebDataset):
    ending = ".tar.zst"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return zstandard.compress(super().encode(rows))


class TestMegatron(SourceConformance):
    ending = ".idx"

    def put(self, store: storage.Store, path: str, rows: list[dict[str, Any]]) -> None:
        put_megatron(store, path, [list(row["text"].encode()) for row in rows])

    def expected(self, path: str) -> list[dict[str, Any]]:
        return [{"input_ids": list(row["text"].encode())} for row in rows_of(path)]


class TestMds(SourceConformance):
    ending = "/index.json"

    def put(self, store: storage.Store, path: str, rows: list[dict[str, Any]]) -> None:
        samples = [[row["text"].encode(), struct.pack("<q", row["number"])] for row in rows]
        put_mds(store, path, {"text": ("str", None), "number": ("int", 8)}, samples)


class TestArrowFile(SourceConformance):
    ending = ".arrow"
    new = staticmethod(pa.ipc.new_file)

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        sink = io.BytesIO()
        with self.new(sink, _table([]).schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(_table(rows), max_chunksize=5)
        return sink.getvalue()


class TestArrowStream(TestArrowFile):
    ending = ".ipc"
    new = staticmethod(pa.ipc.new_stream)


class TestText(SourceConformance):
    ending = ".txt"

    def expected(self, path: str) -> list[dict[str, Any]]:
        return [{"text": row["text"]} for row in rows_of(path)]

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return b"".join(row["text"].encode() + b"\n" for row in rows)


class TestTextGzip(TestText):
    ending = ".txt.gz"

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return gzip.compress(super().encode(rows), mtime=0)


class TestDescribedImages(SourceConformance):
    ending = "/metadata.jsonl"

    def fill(self, root: str) -> None:
        super().fill(root)
        for path in FILES:
            storage.Store(root).write(f"{path}/images/0.png", path.encode())

    def expected(self, path: str) -> list[dict[str, Any]]:
        image = {"bytes": path.encode(), "path": "images/0.png"}
        return [{"image": image, **row} for row in rows_of(path)]

    def encode(self, rows: list[dict[str, Any]]) -> bytes:
        return b"".join(json.dumps({"file_name": "images/0.png", **row}).encode() + b"\n" for row in rows)


class TestInMemory(SourceConformance):
    ending = ""

    @pytest.fixture
    def source(self) -> Source:
        tables = {path: _table(rows_of(path)) for path in sorted(FILES, reverse=True)}
        return InMemorySource(tables, block_rows=5)

    @pytest.fixture
    def root(self) -> str:
        return "nowhere"

    def test_a_copy_elsewhere_has_the_same_fingerprint(self, source: Source, root: str) -> None:
        tables = {path: _table(rows_of(path)) for path in FILES}
        assert InMemorySource(tables, name="other", block_rows=5).fingerprint == source.fingerprint

    def test_a_changed_renamed_or_missing_file_changes_the_fingerprint(
        self, source: Source, root: str
    ) -> None:
        changed = [
            InMemorySource({"a": [{"x": 1}]}),
            InMemorySource({"a": [{"x": 2}]}),
            InMemorySource({"b": [{"x": 1}]}),
            InMemorySource({"a": [{"x": 1}], "b": [{"x": 1}]}),
            InMemorySource({"a": [{"x": 1}]}, block_rows=1),
        ]
        assert len({one.fingerprint for one in changed}) == 5


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema([("text", pa.string()), ("number", pa.int64())]))


@pytest.mark.parametrize(
    "line_bytes", [100, 1000, BLOCK_BYTES // 3, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES]
)
def test_lines_of_any_length_fall_into_exactly_one_byte_range(tmp_path: Path, line_bytes: int) -> None:
    """Also lines that end exactly at the border of a range, and lines longer than several ranges."""
    generator = np.random.default_rng(line_bytes)
    lines, offsets, at = [], [], 0
    while at < 4 * BLOCK_BYTES:
        size = max(4, line_bytes - int(generator.integers(0, 3)))
        lines.append(b'"' + b"x" * (size - 3) + b'"')
        offsets.append(at)
        at += size
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines) + (b"\n" if line_bytes % 2 else b""))
    source = open_files(tmp_path, ".jsonl")
    ids = [source.row_ids(0, block) for block in range(source.num_blocks(0))]
    assert np.concatenate(ids).tolist() == offsets
    assert all(
        ((block * BLOCK_BYTES <= part) & (part < (block + 1) * BLOCK_BYTES)).all()
        for block, part in enumerate(ids)
    )


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (b"", []),
        (b"\n\n", []),
        (b"\xef\xbb\xbf{}\n", [3]),
        (b"{}\r\n\r\n{}\r\n", [0, 6]),
        (b"{}\n\n\n{}", [0, 5]),
        (b"\n{}", [1]),
    ],
)
def test_blank_lines_carriage_returns_and_byte_order_marks_are_no_rows(
    tmp_path: Path, data: bytes, ids: list[int]
) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    source = open_files(tmp_path, ".jsonl")
    blocks = [source.read_block(0, block) for block in range(source.num_blocks(0))]
    assert [i for block in blocks for i in block.row_ids.tolist()] == ids
    assert [row for block in blocks for row in block.rows(np.arange(block.num_rows))] == [{}] * len(ids)


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
def test_several_compressed_streams_in_one_file_are_one_file(tmp_path: Path, ending: str) -> None:
    pack = gzip.compress if ending.endswith(".gz") else zstandard.compress
    padding = b"\0" * (3 << 20) if ending.endswith(".gz") else b""
    (tmp_path / f"x{ending}").write_bytes(pack(b'{"a": 1}\n{"a"') + pack(b": 2}\n") + padding)
    block = open_files(tmp_path, ending).read_block(0, 0)
    assert block.rows(np.arange(block.num_rows)) == [{"a": 1}, {"a": 2}]
