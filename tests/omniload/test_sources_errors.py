"""Each thing that can be wrong with a source is one clear line naming what, where and how to mend it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from omniload.errors import ColumnMissing, CorruptSource, MixtureError, SourceNotFound
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture, SourceSpec
from omniload.sources import open_source
from tests.omniload.loading import byte_tokenizer, pieces


def loader(path: Path | str, **keys: object) -> SourceLoader:
    mixture = Mixture(
        seq_len=4096,
        packs=1,
        sources={"code": SourceSpec(path=(str(path),), weight=1, **keys)},  # type: ignore[arg-type]
    )
    return open_loader("code", mixture, tokenizer=byte_tokenizer())


def one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    """The message is one line that contains all parts."""
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_a_path_that_matches_nothing_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "code.parquet").touch()
    with pytest.raises(SourceNotFound) as error:
        loader(tmp_path / "data" / "cod.parquet")
    one_line(error, "'code'", "cod.parquet", "nearest: code.parquet")
    with pytest.raises(SourceNotFound) as error:
        loader(tmp_path / "dta" / "*.parquet")
    one_line(error, f"{tmp_path} holds", "nearest: data/")


def test_a_format_that_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_text('{"text": "a"}\n')
    with pytest.raises(MixtureError) as error:
        loader(tmp_path / "x.dat")
    one_line(error, "'code'", "x.dat", "set format: to one of")
    assert len(pieces(loader(tmp_path / "x.dat", format="jsonl"))) == 1


def test_two_formats_in_one_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "x.parquet").touch()
    with pytest.raises(MixtureError) as error:
        loader(tmp_path / "*")
    one_line(error, "x.jsonl", "x.parquet", "make each a source of its own")


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_missing_column_lists_those_that_exist(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    else:
        path.write_text('{"body": "a", "id": 1}\n')
    with pytest.raises(ColumnMissing) as error:
        loader(path)
    one_line(error, str(path), "input_ids, messages, text", "body, id", "column:")
    with pytest.raises(ColumnMissing) as error:
        loader(path, column="content")
    one_line(error, "'content'", "body, id")
    assert len(pieces(loader(path, column="body"))) == 1


def test_a_column_of_a_type_that_holds_no_sample_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(ColumnMissing) as error:
        loader(tmp_path / "x.parquet")
    one_line(error, "'text'", "int64")


def test_a_later_file_without_the_column_is_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(ColumnMissing) as error:
        pieces(loader(tmp_path / "*.parquet"))
    one_line(error, "b.parquet", "unlike the source's first file")


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "x.jsonl", tmp_path / "x.parquet"):
        (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "x.parquet")
        mixture = Mixture(seq_len=4096, packs=1, sources={"code": SourceSpec(path=(str(path),), weight=1)})
        with pytest.raises(MixtureError) as error:
            open_loader("code", mixture)
        one_line(error, "'code'", "tokenizer:")


def write(path: Path) -> bytes:
    """A file of the format that its name says; gives its bytes."""
    rows = [{"text": f"row {i} " * 4} for i in range(100)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=25, compression="snappy")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines))
    else:
        path.write_bytes(lines)
    return path.read_bytes()


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.gz", ".jsonl.zst"])
def test_a_truncated_file_is_corrupt(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    data = write(path)
    kept = [data[:size] for size in (0, 1, len(data) // 2, len(data) - 9, len(data) - 1)]
    for part in [*kept, bytes(len(data))]:  # also a file that was allocated but never written
        path.write_bytes(part)
        with pytest.raises(CorruptSource) as error:
            pieces(loader(path))
        one_line(error, str(path), "again")


def test_a_plain_file_cut_in_a_line_loses_only_that_line(tmp_path: Path) -> None:
    data = write(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(data[:-5])
    one = loader(tmp_path / "x.jsonl")
    assert len(pieces(one)) == 99
    [failure] = one.failures
    assert failure.source == "code"
    assert failure.path == str(tmp_path / "x.jsonl")
    assert failure.row_id == data.rindex(b"\n", 0, -1) + 1
    assert failure.reason.startswith("not JSON")


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_flipped_bits_end_in_quarantine_or_an_error_that_names_the_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    data = write(path)
    generator = np.random.default_rng(1)
    ends: set[str] = set()
    for _ in range(120):
        flipped = bytearray(data)
        flipped[generator.integers(len(data))] ^= 1 << generator.integers(8)
        path.write_bytes(flipped)
        try:
            one = loader(path)
            pieces(one)
        except (CorruptSource, ColumnMissing) as error:
            assert str(path) in str(error)  # noqa: PT017
            ends.add("error")
        else:
            ends.add("quarantine" if one.failures else "same or other text")
    assert ("quarantine" if ending == ".jsonl" else "error") in ends


def test_an_error_of_the_storage_is_not_quarantined(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet")
    one = loader(tmp_path / "x.parquet")
    one.close()
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        pieces(one)
    write(tmp_path / "x.jsonl")
    source = open_source("code", SourceSpec(path=(str(tmp_path / "x.jsonl"),), weight=1))
    (tmp_path / "x.jsonl").write_bytes(b"{}")
    with pytest.raises(OSError, match=r"x\.jsonl"):
        source.read_block(0, 0)
