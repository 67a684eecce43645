"""WebDataset tar files: the rows that the tool reads, in blocks that can be entered anywhere; damage is told apart."""

from __future__ import annotations

import base64
import gzip
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from omniload.errors import CorruptSource
from omniload.sources import BadRow
from omniload.sources.tar import tar_samples
from omniload.sources.tar_bytes import BytesInMemory, StreamedBytes
from omniload.sources.webdataset import BLOCK_BYTES
from tests.omniload.reading import all_rows, num_bytes, open_path, reads
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "webdataset"


def pack(members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def many(num: int, num_bytes: int) -> list[tuple[str, bytes]]:
    """Members of ``num`` samples, each of a text and of random bytes."""
    generator = np.random.default_rng(num)
    members = []
    for i in range(num):
        members.append((f"{i:05}.txt", f"text {i}".encode()))
        members.append((f"{i:05}.bin", generator.bytes(num_bytes)))
    return members


def plain(value: Any) -> Any:
    """A value in the form of the fixtures' expectation, in which an image is bytes."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value = value["bytes"]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    return value


def expected() -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {}
    for line in (FIXTURES / "expected.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        rows.setdefault(one["file"], []).append(one["row"])
    return rows


@pytest.mark.parametrize("name", sorted(expected()))
def test_rows_are_those_that_the_tool_reads(tmp_path: Path, name: str) -> None:
    """Names of every form, keys that come again, links and directories included."""
    shutil.copy(FIXTURES / name, tmp_path)
    rows = all_rows(open_path(tmp_path / name))
    assert [{field: plain(value) for field, value in row.items()} for row in rows] == expected()[name]


def test_an_image_has_its_path(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(pack([("a/b.seg.JPG", b"jpeg")]))
    [row] = all_rows(open_path(tmp_path / "x.tar"))
    assert row == {"__key__": "a/b", "seg.jpg": {"bytes": b"jpeg", "path": "a/b.seg.JPG"}}


def test_blocks_are_runs_of_whole_rows_and_every_row_is_in_one(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(pack(many(40, 200_000)))
    source = open_path(tmp_path / "x.tar")
    assert source.num_blocks(0) > 5
    ids = [source.row_ids(0, block) for block in range(source.num_blocks(0))]
    assert all(part[-1] - part[0] < BLOCK_BYTES for part in ids)
    assert [row["txt"] for row in all_rows(source)] == [f"text {i}" for i in range(40)]
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert np.concatenate(ids).tolist() == [
            member.offset for member in tar if member.name.endswith("txt")
        ]


def test_only_the_fields_asked_for_are_decoded(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(pack([("a.txt", b"text"), ("a.json", b"{damaged")]))
    source = open_path(tmp_path / "x.tar")
    assert all_rows(source, columns=["txt"]) == [{"txt": "text"}]
    [bad] = all_rows(source)
    assert isinstance(bad, BadRow)
    assert "'a.json' cannot be read as json" in bad.reason


BAD_FIELDS = {
    "bytes that are no UTF-8": ("txt", b"\xff"),
    "JSON nested too deeply": ("json", b"[" * 100_000),
    "JSON that is not UTF-8": ("json", b'"\xff"'),
    "no number": ("cls", b"one"),
    "a number of too many digits": ("cls", b"9" * 10_000),
    "an empty array file": ("npy", b""),
    "an array of objects": (
        "npy",
        b"\x93NUMPY\x01\x00\x36\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    ),
    "an array larger than its file": (
        "npy",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}  ",
    ),
    "an array header that is no Python": ("npy", b"\x93NUMPY\x01\x00\x06\x00{'a': ("),
    "an array format of the future": ("npy", b"\x93NUMPY\x09\x00\x06\x00{'a': ("),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_field_that_cannot_be_decoded_makes_its_row_bad_and_no_other(tmp_path: Path, case: str) -> None:
    field, data = BAD_FIELDS[case]
    (tmp_path / "x.tar").write_bytes(pack([("a.txt", b"good"), (f"b.{field}", data), ("c.txt", b"good")]))
    before, bad, after = all_rows(open_path(tmp_path / "x.tar"))
    assert (before["txt"], after["txt"]) == ("good", "good")
    assert isinstance(bad, BadRow)
    assert f"'b.{field}' cannot be read as {field}" in bad.reason
    assert "\n" not in bad.reason


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_keep_shape_and_type_and_can_be_changed(tmp_path: Path, order: Any) -> None:
    array = np.asarray(np.arange(24, dtype=">i2").reshape(2, 3, 4), order=order)
    sink = io.BytesIO()
    np.save(sink, array)
    (tmp_path / "x.tar").write_bytes(pack([("a.npy", sink.getvalue())]))
    [row] = all_rows(open_path(tmp_path / "x.tar"))
    assert np.array_equal(row["npy"], array)
    assert row["npy"].dtype == array.dtype
    row["npy"] += 1


def test_two_members_of_one_name_make_a_bad_row(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("a.TXT", b"2"), ("a.cls", b"3"), ("b.__key__", b""), ("c.txt", b"good")]
    (tmp_path / "x.tar").write_bytes(pack(members))
    first, second, third = all_rows(open_path(tmp_path / "x.tar"))
    assert isinstance(first, BadRow)
    assert "two members of the name 'a.TXT'" in first.reason
    assert isinstance(second, BadRow)
    assert "'b.__key__', which is that of the key" in second.reason
    assert third["txt"] == "good"


def test_a_file_without_the_mark_that_ends_it_is_read_to_its_end(tmp_path: Path) -> None:
    data = pack([("a.txt", b"one"), ("b.txt", b"two")])
    (tmp_path / "x.tar").write_bytes(data[:2048])
    assert [row["txt"] for row in all_rows(open_path(tmp_path / "x.tar"))] == ["one", "two"]


def test_a_cut_file_loses_the_row_that_it_ends_in_and_no_other(tmp_path: Path) -> None:
    members = many(4, 700)
    data = pack(members, tarfile.PAX_FORMAT)
    content = len(data.rstrip(b"\0"))
    bad = 0
    for size in [*range(1, content, 97), *range(512, content, 512)]:
        path = tmp_path / f"{size}.tar"
        path.write_bytes(data[:size])
        rows = all_rows(open_path(path))
        good = [row for row in rows if not isinstance(row, BadRow)]
        assert len(rows) - len(good) <= 1
        for i, row in enumerate(good):
            assert row["txt"] == f"text {i}"
            assert row.get("bin", members[2 * i + 1][1]) == members[2 * i + 1][1]
            assert "bin" in row or size % 512 == 0  # cut exactly between two members: nothing tells
        bad += len(rows) - len(good)
    assert bad > 50


def test_damage_is_named_with_its_offset(tmp_path: Path) -> None:
    data = bytearray(pack([("a.txt", b"one"), ("b.txt", b"two")]))
    data[1024 + 3] ^= 1
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(CorruptSource, match=r"x\.tar: has no tar header \(bad checksum\) at byte 1024; copy"):
        open_path(tmp_path / "x.tar").num_blocks(0)


def test_an_empty_file_is_no_tar_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(CorruptSource, match=r"x\.tar: an empty file"):
        open_path(tmp_path / "x.tar").num_blocks(0)


def test_a_sparse_member_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as hole:
        hole.truncate(1 << 20)
    for form in ("gnu", "pax"):
        path = tmp_path / f"{form}.tar"
        subprocess.run(
            ["tar", "--sparse", f"--format={form}", "-cf", path, "-C", tmp_path, "a.bin"],
            check=True,
            timeout=30,
        )
        with pytest.raises(CorruptSource, match=r"sparse member.* at byte \d+; pack it without --sparse"):
            open_path(path).num_blocks(0)


def header(name: str, size_field: bytes, kind: bytes) -> bytes:
    """A header with any bytes as its size."""
    block = bytearray(pack([(name, b"")])[:512])
    block[124:136] = size_field.ljust(12, b"\0")
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


BAD_HEADERS = {
    "a negative size": (header("a.txt", b"\xff" * 12, b"0"), "with the size -1"),
    "an extended header of a gigabyte": (
        header("x", b"10000000000", b"x"),
        "an extended header of 1073741824 bytes",
    ),
    "an empty record": (header("x", b"4", b"x") + b"0 a=".ljust(512, b"\0"), "a damaged extended header"),
    "a record beyond its header": (
        header("x", b"12", b"x") + b"99 path=b\n".ljust(512, b"\0"),
        "a damaged extended",
    ),
    "a size that is no number": (
        header("x", b"13", b"x") + b"11 size=-1\n".ljust(512, b"\0"),
        "with the size '-1'",
    ),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_header_that_lies_is_named(tmp_path: Path, case: str) -> None:
    data, message = BAD_HEADERS[case]
    (tmp_path / "x.tar").write_bytes(data + pack([("b.txt", b"good")]))
    with pytest.raises(CorruptSource) as error:
        open_path(tmp_path / "x.tar").num_blocks(0)
    assert message in str(error.value)
    assert str(tmp_path / "x.tar") in str(error.value)
    assert "at byte 0" in str(error.value)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_flipped_bits_end_in_bad_rows_other_rows_or_an_error_that_names_the_file(
    tmp_path: Path, ending: str
) -> None:
    data = pack(
        [*many(3, 300), ("ж" * 100 + ".json", json.dumps(list(range(300))).encode())], tarfile.PAX_FORMAT
    )
    tail = len(data) - len(data.rstrip(b"\0"))
    if ending == ".tar.gz":
        data, tail = gzip.compress(data, mtime=0), 0
    generator = np.random.default_rng(1)
    ends: set[str] = set()
    for number in range(300):
        flipped = bytearray(data)
        for _ in range(1 + number % 3):
            flipped[generator.integers(len(data) - tail)] ^= 1 << generator.integers(8)
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(flipped)
        try:
            rows = all_rows(open_path(path))
        except CorruptSource as error:
            assert str(path) in str(error)  # noqa: PT017
            assert "at byte" in str(error) or "before byte" in str(error)  # noqa: PT017
            ends.add("error")
        else:
            ends.add("bad" if any(isinstance(row, BadRow) for row in rows) else "rows")
    assert "error" in ends
    assert ends == {"error", "bad", "rows"} or ending == ".tar.gz"


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(("txt", "bin", "")), st.binary(max_size=1500)),
        max_size=12,
    ),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_a_stream_has_the_same_samples_as_a_file(
    members: list[tuple[str, str, bytes]], chunk_sizes: list[int]
) -> None:
    data = pack([(f"{key}.{field}" if field else key, content) for key, field, content in members])

    def chunks() -> Iterator[bytes]:
        at, number = 0, 0
        while at < len(data):
            size = chunk_sizes[number % len(chunk_sizes)]
            yield data[at : at + size]
            at, number = at + size, number + 1

    in_memory = list(tar_samples(BytesInMemory(data, 0, len(data)), 0, len(data), "x"))
    assert list(tar_samples(StreamedBytes(chunks()), 0, 2**63 - 1, "x")) == in_memory


def test_headers_of_large_members_are_found_without_reading_the_members(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(pack(many(20, 1 << 20)))
    source = open_path(tmp_path / "x.tar")
    with reads() as of_headers:
        assert source.num_blocks(0) == 20
    assert 20 * 1024 < num_bytes(of_headers) < 1 << 20


def test_on_s3_blocks_are_read_by_ranges_and_the_index_is_kept_there(s3: S3Server) -> None:
    members = many(12, 1 << 20)
    root = f"s3://{s3.bucket}/webdataset"
    store = storage.Store(root, s3.storage_options)
    store.write("x.tar", pack(members))
    source = open_path(f"{root}/x.tar", storage_options=s3.storage_options)
    with reads() as of_headers:
        assert source.num_blocks(0) == 12
    assert 0 < num_bytes(of_headers) < 8 << 20
    with reads() as of_block:
        block = source.read_block(0, 7)
    assert num_bytes(of_block) < 2 << 20
    assert block.rows(np.arange(1)) == [{"__key__": "00007", "txt": "text 7", "bin": members[15][1]}]
    assert store.exists(".omniload/x.tar.index")
    again = open_path(root, storage_options=s3.storage_options)
    with reads() as of_index:
        assert again.num_blocks(0) == 12
    assert not of_index
    assert len(all_rows(again)) == 12
