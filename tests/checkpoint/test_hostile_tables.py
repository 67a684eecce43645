"""What decoding a table takes is known before: never less than it does, and honest tables are never refused."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import FormatError
from checkpoint.format.pages import decoded_bytes
from checkpoint.format.tables import SCHEMAS, decode_table, encode_table

_ENCODINGS = ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 3) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=9), max_size=60),
    st.sampled_from([1, 7, 1000]),
    st.sampled_from(["none", "zstd", "snappy"]),
    st.sampled_from(["1.0", "2.0"]),
    st.none() | st.sampled_from(_ENCODINGS),
    st.booleans(),
)
def test_the_bound_holds_for_whatever_a_writer_may_choose(
    rows: list[list[int]],
    group_rows: int,
    compression: str,
    page_version: str,
    encoding: str | None,
    small: bool,
) -> None:
    values = [sum(row) % 1000 for row in rows]
    table = pa.table(
        {
            "numbers": pa.array(values, pa.int64()),
            "lists": pa.array(rows, pa.list_(pa.int64())),
            "text": pa.array([str(value % 5) * 20 for value in values], pa.string()),
        }
    )
    encodings = {"numbers": encoding, "lists.list.element": encoding} if encoding else None
    data = parquet(
        table,
        row_group_size=group_rows,
        compression=compression,
        data_page_version=page_version,
        column_encoding=encodings,
        use_dictionary=["text"] if encoding else True,
        data_page_size=64 if small else None,
    )
    file = pq.ParquetFile(io.BytesIO(data), read_dictionary=["text"])
    decoded = file.read()
    for names in ({"numbers"}, {"lists"}, {"text"}, {"numbers", "lists", "text"}):
        held = sum(chunk.nbytes for name in names for chunk in decoded.column(name).chunks)
        # Offsets and bitmaps of empty columns are not worth counting.
        assert decoded_bytes(data, file.metadata, names) + 64 * (file.num_row_groups + 1) >= held
    each = [
        decoded_bytes(data, file.metadata, {"lists"}, row_groups=[one]) for one in range(file.num_row_groups)
    ]
    assert sum(each) == decoded_bytes(data, file.metadata, {"lists"})


def test_ranks_that_are_all_alike_are_no_bomb() -> None:
    """Twenty thousand ranks with the same generators of random numbers, of which one reads its own."""
    num_ranks, value = 20_000, '{"python": "' + "7" * 14_000 + '"}'
    columns = {"rank": range(num_ranks), "key": ["rng"] * num_ranks, "value": [value] * num_ranks}
    data = encode_table("rank_objects.parquet", columns)
    assert 500 * len(data) < num_ranks * len(value), "spelled out it would be too much"
    table = decode_table("rank_objects.parquet", data, "here", rank=12_345)
    assert table.to_pylist() == [{"rank": 12_345, "key": "rng", "value": value}]
    with pytest.raises(FormatError, match="more than any honest table"):
        decode_table("rank_objects.parquet", data, "here")


def test_tables_changed_anywhere_are_decoded_or_refused() -> None:
    """Bytes that nobody has checked against a digest: nothing but a table or one line comes of it."""
    dice = random.Random(11)
    columns = {
        "tensor_id": [0, 0, 1],
        "offsets": [[0, 0], [4, 0], [0]],
        "lengths": [[4, 2], [4, 2], [9]],
        "file_id": [0, 1, 1],
    }
    assert columns.keys() == set(SCHEMAS["shards.parquet"].names)
    data = encode_table("shards.parquet", columns)
    messages = []
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        try:
            decode_table(
                "shards.parquet",
                bytes(changed[: dice.choice([len(changed), dice.randrange(len(changed))])]),
                "x",
            )
            messages.append("")
        except FormatError as error:
            messages.append(str(error))
    assert 0 < messages.count("") < len(messages)
    assert not any("\n" in one for one in messages)
