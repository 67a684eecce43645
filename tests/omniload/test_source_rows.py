"""A range of rows and a choice of columns are sources like any other: the rows asked for, under their addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import DataLoader
from omniload.errors import ColumnMissing, MixtureError
from omniload.mixture import Mixture
from omniload.sources import InMemorySource, Source, open_source
from omniload.sources.columns import SomeColumns
from omniload.sources.rows import SomeRows
from tests.omniload.mixtures import on_both_runtimes_with, write_parquet


def all_rows(source: Source) -> list[tuple[str, int, Any]]:
    """(path, row id, content) of every row, read in each way there is."""
    found = []
    for file, entry in enumerate(source.files):
        for number in range(source.num_blocks(file)):
            block = source.read_block(file, number)
            assert block.row_ids.tolist() == source.row_ids(file, number).tolist()
            assert block.num_rows == len(block.row_ids) > 0
            assert block.num_bytes > 0
            contents = block.rows(np.arange(block.num_rows))
            assert block.rows(np.array([block.num_rows - 1])) == contents[-1:]
            if block.table is not None:
                assert block.table.to_pylist() == contents
            found += [(entry.path, *row) for row in zip(block.row_ids.tolist(), contents, strict=True)]
    return found


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    st.integers(1, 5),
    st.integers(0, 50),
    st.none() | st.integers(1, 50),
)
def test_a_range_holds_its_rows_and_no_others(
    sizes: list[int], block_rows: int, start: int, stop: int | None
) -> None:
    files = {f"{i}": [{"x": 100 * i + j} for j in range(size)] for i, size in enumerate(sizes)}
    whole = InMemorySource(files, block_rows=block_rows)
    stop = None if stop is None else start + stop
    expected = all_rows(whole)[start:stop]
    if not expected:
        with pytest.raises(MixtureError, match=f"it has no row {start} or later; lower rows.start"):
            SomeRows(whole, start, stop)
        return
    some = SomeRows(whole, start, stop)
    assert all_rows(some) == expected
    assert some.schema(0) == whole.schema(whole.files.index(some.files[0]))
    assert some.fingerprint != whole.fingerprint


def test_what_lies_after_the_range_is_not_opened() -> None:
    class Counting(InMemorySource):
        touched: set[int] = set()  # noqa: RUF012

        def num_blocks(self, file: int) -> int:
            self.touched.add(file)
            return super().num_blocks(file)

    source = Counting({f"{i:02}": [{"x": 1}] * 10 for i in range(20)}, block_rows=4)
    assert len(SomeRows(source, 5, 25).files) == 3
    assert source.touched == {0, 1, 2}


@on_both_runtimes_with("format_", ["parquet", "jsonl"], on_ray=["parquet"])
@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_a_mixture_reads_only_the_rows_asked_for(
    execution: str, tmp_path: Path, format_: str, shuffle: str
) -> None:
    for file in range(3):
        rows = [[100 * file + row + 1] * 4 for row in range(30)]
        if format_ == "parquet":
            write_parquet(tmp_path / f"{file}.parquet", rows)
        else:
            (tmp_path / f"{file}.jsonl").write_text(
                "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
            )
    source = {"path": str(tmp_path / f"*.{format_}"), "weight": 1, "rows": {"start": 10, "stop": 70}}
    mixture = {"seq_len": 8, "packs": 1, "shuffle": shuffle, "sources": {"a": source}}
    with DataLoader(mixture) as loader:
        seen = [lane["input_ids"][lane["segment_ids"] > 0].tolist() for lane in loader]
        ledger = loader.ledger().sources["a"]
        state = loader.state_dict()
    tokens = sorted(token for lane in seen for token in lane)
    assert tokens == sorted(4 * [100 * file + row + 1 for file in range(3) for row in range(30)][10:70])
    assert ledger.rows == 60
    other = {**source, "rows": {"start": 10, "stop": 71}}
    with (
        DataLoader({**mixture, "sources": {"a": other}}) as loader,
        pytest.raises(ValueError, match="defined diff"),
    ):
        loader.load_state_dict(state)


def test_only_the_columns_asked_for_are_read() -> None:
    class Noting(InMemorySource):
        def read_block(self, file: int, block: int, columns: Any = None) -> Any:
            asked.append(None if columns is None else list(columns))
            return super().read_block(file, block, columns)

    asked: list[list[str] | None] = []
    whole = Noting({"f": [{"x": i, "y": -i, "z": "wide" * 100} for i in range(5)]}, block_rows=2)
    some = SomeColumns(whole, ["y", "x", "y"])
    assert [row for _, _, row in all_rows(some)] == [{"y": -i, "x": i} for i in range(5)]
    assert asked == [["y", "x"]] * 3
    assert some.schema(0).names == ["x", "y"]  # type: ignore[union-attr]
    assert some.read_block(0, 0, ["x"]).rows(np.array([1])) == [{"x": 1}]
    assert some.fingerprint != whole.fingerprint
    with pytest.raises(ColumnMissing, match=r"memory:f: no column 'w'; it has x, y, z; correct read_columns"):
        SomeColumns(whole, ["x", "w"])


def test_lines_are_reduced_to_the_columns_asked_for(tmp_path: Path) -> None:
    rows = [{"x": 1, "y": 2}] * 100 + [{"late": 1, "y": 2}]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "oops\n")
    spec = {
        "path": str(tmp_path / "f.jsonl"),
        "weight": 1,
        "read_columns": ["x", "late"],
        "rows": {"start": 99},
    }
    mixture = Mixture.load({"seq_len": 8, "packs": 1, "sources": {"a": spec}})
    source = open_source("a", mixture.sources["a"])
    assert [row for _, _, row in all_rows(source)][:2] == [{"x": 1}, {"late": 1}]
    assert len(all_rows(source)) == 3
