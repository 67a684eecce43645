"""What each convention of a row becomes, and what is quarantined instead of ending the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from omniload.errors import ColumnMissing, MixtureError
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import ColumnMap, Mixture, SourceSpec
from omniload.samples.chat import ChatTemplate
from omniload.samples.convention import Convention
from omniload.samples.prepare import PreparedSample, Preparer
from omniload.samples.token_block import TokenBlock
from omniload.samples.tokenize import Tokenizer
from omniload.sources import BadRow
from tests.omniload.loading import byte_tokenizer, decode, pieces


def prepare(
    *rows: dict[str, Any] | BadRow,
    column: str | None = None,
    columns: dict[str, Any] | None = None,
    eos: bool = True,
) -> list[Any]:
    tokenizer = byte_tokenizer()
    preparer = Preparer(
        source="a",
        convention=Convention(column, ColumnMap(**(columns or {}))),
        template=ChatTemplate.load("chatml"),
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


def test_only_the_completion_is_trained_on() -> None:
    sample = one({"prompt": "2+2? ", "completion": "4"})
    assert decode(sample.tokens) == "2+2? 4<eos>"
    assert trained_text(sample) == ["4<eos>"]
    turn = {"role": "assistant", "content": "a"}
    sample = one({"prompt": [turn, {"role": "user", "content": "q"}], "completion": [turn, turn]})
    assert trained_text(sample) == ["a<|im_end|>", "a<|im_end|>"]
    assert decode(sample.tokens).count("a<|im_end|>") == 3


def test_labels_say_which_tokens_are_trained_on() -> None:
    sample = one({"input_ids": [3, 1, 2], "labels": [-100, -100, 2]})
    assert sample.mask is not None
    assert sample.mask.tolist() == [False, False, True]
    assert one({"input_ids": [3, 1], "labels": [3, 1]}).mask is None
    assert one({"input_ids": [3, 1], "labels": 7}).mask is None  # the class of the row


def test_a_prompt_without_completion_is_no_pair() -> None:
    assert decode(one({"prompt": "p", "text": "t"}).tokens) == "t<eos>"
    assert decode(one({"prompt": "p", "completion": "c", "text": "t"}).tokens) == "pc<eos>"


def test_sharegpt_is_read_through_a_map_of_its_names() -> None:
    names = {
        "messages": "conversations",
        "role": "from",
        "content": "value",
        "roles": {"human": "user", "gpt": "assistant"},
    }
    chat = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q", "content": "not this"},
        {"from": "gpt", "value": "a", "role": "nor this"},
    ]
    sample = one({"text": "t", "messages": "m", "conversations": chat}, columns=names)
    assert decode(sample.tokens) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<eos>"
    )
    assert trained_text(sample) == ["a<|im_end|>"]
    [bad] = prepare({"text": "t", "conversations": [{"from": "gpt"}]}, columns=names)
    assert "message 0 is not of the form {'from': text, 'value': text or parts}" in bad.reason


def test_a_column_that_has_a_name_of_its_own_is_the_one_that_is_read() -> None:
    row = {"input_ids": [1], "text": "t", "body": "b", "q": "q ", "a": "a"}
    assert decode(one(row, columns={"text": "body"}).tokens) == "b<eos>"
    assert decode(one(row, columns={"prompt": "q", "completion": "a"}).tokens) == "q a<eos>"
    [bad] = prepare({"text": "t"}, columns={"text": "body"})
    assert bad.reason == "no column 'body'"


def test_a_chat_that_ends_with_the_end_token_gets_no_second_one() -> None:
    tokenizer = byte_tokenizer()
    preparer = Preparer(
        source="a",
        convention=Convention(),
        template=ChatTemplate(
            "{% for message in messages %}{{ message.content }}<eos>{% endfor %}", where="test"
        ),
        transforms=(),
        tokenizer=tokenizer,
        eos=tokenizer.token_id("<eos>"),
    )
    [[chat], [text]] = preparer.prepare(  # type: ignore[misc]
        [{"messages": [{"role": "assistant", "content": "x"}]}, {"text": "x<eos>"}], [0, 0]
    )
    assert decode(chat.tokens) == "x<eos>"
    assert decode(text.tokens) == "x<eos><eos>"


def test_messages_come_before_text_and_ids_before_both() -> None:
    chat = [{"role": "assistant", "content": "x"}]
    assert one({"text": "t", "messages": chat}).mask is not None
    assert one({"text": "t", "messages": chat, "input_ids": [5]}).tokens.tolist() == [5]


@pytest.mark.parametrize("value", ["text", [1, 2], [{"role": "assistant", "content": "x"}]])
def test_a_named_column_may_hold_any_of_the_three(value: Any) -> None:
    assert len(one({"body": value, "text": 5}, column="body").tokens)


def nested(levels: int) -> dict[str, Any]:
    """A message with something deep in it."""
    inner: dict[str, Any] = {"role": "assistant", "content": "x"}
    for _ in range(levels):
        inner = {"role": "assistant", "content": "x", "extra": inner}
    return inner


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
        ({"messages": [{"role": "assistant", "content": ""}, {"role": 1, "content": "x"}]}, "message 1"),
        ({"messages": [{"role": "assistant", "content": [{"type": "audio"}]}]}, "content part of type audio"),
        ({"messages": [{"role": "assistant", "content": ["x"]}]}, "message 0"),
        ({"messages": [{"role": "assistant", "content": "a \ufdd0"}]}, "reserved for marks"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": [{"a": 1}]}, "no form for tools"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": "[{"}, "tools: not JSON"),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "tools": {"a": 1}},
            "not a list of JSON objects",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"a": 1}]}]}, "no form for tool calls"),
        ({"prompt": "x", "completion": ""}, "empty completion"),
        ({"prompt": None, "completion": "x"}, "'prompt' is null"),
        ({"prompt": "x", "completion": None}, "'completion' is null"),
        ({"prompt": [], "completion": np.array([1])}, "a chat of type ndarray"),
        ({"messages": [nested(70)]}, "nested more than 64 levels"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": nested(900)}, "nested more than 64"),
        (
            {"prompt": "x", "completion": [{"role": "assistant", "content": "x"}]},
            "both be text, or both messages",
        ),
        ({"prompt": 5, "completion": 6}, "not a list of messages"),
        (
            {
                "prompt": [{"role": "assistant", "content": "x"}],
                "completion": [{"role": "user", "content": "y"}],
            },
            "no message by the assistant",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, "2 token ids and 1 labels"),
        ({"input_ids": [1, 2], "labels": []}, "2 token ids and 0 labels"),
        ({"input_ids": [1, 2], "labels": None}, "'labels' is null"),
        ({"input_ids": [1, 2], "labels": ["1", "2"]}, "flat list of integers"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "neither the token ids nor -100"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no token to train on"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no token to train on"),
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
    assert block.values.dtype == np.uint8


@pytest.mark.parametrize(
    ("most", "expected"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.int32)]
)
def test_stored_ids_are_kept_in_the_narrowest_type_that_holds_them(most: int, expected: type) -> None:
    ids = [0, most, 1]
    block = TokenBlock(pa.chunked_array([pa.array([ids], pa.list_(pa.int32()))]), np.arange(1), 1 << 20)
    assert block.values.tolist() == ids
    assert block.values.dtype == expected
    assert not block.bad.any()


def test_ids_that_are_none_are_found_whatever_type_they_are_kept_in() -> None:
    column = pa.chunked_array([pa.array([[1, -1], [2, 3], [1 << 40]], pa.list_(pa.int64()))])
    block = TokenBlock(column, np.arange(3), 1 << 31)
    assert block.bad.tolist() == [True, False, True]
    assert block.values[block.offsets[1] : block.offsets[2]].tolist() == [2, 3]
    assert block.values.dtype.itemsize <= 4


def labelled(ids: list[Any], labels: list[Any], **keys: Any) -> TokenBlock:
    columns = [pa.chunked_array([pa.array(rows, pa.list_(pa.int64()))]) for rows in (ids, labels)]
    return TokenBlock(columns[0].slice(1), np.arange(len(ids) - 1), 9, columns[1].slice(1))


def test_labels_of_stored_ids_say_which_tokens_are_trained_on() -> None:
    block = labelled([[8], [1, 2, 3], [4], [5, 6]], [[8], [-100, 2, -100], [4], [-100, 6]])
    assert not block.bad.any()
    assert block.trained is not None
    assert [block.trained_of(row).tolist() for row in range(3)] == [
        [False, True, False],
        [True],
        [False, True],
    ]
    assert labelled([[8], [1, 2]], [[8], [1, 2]]).trained is None


@given(st.data())
def test_stored_and_parsed_labels_mean_the_same(data: st.DataObject) -> None:
    row = st.none() | st.lists(st.integers(0, 3), max_size=4)
    ids, labels = [[0]], [[0]]
    for _ in range(data.draw(st.integers(1, 5))):
        ids.append(data.draw(row))
        same = [data.draw(st.sampled_from([one, one, -100])) for one in ids[-1] or []]
        labels.append(data.draw(st.just(same) | st.none() | st.lists(st.integers(0, 3), max_size=4)))
    block = labelled(ids, labels)
    for i, (one_ids, one_labels) in enumerate(zip(ids[1:], labels[1:], strict=True)):
        [parsed] = prepare({"input_ids": one_ids, "labels": one_labels})
        assert bool(block.bad[i]) == isinstance(parsed, BadRow)
        if not block.bad[i]:
            mask = parsed[0].mask
            expected = np.ones(len(one_ids or []), dtype=bool) if mask is None else mask
            assert block.trained_of(i).tolist() == expected.tolist()


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


def test_what_goes_with_the_sample_is_read_from_each_file_as_far_as_it_is_there(tmp_path: Path) -> None:
    def loader(*tables: dict[str, list[Any]]) -> SourceLoader:
        for old in tmp_path.glob("*.parquet"):
            old.unlink()
        for i, table in enumerate(tables):
            pq.write_table(pa.table(table), tmp_path / f"{i}.parquet")
        spec = SourceSpec(path=(str(tmp_path / "*.parquet"),), weight=1)
        mixture = Mixture(seq_len=99, packs=1, shuffle="none", sources={"a": spec})
        return open_loader("a", mixture, tokenizer=byte_tokenizer())

    chat = [[{"role": "assistant", "content": "x"}]]
    with_tools = loader({"messages": chat, "id": [1]}, {"messages": chat, "tools": ['[{"a": 1}]']})
    assert len(pieces(with_tools)) == 1
    assert "no form for tools" in with_tools.failures[0].reason
    masked = loader({"input_ids": [[1, 2]]}, {"input_ids": [[1, 2, 3]], "labels": [[-100, -100, 3]]})
    assert pieces(masked)["targets"].tolist() == [1, 1]
    lacking = loader({"prompt": ["p"], "completion": ["cc"]}, {"prompt": ["p"]})
    with pytest.raises(ColumnMissing, match=r"1\.parquet: no column 'completion'"):
        pieces(lacking)
