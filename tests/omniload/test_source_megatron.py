"""Megatron's indexed datasets: the documents that the tool reads, by any name of theirs, and no damage unnoticed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from omniload.errors import ColumnMissing, CorruptSource, MixtureError, SourceNotFound
from omniload.loader import open_loader
from omniload.mixture import Mixture, SourceSpec
from omniload.samples.pretokenised import PretokenisedReader
from omniload.sources import Source, open_source
from omniload.sources.megatron import BLOCK_BYTES
from storage import Span
from tests.omniload.loading import pieces
from tests.omniload.token_files import megatron_index, put_megatron
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
EXPECTED: dict[str, list[list[int]]] = {
    row["name"]: row["documents"]
    for row in map(json.loads, (FIXTURES / "expected.jsonl").read_text().splitlines())
}


def open_path(path: Path | str, **keys: Any) -> Source:
    return open_source("s", SourceSpec(path=(str(path),), weight=1, **keys))


def documents(source: Source, file: int = 0) -> list[list[int]]:
    blocks = [source.read_block(file, block) for block in range(source.num_blocks(file))]
    return [row["input_ids"] for block in blocks for row in block.rows(np.arange(block.num_rows))]


def write(folder: Path, index: bytes, tokens: bytes) -> Path:
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(tokens)
    return folder / "x.idx"


@contextmanager
def reads() -> Iterator[list[Span]]:
    """The reads of ranges made meanwhile."""
    spans: list[Span] = []
    storage.start_recording()
    try:
        yield spans
        spans += [span for span in storage.drain() if span.name == "storage.read_ranges"]
    finally:
        storage.stop_recording()


def num_bytes(spans: list[Span]) -> int:
    return sum(int(span.attributes["num_bytes"]) for span in spans)


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"images"}))
def test_the_documents_are_those_that_the_tool_reads(name: str) -> None:
    source = open_path(FIXTURES / name)
    assert documents(source) == EXPECTED[name]
    ids = [id_ for block in range(source.num_blocks(0)) for id_ in source.row_ids(0, block).tolist()]
    assert ids == list(range(len(EXPECTED[name])))


def test_the_fixtures_have_documents_of_none_one_and_several_sequences() -> None:
    assert EXPECTED["no_documents"] == []
    assert [len(one) for one in EXPECTED["empty_documents"]] == [0, 3, 0, 0, 3, 0]
    assert [len(one) for one in EXPECTED["several_each"]] == [7, 1, 6, 51]


def test_sequences_that_are_not_text_are_refused_by_number() -> None:
    with pytest.raises(
        CorruptSource, match=r"images\.idx: byte \d+: sequence 1 is of mode 1, not text; write"
    ):
        open_path(FIXTURES / "images").read_block(0, 0)


def test_the_column_has_the_type_of_the_tokens_and_is_not_copied() -> None:
    types = {
        name: open_path(FIXTURES / name).schema(0) for name in ("bytes", "one_each", "several_each", "wide")
    }
    assert [str(schema.field("input_ids").type.value_type) for schema in types.values() if schema] == [
        "uint8",
        "uint16",
        "int32",
        "int64",
    ]
    table = open_path(FIXTURES / "one_each").read_block(0, 0).table
    assert table is not None
    assert table.schema == types["one_each"]


@pytest.mark.parametrize(
    "path", ["one_each", "one_each.bin", "one_each.idx", "*_each.bin", "{one,several}_each"]
)
def test_a_dataset_is_named_by_either_file_a_glob_braces_or_neither_ending(path: str) -> None:
    source = open_path(FIXTURES / path)
    names = [entry.path for entry in source.files]
    assert names == (["one_each.idx"] if path.startswith("one") else ["one_each.idx", "several_each.idx"])
    assert documents(source) == EXPECTED["one_each"]


def test_a_folder_holds_all_its_datasets_and_nothing_else(tmp_path: Path) -> None:
    store = storage.Store(tmp_path)
    put_megatron(store, "a", [[1]])
    put_megatron(store, "deep/b", [[2]])
    store.write("pytorch_model.bin", b"weights")
    source = open_path(tmp_path)
    assert [entry.path for entry in source.files] == ["a.idx", "deep/b.idx"]
    before = source.fingerprint
    store.write("pytorch_model.bin", b"other weights")
    assert open_path(tmp_path).fingerprint == before


def test_other_tokens_of_the_same_lengths_change_the_fingerprint(tmp_path: Path) -> None:
    put_megatron(storage.Store(tmp_path), "x", [[1, 2], [3]])
    seen = {open_path(tmp_path / name).fingerprint for name in ("x", "x.idx", "x.bin", "")}
    assert len(seen) == 1
    put_megatron(storage.Store(tmp_path), "x", [[1, 2], [4]])
    assert open_path(tmp_path / "x").fingerprint not in seen


def test_one_file_without_the_other_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(megatron_index([1]))
    with pytest.raises(SourceNotFound, match=r"'s': .*x\.idx has no \.bin beside it; copy"):
        open_path(tmp_path / "x")
    (tmp_path / "x.idx").rename(tmp_path / "y")
    (tmp_path / "z.bin").touch()
    with pytest.raises(MixtureError, match=r"cannot tell the format of .*z\.bin"):
        open_path(tmp_path / "z.bin")


def test_blocks_have_as_many_documents_as_have_the_bytes_of_a_block_on_average(tmp_path: Path) -> None:
    put_megatron(storage.Store(tmp_path), "x", [[7] * (BLOCK_BYTES // 8)] * 10, dtype="uint16")
    source = open_path(tmp_path)
    assert [len(source.row_ids(0, block)) for block in range(source.num_blocks(0))] == [4, 4, 2]
    assert len(documents(source)) == 10


def test_a_document_longer_than_a_block_is_a_block(tmp_path: Path) -> None:
    lengths = [BLOCK_BYTES, 1, BLOCK_BYTES]
    put_megatron(storage.Store(tmp_path), "x", [[7] * length for length in lengths], dtype="int32")
    source = open_path(tmp_path)
    assert source.num_blocks(0) == 3
    assert [len(one) for one in documents(source)] == lengths


def test_only_the_part_of_the_index_that_a_block_needs_is_read(tmp_path: Path) -> None:
    num = 50_000
    write(tmp_path, megatron_index([100] * num), bytes(200 * num))
    source = open_path(tmp_path)
    with reads() as of_header:
        assert source.num_blocks(0) == 5
    assert num_bytes(of_header) == 34
    with reads() as of_block:
        block = source.read_block(0, 1)
    assert block.num_rows == BLOCK_BYTES // 200
    assert num_bytes(of_block) == 8 + (20 + 200) * block.num_rows


def test_empty_documents_do_not_make_a_block_of_the_whole_index(tmp_path: Path) -> None:
    write(tmp_path, megatron_index([0] * 200_000), b"")
    source = open_path(tmp_path)
    assert source.num_blocks(0) == 4
    assert source.read_block(0, 3).rows(np.array([0])) == [{"input_ids": []}]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    st.data(),
)
def test_sequences_may_lie_in_any_order_and_documents_may_have_any_number_of_them(
    lengths: list[int], dtype: str, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    bounds = [0, *cuts, len(lengths)]
    sizes = np.array(lengths)[order] * np.dtype(dtype).itemsize
    pointers = np.empty(len(lengths), dtype=np.int64)
    pointers[order] = np.cumsum(sizes) - sizes
    tokens = np.arange(sum(lengths), dtype=dtype)
    index = megatron_index(lengths, dtype=dtype, bounds=bounds, pointers=pointers.tolist())
    store = storage.Store("memory://megatron")
    store.write("x.idx", index)
    store.write("x.bin", tokens.tobytes())
    starts = (pointers // np.dtype(dtype).itemsize).tolist()
    sequences = [
        tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)
    ]
    expected = [list(itertools.chain(*sequences[a:b])) for a, b in itertools.pairwise(bounds)]
    assert documents(open_path("memory://megatron/x.idx")) == expected


LARGE = 2**62
DAMAGED = {
    "empty": (b"", rb"byte 0: ends in the header"),
    "half a header": (megatron_index([1])[:20], rb"byte 20: ends in the header"),
    "another magic": (b"TNTIDX\x00\x00" + megatron_index([1]), rb"byte 0: starts with b'TNTIDX"),
    "another version": (
        megatron_index([1])[:9] + (2).to_bytes(8, "little") + megatron_index([1])[17:],
        rb"version 2, not",
    ),
    "no such type": (
        megatron_index([1])[:17] + b"\x09" + megatron_index([1])[18:],
        rb"byte 17: 9 is no type",
    ),
    "no bounds": (megatron_index([], bounds=[]), rb"byte 18: 0 sequences and 0 bounds"),
    "cut": (megatron_index([1] * 9)[:-1], rb"byte 18: 9 sequences and 10 bounds .* take 222 bytes, not 221"),
    "counts beyond the file": (
        megatron_index([1])[:18] + LARGE.to_bytes(8, "little") * 2,
        rb"byte 18: 4611686018427387904 sequences",
    ),
    "a bound beyond the sequences": (megatron_index([1, 1], bounds=[0, 3]), rb"byte 66: sequence 3 of 2"),
    "a negative bound": (megatron_index([1, 1], bounds=[0, -1, 2]), rb"byte 66: sequence -1 of 2"),
    "bounds that go back": (megatron_index([1, 1], bounds=[0, 2, 1, 2]), rb"byte 74: sequence 1 of 2"),
    "sequences left out at the start": (megatron_index([1, 1], bounds=[1, 2]), rb"byte 58: sequence 1 of 2"),
    "sequences left out at the end": (megatron_index([1, 1], bounds=[0, 1]), rb"byte 66: sequence 1 of 2"),
    "a negative length": (megatron_index([1, -1]), rb"byte 50: sequence 1 has -2 bytes"),
    "a pointer beyond the tokens": (megatron_index([1], pointers=[5]), rb"byte 38: sequence 0 .* ends at 4"),
    "a negative pointer": (megatron_index([1], pointers=[-2]), rb"2 bytes from byte -2 on"),
    "a large pointer": (megatron_index([1], pointers=[2**63 - 1]), rb"byte 38: sequence 0 has"),
    "too few tokens": (
        megatron_index([1, 2]),
        rb"byte 50: sequence 1 has 4 bytes from byte 2 on, .* ends at 4",
    ),
    "overlaps": (megatron_index([2, 2], pointers=[0, 0]), rb"sequences 0 to 2 overlap"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_an_index_that_contradicts_itself_or_the_tokens_is_corrupt_at_a_byte(
    tmp_path: Path, kind: str
) -> None:
    index, message = DAMAGED[kind]
    source = open_path(write(tmp_path, index, b"\x01\x00\x02\x00"))
    with pytest.raises(CorruptSource, match=rf"^{tmp_path}/x\.idx: .*{message.decode()}.*again$"):
        documents(source)


@pytest.mark.parametrize("name", ["many", "several_each", "text_of_images"])
def test_flipped_bits_and_missing_bytes_give_tokens_or_an_error_that_names_file_and_byte(
    tmp_path: Path, name: str
) -> None:
    index, tokens = ((FIXTURES / f"{name}.{ending}").read_bytes() for ending in ("idx", "bin"))
    generator = np.random.default_rng(1)
    ends: set[str] = set()
    for turn in range(300):
        damaged = bytearray(index)
        damaged[generator.integers(len(index))] ^= 1 << generator.integers(8)
        cut = damaged[: generator.integers(len(index))] if turn % 5 == 0 else damaged
        rest = tokens[: generator.integers(len(tokens))] if turn % 7 == 0 else tokens
        try:
            found = documents(open_path(write(tmp_path, cut, rest)))
        except CorruptSource as error:
            assert f"{tmp_path}/x.idx: byte " in str(error)  # noqa: PT017
            ends.add("error")
        else:
            assert sum(map(len, found)) <= len(tokens)
            ends.add("tokens")
    assert ends == {"error", "tokens"}


def loader_of(path: Path, **keys: Any) -> Any:
    spec = SourceSpec(path=(str(path),), weight=1, **keys)
    return open_loader("s", Mixture(seq_len=4096, packs=1, sources={"s": spec}))


def test_documents_take_the_fast_path_and_empty_ones_are_quarantined() -> None:
    loader = loader_of(FIXTURES / "empty_documents")
    assert isinstance(loader._reader, PretokenisedReader)
    found = pieces(loader)
    assert sorted(one.tolist() for one in loader.payload(found).tokens) == sorted(
        filter(None, EXPECTED["empty_documents"])
    )
    assert sorted(failure.row_id for failure in loader.failures) == [0, 2, 3, 5]


def test_numbers_that_are_no_token_ids_are_refused_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, megatron_index([1], dtype="float32"), bytes(4))
    with pytest.raises(ColumnMissing, match=r"'input_ids' is of type large_list<item: float>"):
        loader_of(tmp_path)


def test_negative_ids_are_quarantined(tmp_path: Path) -> None:
    put_megatron(storage.Store(tmp_path), "x", [[1, 2], [3, -1]], dtype="int32")
    loader = loader_of(tmp_path)
    assert len(pieces(loader)) == 1
    assert [failure.reason for failure in loader.failures] == [f"token id that is not in [0, {2**31})"]


def test_a_file_that_lost_bytes_after_the_start_is_an_error_of_the_storage(tmp_path: Path) -> None:
    put_megatron(storage.Store(tmp_path), "x", [[1, 2]])
    source = open_path(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\x01")
    with pytest.raises(OSError, match=r"x\.bin"):
        documents(source)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.bin"):
        documents(source)


def test_nothing_is_read_of_files_that_are_not_touched(tmp_path: Path) -> None:
    store = storage.Store(tmp_path)
    for number in range(20):
        put_megatron(store, f"{number:02}", [[number]])
    source = open_path(tmp_path)
    with reads() as before:
        for file in (3, 4):
            assert documents(source, file) == [[file]]
    assert {span.attributes["path"] for span in before} == {str(tmp_path)}
    assert num_bytes(before) == 2 * (34 + 16 + 4 + 8 + 2)


def test_on_s3_a_block_is_two_requests_of_its_own_bytes(s3: S3Server) -> None:
    url, lengths = f"s3://{s3.bucket}/megatron", [1000] * 3000
    store = storage.Store(url, s3.storage_options)
    tokens = np.arange(sum(lengths)).astype(np.uint16)
    store.write("x.idx", megatron_index(lengths))
    store.write("x.bin", tokens.tobytes())
    source = open_path(f"{url}/x", storage_options=s3.storage_options)
    assert source.num_blocks(0) == 3
    with reads() as of_block:
        block = source.read_block(0, 2)
    assert len(of_block) == 2
    assert num_bytes(of_block) == 8 + (20 + 2000) * block.num_rows
    first = int(block.row_ids[0])
    table = block.table
    assert table is not None
    assert table.column(0).combine_chunks().flatten().equals(pa.array(tokens[first * 1000 :]))
