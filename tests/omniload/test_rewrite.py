"""Compressed files that were rewritten: the same content for any tool, in frames that can be read by themselves."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from omniload.errors import CorruptSource
from omniload.sources import Source
from omniload.sources.frames import encode_frames, find_frames
from omniload.sources.indexing import Outcome, index_file
from omniload.sources.listing import Listing, list_files
from omniload.sources.rewrite import FRAME_BYTES, cut_at, cut_lines, rewrite
from tests.omniload.reading import num_bytes, open_path, reads
from tests.storage.seaweed import S3Server

ENDINGS = [".jsonl.gz", ".jsonl.zst"]


def compress(data: bytes, ending: str) -> bytes:
    return zstandard.compress(data) if ending.endswith("zst") else gzip.compress(data, mtime=0)


def decompress(data: bytes, ending: str) -> bytes:
    """As standard tools do it."""
    if not ending.endswith("zst"):
        return gzip.decompress(data)
    with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
        return reader.read()


def lines(num: int, seed: int = 0) -> bytes:
    generator = np.random.default_rng(seed)
    rows = [{"n": i, "text": generator.bytes(int(generator.integers(1, 4000))).hex()} for i in range(num)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def listing_of(path: Path | str) -> tuple[str, Listing]:
    return list_files("s", [str(path)])


def rewritten(path: Path | str, *, may_rewrite: bool = True) -> Outcome:
    return index_file(*listing_of(path), 0, may_rewrite=may_rewrite)


def all_of(source: Source) -> tuple[list[Any], list[int]]:
    """Rows, and their ids."""
    blocks = [source.read_block(0, block) for block in range(source.num_blocks(0))]
    rows = [row for block in blocks for row in block.rows(np.arange(block.num_rows))]
    return rows, [i for block in blocks for i in block.row_ids.tolist()]


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_and_their_ids_stay_and_blocks_become_many(tmp_path: Path, ending: str, where: str) -> None:
    root = str(tmp_path) if where == "local" else f"memory://{tmp_path.name}{ending}"
    store, path = storage.Store(root), f"{root}/x{ending}"
    data = lines(1500)
    store.write(f"x{ending}", compress(data, ending))
    before = open_path(path)
    packed = before.fingerprint
    assert before.num_blocks(0) == 1
    assert rewritten(path, may_rewrite=False) == "needs --rewrite"
    assert rewritten(path) == "rewritten"
    assert rewritten(path) == "there already"
    after = open_path(path)
    assert after.num_blocks(0) > 4
    assert all_of(after) == all_of(open_path(path)) == (json_rows(data), line_starts(data))
    assert after.fingerprint != packed
    assert decompress(store.read(f"x{ending}"), ending) == data
    assert [file.path for file in store.list()] == [f"x{ending}"]


def json_rows(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def line_starts(data: bytes) -> list[int]:
    return np.cumsum([0, *(len(line) for line in data.splitlines(keepends=True))])[:-1].tolist()


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_block_of_a_rewritten_file_is_read_by_itself(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    path.write_bytes(compress(lines(1500), ending))
    rewritten(path)
    source = open_path(path)
    num_blocks = source.num_blocks(0)
    with reads() as of_block:
        source.read_block(0, num_blocks // 2)
    assert 0 < num_bytes(of_block) < 2 * path.stat().st_size / num_blocks


def test_a_file_on_s3_is_rewritten_there(s3: S3Server) -> None:
    root, data = f"s3://{s3.bucket}/rewrite", lines(1500)
    store = storage.Store(root, s3.storage_options)
    store.write("x.jsonl.zst", compress(data, ".zst"))
    found = list_files("s", [root], s3.storage_options)
    assert index_file(*found, 0, may_rewrite=True) == "rewritten"
    source = open_path(root, storage_options=s3.storage_options)
    assert source.num_blocks(0) > 4
    assert all_of(source) == (json_rows(data), line_starts(data))
    assert [file.path for file in store.list()] == ["x.jsonl.zst"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}",
        b'\xef\xbb\xbf{"a": 1}\n{}',
        b'{"a": "' + b"x" * (3 * FRAME_BYTES) + b'"}\n{}\n',
        b"\n" * (FRAME_BYTES + 1) + b"{}",
        b"{}\n" + b" " * (FRAME_BYTES - 4) + b"\n" + b"{}\n{}",
        b"{}\n" + b" " * (FRAME_BYTES - 3) + b"\n" + b"{}\n{}",
    ],
    ids=[
        "empty",
        "blank",
        "no newline",
        "mark",
        "long line",
        "blank lines",
        "before the border",
        "on the border",
    ],
)
def test_any_content_stays_the_same(tmp_path: Path, ending: str, data: bytes) -> None:
    path = tmp_path / f"x{ending}"
    path.write_bytes(compress(data, ending))
    before = all_of(open_path(path))
    assert rewritten(path) == "rewritten"
    assert all_of(open_path(path)) == before
    assert decompress(path.read_bytes(), ending) == data


@settings(max_examples=25)
@given(st.lists(st.integers(1, 2 * FRAME_BYTES), max_size=4), st.integers(1 << 16, 2 * FRAME_BYTES))
def test_runs_are_whole_lines_of_about_a_frame(line_sizes: list[int], chunk_bytes: int) -> None:
    data = b"".join(b"x" * (size - 1) + b"\n" for size in line_sizes) + b"end"
    runs = list(cut_lines(data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)))
    assert b"".join(runs) == data
    assert all(run.endswith(b"\n") for run in runs[:-1])
    assert all(run.find(b"\n", FRAME_BYTES) in (-1, len(run) - 1) for run in runs)


@given(st.binary(max_size=50), st.integers(1, 20), st.data())
def test_runs_begin_at_the_offsets_given(data: bytes, chunk_bytes: int, draw: st.DataObject) -> None:
    offsets = sorted(draw.draw(st.sets(st.integers(0, len(data)))))
    runs = list(cut_at(offsets)(data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)))
    starts = np.cumsum([0, *map(len, runs)]).tolist()
    assert b"".join(runs) == data
    assert set(starts) == {0, len(data), *offsets} if data else runs == []


def test_the_table_of_zstd_is_that_of_the_seekable_format(tmp_path: Path) -> None:
    """Read here as its specification says, from the footer on."""
    data = lines(800)
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(compress(data, ".zst"))
    rewritten(path)
    stored = path.read_bytes()
    num_frames, descriptor, magic = struct.unpack("<IBI", stored[-9:])
    assert (descriptor, magic) == (0, 0x8F92EAB1)
    table = stored[-9 - 8 * num_frames : -9]
    assert struct.unpack("<II", stored[-17 - 8 * num_frames : -9 - 8 * num_frames]) == (
        0x184D2A5E,
        8 * num_frames + 9,
    )
    at, content = 0, b""
    for compressed, size in struct.iter_unpack("<II", table):
        frame = zstandard.ZstdDecompressor().decompress(stored[at : at + compressed], allow_extra_data=False)
        assert len(frame) == size
        content += frame
        at += compressed
    assert num_frames > 1
    assert content == data


def test_gzip_itself_reads_a_rewritten_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(compress(lines(800), ".gz"))
    rewritten(path)
    out = subprocess.run(["gzip", "-dc", path], check=True, capture_output=True, timeout=60)
    assert out.stdout == lines(800)
    assert not out.stderr


def test_a_table_of_many_members_is_found_again(tmp_path: Path) -> None:
    """So many that it takes several extra fields."""
    sizes = [(20 + i % 7, i % 5) for i in range(20_000)]
    for packing, name in (("gzip", "x.gz"), ("zstd", "x.zst")):
        end = sum(stored for stored, _ in sizes)
        (tmp_path / name).write_bytes(bytes(end) + encode_frames(sizes, packing))  # type: ignore[arg-type]
        _, listing = list_files("s", [str(tmp_path / name)], format_name="jsonl")
        frames = find_frames(listing.store, listing.files[0], packing)  # type: ignore[arg-type]
        assert frames is not None
        assert np.diff(frames.stored).tolist() == [stored for stored, _ in sizes]
        assert np.diff(frames.content).tolist() == [content for _, content in sizes]


def test_a_seekable_file_of_another_tool_is_one_block(tmp_path: Path) -> None:
    """Its frames may end inside a row."""
    frames = [zstandard.compress(part) for part in (b'{"a"', b': "' + b"x" * 100 + b'"}\n{}\n')]
    table = b"".join(
        struct.pack("<II", len(frame), size) for frame, size in zip(frames, (4, 107), strict=True)
    )
    footer = struct.pack("<IBI", 2, 0, 0x8F92EAB1)
    tail = struct.pack("<II", 0x184D2A5E, len(table) + 9) + table + footer
    (tmp_path / "x.jsonl.zst").write_bytes(b"".join(frames) + tail)
    source = open_path(tmp_path / "x.jsonl.zst")
    assert source.num_blocks(0) == 1
    assert all_of(source)[0] == [{"a": "x" * 100}, {}]


@pytest.mark.parametrize("ending", [".tar.gz", ".tar.zst", ".tgz"])
def test_a_compressed_tar_file_is_cut_between_rows(tmp_path: Path, ending: str) -> None:
    sink = io.BytesIO()
    generator = np.random.default_rng(1)
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for i in range(30):
            for field, data in (("txt", b"text %d" % i), ("bin", generator.bytes(150_000))):
                member = tarfile.TarInfo(f"{i}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    path = tmp_path / f"x{ending}"
    path.write_bytes(compress(sink.getvalue(), ending))
    before = all_of(open_path(path))
    assert rewritten(path) == "rewritten"
    after = open_path(path)
    assert after.num_blocks(0) == 5
    assert all_of(after) == before
    assert len(before[0]) == 30
    assert decompress(path.read_bytes(), ending) == sink.getvalue()


@pytest.mark.parametrize("ending", ENDINGS)
def test_flipped_bits_of_a_rewritten_file_never_pass(tmp_path: Path, ending: str) -> None:
    """What is read is right, or an error names the file and where it is damaged."""
    path = tmp_path / f"x{ending}"
    path.write_bytes(compress(lines(400), ending))
    rewritten(path)
    good, rows = path.read_bytes(), all_of(open_path(path))
    generator = np.random.default_rng(2)
    places = [*generator.integers(len(good), size=30), *range(len(good) - 120, len(good))]
    errors = 0
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << generator.integers(8)
        path.write_bytes(flipped)
        try:
            assert all_of(open_path(path)) == rows
        except CorruptSource as error:
            assert str(path) in str(error)  # noqa: PT017
            assert "at byte" in str(error) or "before byte" in str(error)  # noqa: PT017
            errors += 1
    assert errors > 60


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_cut_rewritten_file_is_corrupt(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    path.write_bytes(compress(lines(400), ending))
    rewritten(path)
    good, rows = path.read_bytes(), all_of(open_path(path))
    for size in (0, 1, len(good) // 2, *range(len(good) - 90, len(good), 7)):
        path.write_bytes(good[:size])
        try:
            assert all_of(open_path(path)) == rows  # the table is cut, all rows are there
            assert size > len(good) - 120
        except CorruptSource as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_cannot_be_read_whole_is_left_as_it_was(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    cut = compress(lines(1000), ending)[:-5]
    path.write_bytes(cut)
    with pytest.raises(CorruptSource):
        rewritten(path)
    assert path.read_bytes() == cut
    assert not [found for found in tmp_path.rglob("*") if found.is_file() and found != path]


def test_a_file_that_changes_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(compress(b"{}\n", ".gz"))
    _, listing = listing_of(path)

    def cut(chunks: Iterator[bytes]) -> Iterator[bytes]:
        yield from chunks
        path.write_bytes(compress(b"[]\n", ".gz"))

    with pytest.raises(CorruptSource, match="changed while it was rewritten"):
        rewrite(listing.store, listing.files[0], cut)
    assert gzip.decompress(path.read_bytes()) == b"[]\n"


def test_content_that_does_not_read_back_the_same_is_not_put_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(compress(b"{}\n[]\n", ".gz"))
    before = path.read_bytes()
    _, listing = listing_of(path)
    with pytest.raises(CorruptSource, match="does not read back the same"):
        rewrite(listing.store, listing.files[0], lambda chunks: (chunk[:3] for chunk in chunks))
    assert path.read_bytes() == before


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(compress(b"{}\n", ".gz"))
    path.chmod(0o640)
    rewritten(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_frame_that_claims_to_be_huge_is_not_allocated(tmp_path: Path) -> None:
    """Of the table and of the frame itself only what agrees is believed, and gzip gives no more than is there."""
    member = zlib.compressobj(wbits=31)
    frame = member.compress(b"{}\n") + member.flush()
    (tmp_path / "x.jsonl.gz").write_bytes(frame + encode_frames([(len(frame), 2**32 - 1)], "gzip"))
    with pytest.raises(CorruptSource, match="a member of 3 bytes where the table says 4294967295"):
        open_path(tmp_path / "x.jsonl.gz").read_block(0, 0)
    frame = zstandard.compress(b"{}\n")
    (tmp_path / "x.jsonl.zst").write_bytes(frame + encode_frames([(len(frame), 2**32 - 1)], "zstd"))
    with pytest.raises(CorruptSource, match="a frame of 3 bytes where the table says 4294967295"):
        open_path(tmp_path / "x.jsonl.zst").read_block(0, 0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_other_files_need_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    assert rewritten(tmp_path / name) == "nothing to build"


_KILLED = """
import os, sys
from omniload.sources.listing import list_files
from omniload.sources.rewrite import rewrite

def cut(chunks):
    yield next(chunks)
    os._exit(9)

_, listing = list_files("s", [sys.argv[1]])
rewrite(listing.store, listing.files[0], cut)
"""


def test_a_process_killed_while_rewriting_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path, data = tmp_path / "x.jsonl.gz", lines(1500)
    path.write_bytes(compress(data, ".gz"))
    before = path.read_bytes()
    killed = subprocess.run([sys.executable, "-c", _KILLED, path], check=False, timeout=60)
    assert killed.returncode == 9
    assert [found for found in tmp_path.rglob("*") if found.is_file() and found != path]  # it had begun
    assert path.read_bytes() == before
    assert [entry.path for entry in open_path(tmp_path).files] == ["x.jsonl.gz"]
    assert rewritten(path) == "rewritten"
    assert all_of(open_path(path)) == (json_rows(data), line_starts(data))
