"""Plain text: a row is a line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from omniload.sources import BadRow
from omniload.sources.lines import BLOCK_BYTES, LineBlock, LineSource
from omniload.sources.listing import list_files
from omniload.sources.text import TextSource
from tests.omniload.reading import all_rows, num_bytes, open_path, reads
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "text"


def test_lines_are_those_of_the_text_builder_without_the_blank_ones() -> None:
    expected = [json.loads(line) for line in (FIXTURES / "expected.jsonl").read_text().splitlines()]
    assert {"text": ""} in expected, "there must be a blank line"
    rows = all_rows(open_path(FIXTURES / "lines.txt"))
    assert rows == [row for row in expected if row["text"]]


def test_a_line_that_is_not_utf8_is_bad_alone(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"a\n\xff\nb\n")
    first, bad, last = all_rows(open_path(tmp_path))
    assert (first, last) == ({"text": "a"}, {"text": "b"})
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("not UTF-8")


def test_a_byte_order_mark_is_no_text_and_a_carriage_return_alone_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa\rb\r\nc\x0b\x0c\xe2\x80\xa8d\n")
    assert all_rows(open_path(tmp_path)) == [{"text": "a\rb"}, {"text": "c\x0b\x0c\u2028d"}]


def test_a_file_without_a_line_has_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\n\r\n\n")
    source = open_path(tmp_path)
    assert all_rows(source) == []
    schema = source.schema(0)
    assert schema is not None
    assert schema.names == ["text"]


@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line)),
    block_bytes=st.integers(1, 40),
)
def test_any_blocks_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block_bytes: int
) -> None:
    """Blocks of any size are the cut of a whole file into those lines that start in each."""
    data = b"\n".join(lines)
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(data)
    _, listing = list_files("s", [str(path)])
    source = LineSource("s", listing, lambda line: {"line": bytes(line)}, block_bytes=block_bytes)
    whole = LineBlock(data, 0, len(data), lambda line: {"line": bytes(line)})
    rows, ids = [], []
    for block in range(source.num_blocks(0)):
        raw = source.read_block(0, block)
        assert all(block * block_bytes <= i < (block + 1) * block_bytes for i in raw.row_ids.tolist())
        rows += raw.rows(np.arange(raw.num_rows))
        ids += raw.row_ids.tolist()
    assert rows == whole.rows(np.arange(whole.num_rows))
    assert ids == whole.row_ids.tolist()


def test_damaged_bytes_end_in_quarantine_or_other_text(tmp_path: Path) -> None:
    data = "".join(f"line {i} é\n" for i in range(200)).encode()
    generator = np.random.default_rng(2)
    num_bad = 0
    for _ in range(60):
        damaged = bytearray(data[: generator.integers(1, len(data))])
        for at in generator.integers(len(damaged), size=20):
            damaged[at] ^= 1 << generator.integers(8)
        (tmp_path / "x.txt").write_bytes(damaged)
        rows = all_rows(open_path(tmp_path))
        assert len(rows) <= damaged.count(b"\n") + 1
        num_bad += sum(isinstance(row, BadRow) for row in rows)
    assert num_bad > 60


def test_a_block_of_a_text_on_s3_is_read_by_a_range(s3: S3Server) -> None:
    store = storage.Store(f"s3://{s3.bucket}/text", s3.storage_options)
    lines = [f"line {i}" for i in range(500_000)]
    store.write("x.txt", "\n".join(lines).encode())
    source = open_path(store.url, storage_options=s3.storage_options)
    assert isinstance(source, TextSource)
    with reads() as spans:
        block = source.read_block(0, 3)
    assert BLOCK_BYTES < num_bytes(spans) <= 2 * BLOCK_BYTES + 1 < source.files[0].size // 2
    [row] = block.rows(np.array([0]))
    assert row == {"text": lines["\n".join(lines)[: int(block.row_ids[0])].count("\n")]}
