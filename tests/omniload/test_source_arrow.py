"""Arrow IPC files and streams, and the folders that Hugging Face datasets saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import storage
from omniload.errors import ColumnMissing, CorruptSource, MixtureError, SourceNotFound
from omniload.loader import SourceLoader
from omniload.mixture import SourceSpec
from omniload.sources import BadRow
from omniload.sources.arrow_file import BLOCK_BYTES
from tests.omniload.loading import pieces, tokens
from tests.omniload.reading import all_rows, num_bytes, open_path, reads
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "arrow"
EXPECTED: dict[str, list[dict[str, Any]]] = {}
for _line in (FIXTURES / "expected.jsonl").read_text().splitlines():
    _one = json.loads(_line)
    EXPECTED.setdefault(_one["file"], []).append(_one["row"])

WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def plain(rows: list[Any]) -> Any:
    """As in ``expected.jsonl``: bytes as hexadecimal digits."""
    return json.loads(json.dumps(rows, default=bytes.hex))


def write(
    path: Path,
    batches: list[pa.RecordBatch],
    kind: str = "file",
    compression: str | None = None,
    **options: Any,
) -> Path:
    options = {"compression": compression, **options}
    with WRITERS[kind](str(path), batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def numbers(count: int, first: int = 0) -> pa.RecordBatch:
    """Lists of 1,000 numbers each: 4 KB a row."""
    flat = np.arange(first * 1000, (first + count) * 1000, dtype=np.int32)
    lists = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * 1000, flat)
    return pa.record_batch({"input_ids": lists, "other": lists})


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_tools_wrote_is_read_as_they_read_it(name: str) -> None:
    rows = all_rows(open_path(FIXTURES / name))
    assert plain(rows) == EXPECTED[name]


def test_caches_beside_a_saved_dataset_are_not_its_rows() -> None:
    assert list((FIXTURES / "saved_one").glob("cache-*.arrow")), "there must be one"
    [file] = open_path(FIXTURES / "saved_one").files
    assert file.path == "data-00000-of-00001.arrow"


def test_a_glob_takes_what_it_matches_also_in_a_saved_dataset() -> None:
    assert len(open_path(FIXTURES / "saved_one" / "*.arrow").files) == 2


def test_a_folder_of_saved_datasets_is_all_of_their_files(tmp_path: Path) -> None:
    for name in ("saved", "saved_one"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    assert plain(all_rows(open_path(tmp_path))) == EXPECTED["saved"] + EXPECTED["saved_one"]


def test_a_folder_of_splits_names_them() -> None:
    with pytest.raises(
        MixtureError, match=r"'s': .*splits holds several splits \(test, train\).*splits/test$"
    ):
        open_path(FIXTURES / "splits")


def test_a_saved_selection_of_rows_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "saved_one", tmp_path / "x")
    state = json.loads((tmp_path / "x" / "state.json").read_text())
    (tmp_path / "x" / "state.json").write_text(
        json.dumps({**state, "_indices_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(MixtureError, match=r"'s': .*state\.json.*flatten_indices"):
        open_path(tmp_path / "x")


def test_a_saved_dataset_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "saved", tmp_path / "x")
    (tmp_path / "x" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(SourceNotFound, match=r"x/data-00001-of-00003\.arrow is not there"):
        open_path(tmp_path / "x")


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": [1]}', '{"_data_files": 1}', "\ud800"])
def test_a_state_that_lists_no_files_is_corrupt(tmp_path: Path, state: str) -> None:
    shutil.copytree(FIXTURES / "saved_one", tmp_path / "x")
    (tmp_path / "x" / "state.json").write_bytes(state.encode(errors="surrogatepass"))
    with pytest.raises(CorruptSource, match=r"x/state\.json"):
        open_path(tmp_path / "x")


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_tiny_batches_come_together_and_huge_ones_stay(
    tmp_path: Path, kind: str, compression: str | None
) -> None:
    sizes = [*[1] * 400, 1000, *[1] * 400]
    batches = [numbers(size, first) for first, size in enumerate(sizes)]
    source = open_path(write(tmp_path / "x.arrow", batches, kind, compression))
    blocks = [source.read_block(0, block) for block in range(source.num_blocks(0))]
    assert sum((block.row_ids >> 32).tolist().count(400) == 1000 for block in blocks) == 1, "it is not cut"
    assert 3 <= len(blocks) <= 2 + source.files[0].size // BLOCK_BYTES
    assert [row["input_ids"][0] for row in all_rows(source)] == [  # type: ignore[index]
        1000 * (first + i) for first, size in enumerate(sizes) for i in range(size)
    ]


def test_a_row_id_finds_the_row_in_its_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", [numbers(3), numbers(2, 3), numbers(4, 5)])
    source = open_path(path)
    ids = source.row_ids(0, 0)
    assert ids.tolist() == [0, 1, 2, 1 << 32, (1 << 32) + 1, *((2 << 32) + i for i in range(4))]
    reader = pa.ipc.open_file(path)
    found = [reader.get_batch(i >> 32).slice(i & 0xFFFFFFFF, 1).to_pylist()[0] for i in ids.tolist()]
    assert found == all_rows(source)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_with_no_batch_has_no_block(tmp_path: Path, kind: str) -> None:
    source = open_path(write(tmp_path / "x.arrow", [numbers(1)][:0] or [numbers(0)], kind))
    assert all_rows(source) == []
    with WRITERS[kind](str(tmp_path / "y.arrow"), numbers(1).schema):
        pass
    source = open_path(tmp_path / "y.arrow")
    assert source.num_blocks(0) == 0
    assert source.schema(0) == numbers(1).schema


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_only_the_columns_asked_for_are_kept(tmp_path: Path, kind: str, compression: str | None) -> None:
    lists = numbers(300)["input_ids"]
    columns = {"a": lists, "b": lists, "c": pa.array(["x"] * 300).dictionary_encode(), "d": lists}
    source = open_path(write(tmp_path / "x.arrow", [pa.record_batch(columns)], kind, compression))
    before = pa.total_allocated_bytes()
    block = source.read_block(0, 0, ["d"])
    assert block.table is not None
    assert block.table.column_names == ["d"]
    assert (
        block.num_bytes <= pa.total_allocated_bytes() - before + block.row_ids.nbytes < 1.1 * block.num_bytes
    )
    assert all_rows(source, ["c", "a"])[7] == {"c": "x", "a": list(range(7000, 8000))}
    with pytest.raises(ColumnMissing, match=r"x\.arrow: no column 'e'.*it has a, b, c, d"):
        source.read_block(0, 0, ["e"])


def test_uncompressed_columns_are_views_of_what_was_read(tmp_path: Path) -> None:
    source = open_path(write(tmp_path / "x.arrow", [numbers(300)]))
    before = pa.total_allocated_bytes()
    block = source.read_block(0, 0)
    assert pa.total_allocated_bytes() - before < source.files[0].size
    assert block.table is not None


def test_stored_ids_are_loaded_without_being_copied_row_by_row(tmp_path: Path) -> None:
    """Their type is the stored one, so they took the way of columns."""
    lists = pa.array([[1, 2, 300], [4], list(range(20))], pa.list_(pa.uint16()))
    source = open_path(write(tmp_path / "x.arrow", [pa.record_batch({"input_ids": lists})], "stream"))
    loader = SourceLoader(
        source, SourceSpec(path=("x",), weight=1), name="s", seed=1, seq_len=8, shuffle="none"
    )
    found = pieces(loader)
    assert tokens(loader, found)[:2] == [[1, 2, 300], [4]]
    assert loader.payload(found).tokens[0].dtype == np.uint16


@pytest.mark.parametrize("deltas", [False, True])
def test_dictionaries_that_change_along_a_stream_hold_from_there(tmp_path: Path, deltas: bool) -> None:
    values = [["a", "b"], ["b", "a"], ["a", "b", "c"], ["a", "b", "c", "d"] if deltas else ["x"], ["e"]]
    batches = [pa.record_batch({"c": pa.array(one).dictionary_encode()}) for one in values]
    filler = numbers(400)["input_ids"]
    wide = [  # each in a block of its own
        pa.record_batch(
            {"c": pa.array(one * 200)[:400].dictionary_encode(), "f": filler[: min(400, 200 * len(one))]}
        )
        for one in values
    ]
    for number, written in enumerate((batches, wide)):
        path = write(tmp_path / f"{number}.arrow", written, "stream", emit_dictionary_deltas=deltas)
        source = open_path(path)
        expected = [row for batch in written for row in batch.to_pylist()]
        assert all_rows(source) == expected
        if source.num_blocks(0) > 1:
            last = source.num_blocks(0) - 1
            again = open_path(path).read_block(0, last)
            assert again.rows(np.arange(again.num_rows)) == expected[-again.num_rows :], (
                "without those before"
            )
    assert source.num_blocks(0) > 1


def test_dictionaries_of_a_file_hold_for_all_of_it(tmp_path: Path) -> None:
    values = [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    batches = [pa.record_batch({"c": pa.array(one).dictionary_encode()}) for one in values]
    source = open_path(write(tmp_path / "x.arrow", batches, emit_dictionary_deltas=True))
    assert all_rows(source) == [{"c": value} for one in values for value in one]


def test_a_stream_may_lack_its_end_mark_and_have_old_prefixes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", [numbers(2), numbers(2, 2)], "stream")
    expected = all_rows(open_path(path))
    path.write_bytes(path.read_bytes()[:-8])
    assert all_rows(open_path(path)) == expected
    write(path, [numbers(2), numbers(2, 2)], "stream", use_legacy_format=True)
    assert all_rows(open_path(path)) == expected


def test_a_row_of_text_that_is_not_utf8_is_bad_alone(tmp_path: Path) -> None:
    text = pa.array([b"fine", b"\xff\xfe", b"too"]).view(pa.string())
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], text)
    struct = pa.StructArray.from_arrays([text], names=["a"])
    pairs = pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["a"] * 3), text)
    coded = pa.DictionaryArray.from_arrays([0, 1, 2], text)
    seen = text.view(pa.binary()).cast(pa.binary_view()).view(pa.string_view())
    for column in (text, nested, struct, pairs, coded, seen):
        source = open_path(write(tmp_path / "x.arrow", [pa.record_batch({"text": column})]))
        first, bad, last = all_rows(source)
        assert isinstance(bad, BadRow)
        assert "UTF-8" in bad.reason
        assert str(first) == str(last).replace("too", "fine")


def test_columns_of_any_type_are_read(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array(["x", "y"]), pa.array([1, 2])])
    columns: dict[str, Any] = {
        "union": union,
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["q"])),
        "view": pa.array([[1, 2], None], pa.list_view(pa.int8())),
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        "null": pa.nulls(2),
        "bool": [True, None],
        "decimal": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
        "day": pa.array([1, 2], pa.date32()),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
        ),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", "[]"])),
    }
    batch = pa.record_batch(columns)
    for kind in WRITERS:
        assert all_rows(open_path(write(tmp_path / "x.arrow", [batch] * 3, kind))) == batch.to_pylist() * 3


def test_a_saved_dataset_on_a_remote_store_is_one_too() -> None:
    store = storage.Store("memory://saved-dataset")
    for path in (FIXTURES / "saved_one").iterdir():
        store.write(f"x/{path.name}", path.read_bytes())
    try:
        assert plain(all_rows(open_path("memory://saved-dataset/x/"))) == EXPECTED["saved_one"]
    finally:
        store.delete_tree("x")


def test_start_and_schema_read_neither_index_nor_rows(tmp_path: Path) -> None:
    for i in range(50):
        write(tmp_path / f"{i}.arrow", [numbers(300)], "stream" if i % 2 else "file")
    source = open_path(tmp_path)
    with reads() as spans:
        source.schema(0)
    assert 0 < num_bytes(spans) <= 64 << 10
    with reads() as spans:
        assert source.num_blocks(1) == 1
    assert 0 < num_bytes(spans) <= 200 << 10 < source.files[1].size // 10


@pytest.mark.parametrize(
    "name", ["feather-lz4.feather", "feather-zstd.feather", "stream-zstd.arrow", "saved"]
)
def test_a_truncated_file_is_corrupt(tmp_path: Path, name: str) -> None:
    """Or a stream whose last batches are gone, which the format allows."""
    path = FIXTURES / name
    data = (path if path.is_file() else next(path.glob("*.arrow"))).read_bytes()
    whole = all_rows(open_path(_file(tmp_path, data)))
    refused = 0
    for size in {0, 1, 7, 8, 9, 20, len(data) - 1, *range(0, len(data), 97)}:
        try:
            found = all_rows(open_path(_file(tmp_path, data[:size])))
        except CorruptSource as error:
            assert f"{tmp_path}/x.arrow" in str(error)  # noqa: PT017
            assert "at byte" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert found == whole[: len(found)]
    assert refused > 20


def test_damaged_bytes_end_in_quarantine_rows_or_an_error_with_path_and_offset(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    names = [name for name in EXPECTED if (FIXTURES / name).is_file()]
    refused = 0
    for i in range(400):
        data = bytearray((FIXTURES / names[i % len(names)]).read_bytes())
        if i % 3:
            data[generator.integers(len(data))] ^= 1 << generator.integers(8)
        else:  # the numbers that bounds checks miss
            at = int(generator.integers(len(data) // 4 - 1)) * 4
            data[at : at + 4] = [b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\0\0\1\0"][
                i // 3 % 4
            ]
        path = _file(tmp_path, data)
        try:
            source = open_path(path)
            all_rows(source, None if i % 2 else source.schema(0).names[:1])  # type: ignore[union-attr]
        except CorruptSource as error:
            assert f"{path}" in str(error)  # noqa: PT017
            assert "at byte" in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert 50 < refused < 400


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_claim_of_terabytes_is_refused_before_memory_is_asked_for(tmp_path: Path, compression: str) -> None:
    batch = pa.record_batch({"a": np.zeros(10_000, dtype=np.int64)})
    data = write(tmp_path / "x.arrow", [batch], "stream", compression).read_bytes()
    size = (80_000).to_bytes(8, "little")
    assert data.count(size) >= 1
    before = data.index(b"\x04\x22\x4d\x18" if compression == "lz4" else b"\x28\xb5\x2f\xfd") - 8
    claimed = data[:before] + (1 << 43).to_bytes(8, "little") + data[before + 8 :]
    with pytest.raises(CorruptSource, match=f"claims {1 << 43} bytes"):
        all_rows(open_path(_file(tmp_path, claimed)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut short"),
        (b"FEA1" + bytes(100), "version 1"),
        (b"PAR1" + bytes(100), "header of"),
        (bytes(100), "no schema"),
        (b"ARROW1\0\0" + bytes(100), "no footer"),
        (b"\xff" * 100, "header of"),
    ],
)
def test_what_is_no_arrow_says_so(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(CorruptSource, match=rf"x\.arrow: cannot be read as Arrow, at byte \d+: .*{reason}"):
        open_path(_file(tmp_path, data)).schema(0)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(CorruptSource, match="two columns 'a'"):
        open_path(write(tmp_path / "x.arrow", [batch])).schema(0)


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", [numbers(300)])
    source = open_path(path)
    source.num_blocks(0)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(storage.Corrupt, match=r"x\.arrow"):
        source.read_block(0, 0)


@pytest.mark.parametrize("kind", WRITERS)
def test_an_error_of_the_storage_is_not_called_corruption(tmp_path: Path, kind: str) -> None:
    source = open_path(write(tmp_path / "x.arrow", [numbers(300)], kind))
    (tmp_path / "x.arrow").unlink()
    for call in (lambda: source.schema(0), lambda: source.num_blocks(0), lambda: source.read_block(0, 0)):
        with pytest.raises(FileNotFoundError, match=r"x\.arrow"):
            call()


@pytest.mark.parametrize("kind", WRITERS)
def test_on_s3_a_block_is_read_by_ranges(s3: S3Server, tmp_path: Path, kind: str) -> None:
    batches = [numbers(300, 300 * i) for i in range(8)]
    data = write(tmp_path / "x.arrow", batches, kind).read_bytes()
    store = storage.Store(f"s3://{s3.bucket}/arrow-{kind}", s3.storage_options)
    store.write("x.arrow", data)
    source = open_path(store.url, storage_options=s3.storage_options)
    with reads() as spans:
        assert source.num_blocks(0) == 8
    assert num_bytes(spans) < 300 << 10
    with reads() as spans:
        block = source.read_block(0, 5, ["input_ids"])
    assert num_bytes(spans) < 3 << 20 < len(data) // 5
    assert block.rows(np.array([7])) == [{"input_ids": list(range(1507000, 1508000))}]


def _file(folder: Path, data: bytes | bytearray) -> Path:
    (folder / "x.arrow").write_bytes(data)
    return folder / "x.arrow"
