"""What each convention of a row becomes, and what is quarantined instead of ending the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import models

from omniload.errors import MixtureError
from omniload.samples.prepare import PreparedSample, Preparer
from omniload.samples.token_block import TokenBlock
from omniload.samples.tokenize import Tokenizer
from omniload.sources import BadRow
from tests.omniload.loading import byte_tokenizer, decode


def prepare(*rows: dict[str, Any] | BadRow, column: str | None = None, eos: bool = True) -> list[Any]:
    tokenizer = byte_tokenizer()
    preparer = Preparer(
        source="a",
        column=column,
        transforms=(),
        tokenizer=tokenizer,
        eos=tokenizer.token_id("<eos>") if eos else None,
    )
    return preparer.prepare(rows, [0] * len(rows))


def one(row: dict[str, Any], **keys: Any) -> PreparedSample:
    [[sample]] = prepare(row, **keys)
    assert isinstance(sample, PreparedSample)
    return sample


def trained_text(sample: PreparedSample) -> list[str]:
    """The stretches of text that are trained on."""
    assert sample.mask is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.mask, [False]]).astype(int)))
    return [decode(sample.tokens[start:end]) for start, end in edges.reshape(-1, 2).tolist()]


def test_text_is_tokenised_and_ended() -> None:
    sample = one({"text": "héllo"})
    assert decode(sample.tokens) == "héllo<eos>"
    assert sample.mask is None
    assert sample.tokens.dtype == np.uint16
    assert decode(one({"text": "héllo"}, eos=False).tokens) == "héllo"


def test_ready_made_ids_are_taken_as_they_are() -> None:
    assert one({"input_ids": [3, 1, 2]}).tokens.tolist() == [3, 1, 2]
    assert one({"input_ids": np.array([3, 1])}).tokens.tolist() == [3, 1]


def test_only_the_assistant_is_trained_on() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And\n3+3?"},
        {"role": "assistant", "content": "\n6"},
    ]
    sample = one({"messages": chat})
    assert decode(sample.tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nAnd\n3+3?<|im_end|>\n<|im_start|>assistant\n\n6<|im_end|>\n<eos>"
    )
    assert trained_text(sample) == ["4<|im_end|>", "\n6<|im_end|>"]


def test_messages_come_before_text_and_ids_before_both() -> None:
    chat = [{"role": "assistant", "content": "x"}]
    assert one({"text": "t", "messages": chat}).mask is not None
    assert one({"text": "t", "messages": chat, "input_ids": [5]}).tokens.tolist() == [5]


@pytest.mark.parametrize("value", ["text", [1, 2], [{"role": "assistant", "content": "x"}]])
def test_a_named_column_may_hold_any_of_the_three(value: Any) -> None:
    assert len(one({"body": value, "text": 5}, column="body").tokens)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"messages": []}, "empty"),
        ({"text": None}, "null"),
        ({"text": 5}, "int"),
        ({"text": ["a"]}, "list"),
        ({"input_ids": "12"}, "str"),
        ({"input_ids": [1, "2"]}, "flat list of integers"),
        ({"input_ids": [1.5]}, "flat list of integers"),
        ({"input_ids": [True]}, "flat list of integers"),
        ({"input_ids": [[1], [2]]}, "flat list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "token ids"),
        ({"input_ids": [1, -1]}, "-1 is not in [0, 259)"),
        ({"input_ids": [1, 259]}, "259 is not in [0, 259)"),
        ({"input_ids": [2**70]}, "flat list of integers"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message by the assistant"),
        ({"messages": [{"role": "assistant"}]}, "message 0"),
        ({"messages": [{"role": "assistant", "content": "x"}, 5]}, "message 1"),
        ({"text": "a lone \ud800 surrogate"}, "not valid Unicode"),
        ({"body": "x"}, "none of the columns"),
        (BadRow(reason="not JSON: x"), "not JSON: x"),
    ],
)
def test_a_bad_row_is_set_aside_with_its_reason_and_the_others_are_not(
    row: dict[str, Any] | BadRow, reason: str
) -> None:
    before, bad, after = prepare({"text": "before"}, row, {"text": "after"})
    assert isinstance(bad, BadRow)
    assert reason in bad.reason
    assert [decode(good[0].tokens) for good in (before, after)] == ["before<eos>", "after<eos>"]


def test_samples_do_not_depend_on_what_is_prepared_with_them() -> None:
    rows = [
        {"text": "one"},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"input_ids": [1]},
        {"text": ""},
    ]
    alone = [prepare(row)[0] for row in rows]
    together = prepare(*rows)
    for a, b in zip(alone, together, strict=True):
        if isinstance(a, BadRow):
            assert a == b
        else:
            assert np.array_equal(a[0].tokens, b[0].tokens)
            assert a[0].tokens.dtype == b[0].tokens.dtype
            assert (a[0].mask is None) == (b[0].mask is None)


@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list, lambda value: pa.list_(value, 3)])
@pytest.mark.parametrize("value_type", [pa.uint8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()])
def test_stored_ids_of_any_integer_list_are_slices(list_type: Any, value_type: pa.DataType) -> None:
    column = pa.chunked_array([pa.array([[1, 2, 3], None, [4, 5, 6]], list_type(value_type))]).slice(1)
    block = TokenBlock(column, np.arange(2), 7)
    assert block.bad.tolist() == [True, False]
    assert block.reason(0) == "null"
    assert block.values[block.offsets[1] : block.offsets[2]].tolist() == [4, 5, 6]
    assert block.values.dtype.itemsize <= 4


def test_bad_rows_of_stored_ids_are_found_whole_blocks_at_a_time() -> None:
    rows = [[1], [], None, [1, None], [5, 9, 1], [-1], [8]]
    block = TokenBlock(pa.chunked_array([pa.array(rows[:3]), pa.array(rows[3:])]), np.arange(7), 9)
    found = {row: block.reason(row) for row in np.flatnonzero(block.bad).tolist()}
    limit = "token id that is not in [0, 9)"
    assert found == {1: "empty", 2: "null", 3: "null among the token ids", 4: limit, 5: limit}


def test_a_wide_vocabulary_gives_wide_tokens() -> None:
    wide = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 2**16, "?": 0}, unk_token="?")))
    assert byte_tokenizer().dtype == np.uint16
    assert wide.dtype == np.uint32
    [encoded] = wide.encode(["a"])
    assert encoded is not None
    assert encoded.tolist() == [2**16]


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 1, "?": 0}, unk_token="?"))
    plain = Tokenizer(inner)
    inner.enable_padding(length=9)
    inner.enable_truncation(1)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(tmp_path / "tokenizer.json")
    [encoded] = loaded.encode(["a"])
    assert encoded is not None
    assert encoded.tolist() == [1]
    assert loaded.fingerprint == plain.fingerprint


def test_a_tokenizer_that_is_none_and_an_end_token_that_is_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MixtureError, match=r"tokenizer\.json.*not a tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(MixtureError, match=r"no token '<eox>'.*<eos>"):
        byte_tokenizer().token_id("<eox>")
    with pytest.raises(MixtureError, match="id 259 is not below"):
        byte_tokenizer().token_id(259)
    assert byte_tokenizer().token_id(3) == 3
