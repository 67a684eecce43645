"""MosaicML streaming datasets: the samples that the tool reads, lists of tokens as columns, and no damage unnoticed."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from omniload.errors import ColumnMissing, CorruptSource
from omniload.loader import open_loader
from omniload.mixture import Mixture, SourceSpec
from omniload.samples.pretokenised import PretokenisedReader
from omniload.sources import BadRow, Source, open_source
from omniload.sources.mds_index import BLOCK_BYTES
from storage import Span
from tests.omniload.loading import pieces
from tests.omniload.token_files import mds_entry, mds_index, mds_shard, put_mds
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mds"
EXPECTED: dict[str, list[dict[str, Any]]] = {
    row["name"]: row["samples"]
    for row in map(json.loads, (FIXTURES / "expected.jsonl").read_text().splitlines())
}
COMPRESSED = ("text_br", "text_bz2", "text_gz", "text_snappy", "text_zstd")


def open_path(path: Path | str, **keys: Any) -> Source:
    return open_source("s", SourceSpec(path=(str(path),), weight=1, **keys))


def rows(source: Source, file: int = 0, columns: list[str] | None = None) -> list[Any]:
    blocks = [source.read_block(file, block, columns) for block in range(source.num_blocks(file))]
    return [row for block in blocks for row in block.rows(np.arange(block.num_rows))]


def lists(source: Source, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All rows, by way of tables."""
    tables = [source.read_block(0, block, columns).table for block in range(source.num_blocks(0))]
    assert all(table is not None for table in tables)
    return [row for table in tables if table is not None for row in table.to_pylist()]


def plain(value: Any) -> Any:
    """A value as `make_fixtures.py` writes it."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "items": value.tolist()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        return {"image": base64.b64encode(value["bytes"]).decode()}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


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


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_samples_are_those_that_the_tool_reads(name: str) -> None:
    source = open_path(FIXTURES / name)
    found = rows(source)
    assert [plain(row) for row in found] == EXPECTED[name]
    ids = [id_ for block in range(source.num_blocks(0)) for id_ in source.row_ids(0, block).tolist()]
    assert ids == list(range(len(EXPECTED[name])))


def test_the_fixtures_have_several_shards_and_every_compression() -> None:
    for name in EXPECTED:
        shards = json.loads((FIXTURES / name / "index.json").read_text())["shards"]
        assert len(shards) > 1
        assert all((shard["zip_data"] is not None) == (name in COMPRESSED) for shard in shards)


def test_only_the_columns_asked_for_are_decoded() -> None:
    source = open_path(FIXTURES / "pickled")
    assert rows(source, columns=["text"]) == [{"text": "t0"}, {"text": "t1"}]
    with pytest.raises(
        ColumnMissing, match="column 'meta' is encoded as pkl, which could run any code; write it as"
    ):
        rows(source)
    with pytest.raises(ColumnMissing, match=r"no column 'tokens', .* it has meta, text"):
        rows(source, columns=["tokens"])


@pytest.mark.parametrize("column", ["fixed", "free", "tokens"])
def test_token_columns_are_lists_in_tables_of_the_stored_type(column: str) -> None:
    source = open_path(FIXTURES / "tokens")
    schema = source.schema(0)
    assert schema is not None
    dtype = {"fixed": "uint16", "free": "int32", "tokens": "int64"}[column]
    assert schema.field(column).type == pa.large_list(pa.from_numpy_dtype(dtype))
    expected = [
        np.frombuffer(base64.b64decode(row[column]["bytes"]), np.int64).tolist()
        if column == "tokens"
        else row[column]["items"]
        for row in EXPECTED["tokens"]
    ]
    assert [row[column] for row in lists(source, [column])] == expected
    assert lists(source, ["free", "fixed"]) == [
        {key: row[key]["items"] for key in ("fixed", "free")} for row in EXPECTED["tokens"]
    ]
    assert source.read_block(0, 0, [column, "label"]).table is None


@pytest.mark.parametrize("column", ["fixed", "free", "tokens"])
def test_token_columns_take_the_fast_path(column: str) -> None:
    spec = SourceSpec(path=(str(FIXTURES / "tokens"),), weight=1, column=column)
    loader = open_loader("s", Mixture(seq_len=4096, packs=1, sources={"s": spec}))
    assert isinstance(loader._reader, PretokenisedReader)
    found = pieces(loader)
    assert len(found) == len(EXPECTED["tokens"])
    assert not loader.failures
    expected = [row[column] for row in lists(open_path(FIXTURES / "tokens"), [column])]
    assert sorted(one.tolist() for one in loader.payload(found).tokens) == sorted(expected)


items = st.integers(1, 300)


@given(
    st.sampled_from(["uint16", "int32", "uint64"]),
    st.one_of(st.lists(items, max_size=9), st.builds(lambda size, n: [size] * n, items, st.integers(1, 9))),
    st.binary(max_size=3),
)
def test_lists_of_any_lengths_are_the_same_in_tables_and_in_rows(
    dtype: str, lengths: list[int], other: bytes
) -> None:
    """Also where all samples are equally long, which are taken together."""
    samples = []
    for length in lengths:
        array = np.arange(length, dtype=dtype)
        shape = bytes([4]) + bytes([length]) if length < 256 else bytes([5]) + struct.pack("<H", length)
        samples.append([other, shape + array.tobytes()])
    store = storage.Store("memory://mds")
    put_mds(store, "d", {"other": ("bytes", None), "input_ids": (f"ndarray:{dtype}", None)}, samples)
    source = open_path("memory://mds/d")
    assert [row["input_ids"].tolist() for row in rows(source)] == [list(range(n)) for n in lengths]
    assert [row["input_ids"] for row in lists(source, ["input_ids"])] == [list(range(n)) for n in lengths]
    assert all(row["other"] == other for row in rows(source))


@pytest.mark.parametrize("path", ["", "/", "/index.json"])
def test_an_index_at_the_top_stands_for_the_folder(path: str) -> None:
    """Though its parts have indices of their own: the samples would come twice."""
    source = open_path(f"{FIXTURES}/merged{path}")
    assert [entry.path for entry in source.files] == ["index.json"]
    assert len(rows(source)) == 18


def test_a_folder_of_splits_is_all_of_them_and_a_split_is_one() -> None:
    for path in ("{en,de}", "*", "[de][en]"):
        source = open_path(FIXTURES / "merged" / path / "index.json")
        assert [entry.path for entry in source.files] == ["de/index.json", "en/index.json"]
        assert [len(rows(source, file)) for file in (0, 1)] == [9, 9]
    assert [plain(row) for row in rows(open_path(FIXTURES / "merged" / "en"))] == EXPECTED["merged"][:9]


def test_a_folder_without_an_index_of_its_own_holds_those_below(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "merged", tmp_path / "d")
    (tmp_path / "d" / "index.json").unlink()
    source = open_path(tmp_path / "d")
    assert [entry.path for entry in source.files] == ["de/index.json", "en/index.json"]


def test_other_samples_of_the_same_sizes_change_the_fingerprint(tmp_path: Path) -> None:
    """Whatever the index is named by, and though it is the same to the bit."""
    columns: dict[str, tuple[str, int | None]] = {"text": ("str", None)}
    put_mds(storage.Store(tmp_path), "d/train", columns, [[b"one"]])
    paths = ("d", "d/train", "d/train/index.json")
    before = [open_path(tmp_path / path).fingerprint for path in paths]
    index = (tmp_path / "d/train/index.json").read_bytes()
    put_mds(storage.Store(tmp_path), "d/train", columns, [[b"two"]])
    assert (tmp_path / "d/train/index.json").read_bytes() == index
    after = [open_path(tmp_path / path).fingerprint for path in paths]
    assert len(set(before)) == len(set(after)) == 1
    assert before != after


def test_blocks_of_a_plain_shard_are_read_by_their_ranges(tmp_path: Path) -> None:
    columns: dict[str, tuple[str, int | None]] = {"text": ("str", None)}
    samples = [[bytes([65 + i]) * (BLOCK_BYTES // 4)] for i in range(10)]
    put_mds(storage.Store(tmp_path), "d", columns, samples)
    source = open_path(tmp_path / "d")
    with reads() as of_index:
        assert source.num_blocks(0) == 4
    assert num_bytes(of_index) == source.files[0].size
    with reads() as of_block:
        block = source.read_block(0, 2)
    assert num_bytes(of_block) == 4 + 4 * 4 + 3 * (4 + BLOCK_BYTES // 4)
    assert block.row_ids.tolist() == [6, 7, 8]
    assert [row["text"][0] for row in block.rows(np.arange(3)) if isinstance(row, dict)] == ["G", "H", "I"]


def test_a_compressed_shard_is_a_block() -> None:
    source = open_path(FIXTURES / "text_zstd")
    shards = json.loads((FIXTURES / "text_zstd" / "index.json").read_text())["shards"]
    sizes = [len(source.row_ids(0, block)) for block in range(source.num_blocks(0))]
    assert sizes == [shard["samples"] for shard in shards]


ENTRY = mds_entry("shard.00000.mds", {"text": ("str", None)}, 1, 100)
ZIPPED = {"basename": "x.zstd", "bytes": 9, "hashes": {}}
WRONG_INDICES = {
    "not JSON": (b"{", "EOF"),
    "no bytes": (b"", "EOF"),
    "something else": (b'{"a": 1}', "at version: Field required"),
    "version": (b'{"version": 1, "shards": []}', "at version: Input should be 2"),
    "other format": (mds_index([{**ENTRY, "format": "json"}]), "at shards.0.format: Input should be 'mds'"),
    "huge": (
        mds_index([{**ENTRY, "raw_data": {"basename": "x", "bytes": 2**60}}]),
        "at shards.0.raw_data.bytes",
    ),
    "negative": (mds_index([{**ENTRY, "samples": -1}]), "at shards.0.samples"),
    "too many samples": (mds_index([{**ENTRY, "samples": 24}]), "24 samples do not fit into 100 bytes"),
    "half a column": (mds_index([{**ENTRY, "column_sizes": []}]), "1 columns do not fit together"),
    "no column": (mds_index([mds_entry("x", {}, 1, 100)]), "at shards.0.column_names"),
    "twice the column": (
        mds_index(
            [
                {
                    **ENTRY,
                    "column_names": ["a", "a"],
                    "column_encodings": ["str"] * 2,
                    "column_sizes": [None] * 2,
                }
            ]
        ),
        "2 columns do not fit together",
    ),
    "negative size": (mds_index([{**ENTRY, "column_sizes": [-1]}]), "negative size"),
    "half compressed": (mds_index([{**ENTRY, "zip_data": ZIPPED}]), "both be given"),
    "deep": (b'{"shards": ' + b"[" * 100_000, "recursion"),
}


@pytest.mark.parametrize("kind", WRONG_INDICES)
def test_an_index_that_is_none_is_corrupt_at_a_key(tmp_path: Path, kind: str) -> None:
    data, message = WRONG_INDICES[kind]
    (tmp_path / "index.json").write_bytes(data)
    source = open_path(tmp_path)
    with pytest.raises(CorruptSource) as error:
        source.num_blocks(0)
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/index.json: ")
    assert message in text
    assert "\n" not in text


def put_shard(folder: Path, data: bytes, num_samples: int = 2, **keys: Any) -> Path:
    """A dataset of one shard of one column of text."""
    folder.mkdir(exist_ok=True)
    entry = mds_entry("shard.00000.mds", {"text": ("str", None)}, num_samples, len(data), **keys)
    (folder / "index.json").write_bytes(mds_index([entry]))
    (folder / "shard.00000.mds").write_bytes(data)
    return folder


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


GOOD = mds_shard(
    [[b"one"], [b"three"]], [None]
)  # 16 bytes of offsets, 2 of settings, samples at 18, 25 and 34


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(GOOD, 0, 3), "byte 0: 3 samples, not 2 as in the index"),
        (changed(GOOD, 4, 3), "byte 4: sample 0 cannot begin at byte 3"),
        (changed(GOOD, 8, 17), "byte 8: sample 1 cannot begin at byte 17"),
        (changed(GOOD, 12, 35), "byte 12: sample 2 cannot begin at byte 35"),
        (changed(GOOD, 12, 2**32 - 1), "byte 12: sample 2 cannot begin at byte 4294967295"),
    ],
)
def test_a_shard_that_contradicts_itself_is_corrupt_at_a_byte(
    tmp_path: Path, data: bytes, message: str
) -> None:
    assert rows(open_path(put_shard(tmp_path / "good", GOOD))) == [{"text": "one"}, {"text": "three"}]
    source = open_path(put_shard(tmp_path / "d", data))
    with pytest.raises(CorruptSource) as error:
        rows(source)
    assert str(error.value) == f"{tmp_path}/d/shard.00000.mds: {message}; copy or write the dataset again"


@pytest.mark.parametrize("size", [0, 1, 15, 33, 35])
def test_a_shard_of_another_size_is_corrupt_before_it_is_read(tmp_path: Path, size: int) -> None:
    put_shard(tmp_path, GOOD)
    (tmp_path / "shard.00000.mds").write_bytes((GOOD + b"x")[:size])
    with pytest.raises(
        CorruptSource, match=rf"shard.00000.mds: byte \d+: ends at byte {size}, not 34 as in the index"
    ):
        rows(open_path(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    put_shard(tmp_path, GOOD)
    (tmp_path / "shard.00000.mds").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard\.00000\.mds"):
        rows(open_path(tmp_path))


def test_a_shard_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "secret").write_bytes(GOOD)
    for name in ("../secret", f"{tmp_path}/secret"):
        (tmp_path / "d/index.json").write_bytes(
            mds_index([mds_entry(name, {"text": ("str", None)}, 2, len(GOOD))])
        )
        with pytest.raises(storage.UnsafePath):
            rows(open_path(tmp_path / "d"))


@pytest.mark.parametrize(
    ("encoding", "size", "value", "reason"),
    [
        ("str", None, b"\xff", "'v': 'utf-8' codec can't decode"),
        ("json", None, b"{", "'v': Expecting"),
        ("json", None, b"[" * 100_000, "'v': maximum recursion"),
        ("str_int", None, b"1x", "'v': invalid literal"),
        ("str_int", None, b"1" * 10_000, "'v': Exceeds the limit"),
        ("str_float", None, b"", "'v': could not convert"),
        ("str_decimal", None, b"x", "'v': "),
        ("int", None, b"1234567", "'v': "),
        ("uint16", None, b"1234", "'v': "),
        ("ndarray", None, b"", "'v': "),
        ("ndarray", None, b"\x07\x041", "'v': 7 is no type of arrays"),
        ("ndarray:uint16", None, b"\x04\x03aa", "'v': "),
        ("ndarray:uint16", None, b"\xffaa", "'v': "),
        ("ndarray:uint16", None, b"\x07" + b"\xff" * 8 + b"aa", "'v': "),
        ("ndarray:uint16:3", None, b"aaaa", "'v': cannot reshape"),
        ("list[jpeg]", None, b"\0\0\0\0\xff\xff\xff\xff", "'v': 8 bytes do not hold"),
        ("list[jpeg]", None, b"\0\0\0\0\x01\0\0\0\xff\xff\xff\xffx", "'v': 1 images end at byte"),
        ("jpeg_array", None, b"\x01", "'v': "),
    ],
)
def test_a_value_that_cannot_be_decoded_is_a_bad_row(
    tmp_path: Path, encoding: str, size: int | None, value: bytes, reason: str
) -> None:
    store = storage.Store(tmp_path)
    put_mds(store, "d", {"a": ("str", None), "v": (encoding, size)}, [[b"x", value]])
    source = open_path(tmp_path / "d")
    [row] = rows(source)
    assert isinstance(row, BadRow)
    assert row.reason.startswith(reason)
    assert "\n" not in row.reason
    assert rows(source, columns=["a"]) == [{"a": "x"}]


@pytest.mark.parametrize(
    "encoding",
    ["pil", "pkl", "list[pil]", "ndarray:str", "ndarray:int8:x", "ndarray:int8:-1", "int:3", "new"],
)
def test_an_encoding_that_is_not_known_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    put_mds(storage.Store(tmp_path), "d", {"v": (encoding, None)}, [[b"x"]])
    with pytest.raises(ColumnMissing, match=r"column 'v' is encoded as .*; write it as json"):
        rows(open_path(tmp_path / "d"))


def test_sizes_that_do_not_add_up_make_a_bad_row_and_spare_the_others(tmp_path: Path) -> None:
    """In tables such a row is null."""
    samples = [[bytes([4, n]) + np.arange(n, dtype=np.uint16).tobytes()] for n in (3, 1, 2)]
    data = mds_shard(samples, [None])
    at = struct.unpack_from("<I", data, 8)[0]
    entry = mds_entry("s.mds", {"input_ids": ("ndarray:uint16", None)}, 3, len(data))
    (tmp_path / "index.json").write_bytes(mds_index([entry]))
    for size in (0, 3, 5, 2**32 - 1):
        (tmp_path / "s.mds").write_bytes(changed(data, at, size))
        source = open_path(tmp_path)
        first, bad, last = rows(source)
        assert bad == BadRow(reason="the sizes of its values do not add up to its own")
        assert (first["input_ids"].tolist(), last["input_ids"].tolist()) == ([0, 1, 2], [0, 1])
        assert [row["input_ids"] for row in lists(source, ["input_ids"])] == [[0, 1, 2], None, [0, 1]]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x04",
        b"\x04\x02aa",
        b"\x04\x01a",
        b"\x08\x01\x01aa",
        b"\x00aa",
        b"\x05\x01",
        b"\x07" + b"\xff" * 10,
    ],
)
def test_an_array_that_is_no_list_is_null_in_a_table(tmp_path: Path, value: bytes) -> None:
    good = b"\x04\x01aa"
    for samples in ([value], [good, value], [value, good], [value, value]):
        put_mds(
            storage.Store(tmp_path), "d", {"input_ids": ("ndarray:uint16", None)}, [[one] for one in samples]
        )
        found = lists(open_path(tmp_path / "d"), ["input_ids"])
        assert [row["input_ids"] for row in found] == [[0x6161] if one == good else None for one in samples]


def test_a_column_that_is_encoded_otherwise_in_a_later_shard_is_refused(tmp_path: Path) -> None:
    for part, encoding in (("a", "ndarray:uint16"), ("b", "str")):
        put_mds(storage.Store(tmp_path), part, {"input_ids": (encoding, None)}, [[b"\x04\x01aa"]])
    shards = []
    for part in ("a", "b"):
        [shard] = json.loads((tmp_path / part / "index.json").read_text())["shards"]
        shards.append({**shard, "raw_data": {**shard["raw_data"], "basename": f"{part}/shard.00000.mds"}})
    (tmp_path / "index.json").write_bytes(mds_index(shards))
    source = open_path(tmp_path)
    assert lists_of_first(source) == [{"input_ids": [0x6161]}]
    with pytest.raises(
        ColumnMissing, match=r"b/shard.00000.mds: column 'input_ids' is encoded as str, unlike ndarray"
    ):
        source.read_block(0, 1, ["input_ids"])


def lists_of_first(source: Source) -> list[dict[str, Any]]:
    table = source.read_block(0, 0, ["input_ids"]).table
    assert table is not None
    return list(table.to_pylist())


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("hashes", [True, False])
def test_a_damaged_compressed_shard_is_corrupt(tmp_path: Path, name: str, hashes: bool) -> None:
    """With digests whatever the damage is; without them the stream has to be broken, or its size to differ."""
    shutil.copytree(FIXTURES / name, tmp_path / "d")
    index = json.loads((tmp_path / "d/index.json").read_text())
    shard = index["shards"][0]
    if not hashes:
        shard["zip_data"]["hashes"] = {}
    (tmp_path / "d/index.json").write_text(json.dumps(index))
    path = tmp_path / "d" / shard["zip_data"]["basename"]
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    ends = set()
    for _ in range(60):
        damaged = bytearray(data)
        damaged[generator.integers(len(data))] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            found = rows(open_path(tmp_path / "d"))
        except CorruptSource as error:
            assert str(path) in str(error)  # noqa: PT017
            ends.add("error")
        else:
            assert len(found) == len(EXPECTED[name])
            ends.add("rows")
    assert ends == {"error"} if hashes else "error" in ends


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("wrong_by", [-1, 1, 2**31])
def test_a_compressed_shard_of_another_size_than_the_index_says_is_corrupt(
    tmp_path: Path, name: str, wrong_by: int
) -> None:
    shutil.copytree(FIXTURES / name, tmp_path / "d")
    index = json.loads((tmp_path / "d/index.json").read_text())
    index["shards"][0]["raw_data"]["bytes"] += wrong_by
    (tmp_path / "d/index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptSource, match=r"shard.00000.mds.\w+: .* again$"):
        rows(open_path(tmp_path / "d"))


@pytest.mark.parametrize("compression", ["lzma", "zst", "", ":"])
def test_an_unknown_compression_is_named(tmp_path: Path, compression: str) -> None:
    zipped = {"basename": "shard.00000.mds", "bytes": len(GOOD), "hashes": {"a_new_one": "0"}}
    put_shard(tmp_path, GOOD, compression=compression, zip_data=zipped)
    with pytest.raises(CorruptSource, match=f"cannot be decompressed by {compression} .an unknown algorithm"):
        rows(open_path(tmp_path))


@pytest.mark.parametrize("name", ["every_type", "text", "tokens"])
def test_flipped_bits_give_rows_bad_rows_or_an_error_that_names_file_and_byte(
    tmp_path: Path, name: str
) -> None:
    shutil.copytree(FIXTURES / name, tmp_path / "d")
    path = tmp_path / "d/shard.00000.mds"
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    ends: set[str] = set()
    for turn in range(200):
        damaged = bytearray(data)
        at = generator.integers(400 if turn % 2 else len(data))
        damaged[at] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        source = open_path(tmp_path / "d")
        try:
            found = rows(source)
            if name == "tokens":
                lists(source, ["free", "fixed", "tokens"])
        except CorruptSource as error:
            assert f"{path}: byte " in str(error)  # noqa: PT017
            ends.add("error")
        else:
            assert len(found) == len(EXPECTED[name])
            ends.update("bad" if isinstance(row, BadRow) else "row" for row in found)
    assert ends == {"error", "bad", "row"}


def test_flipped_bits_in_an_index_give_rows_or_an_error_of_one_line(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "text_zstd", tmp_path / "d")
    path = tmp_path / "d/index.json"
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    ends: set[str] = set()
    for _ in range(300):
        damaged = bytearray(data)
        damaged[generator.integers(len(data))] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            rows(open_path(tmp_path / "d"))
        except (CorruptSource, ColumnMissing, storage.NotFound, storage.UnsafePath) as error:
            assert str(tmp_path / "d") in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            ends.add("error")
        else:
            ends.add("rows")
    assert ends == {"error", "rows"}


@pytest.mark.parametrize("name", ["text_zstd", "tokens"])
def test_on_s3_the_same_samples_are_read(s3: S3Server, name: str) -> None:
    url = f"s3://{s3.bucket}/mds/{name}"
    store = storage.Store(url, s3.storage_options)
    for path in (FIXTURES / name).iterdir():
        store.write(path.name, path.read_bytes())
    source = open_path(url, storage_options=s3.storage_options)
    assert [plain(row) for row in rows(source)] == EXPECTED[name]


def test_on_s3_a_block_is_read_by_its_ranges(s3: S3Server) -> None:
    url = f"s3://{s3.bucket}/mds-ranges"
    samples = [[bytes([65 + i % 26]) * 10_000] for i in range(1000)]
    put_mds(storage.Store(url, s3.storage_options), "d", {"text": ("str", None)}, samples, shard_samples=1000)
    source = open_path(f"{url}/d", storage_options=s3.storage_options)
    assert source.num_blocks(0) == 5
    with reads() as of_block:
        block = source.read_block(0, 4)
    assert len(of_block) == 2
    assert num_bytes(of_block) == 4 + 4 * (block.num_rows + 1) + block.num_rows * 10_004
    expected = [{"text": samples[id_][0].decode()} for id_ in block.row_ids.tolist()]
    assert block.rows(np.arange(block.num_rows)) == expected


def test_an_array_of_another_length_than_the_encoding_says_is_null_in_a_table(tmp_path: Path) -> None:
    samples = [[b"aabb"], [b"aa"], [b"aab"]]
    put_mds(storage.Store(tmp_path), "d", {"input_ids": ("ndarray:uint16:2", None)}, samples)
    source = open_path(tmp_path / "d")
    assert [row["input_ids"] for row in lists(source, ["input_ids"])] == [[0x6161, 0x6262], None, None]
    assert [isinstance(row, BadRow) for row in rows(source)] == [False, True, True]
