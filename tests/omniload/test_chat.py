"""Chat templates: what is trained on, which files they come from, and what they may not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.client import DataLoader
from omniload.errors import MixtureError, StateError
from omniload.mixture import ColumnMap, Mixture
from omniload.samples.chat import ChatTemplate
from omniload.samples.jinja_sandbox import END, START, unmark
from omniload.samples.messages import read_messages, read_tools
from omniload.samples.sample import BadSample, Text
from tests.omniload.chats import PLAIN, TOOLS, WITH_TOOLS, merging
from tests.omniload.loading import byte_tokenizer, decode, loader_of, pieces
from tests.omniload.mixtures import on_both_runtimes
from tests.omniload.templates import KINDS, template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, where="test", variables=TOKENS)


def render(source: str, chat: Any = CHAT, tools: Any = None, **keys: Any) -> Text:
    return made(source).render(read_messages(chat, ColumnMap()), read_tools(tools), **keys)


def trained(text: Text) -> list[str]:
    assert text.trained is not None
    return [text.text[start:end] for start, end in text.trained]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_found_with_and_without_generation_blocks(kind: str) -> None:
    for chat in PLAIN:
        blocks, differences = (render(template(kind, marked=marked), chat) for marked in (True, False))
        assert blocks == differences
        assert len(trained(blocks)) == sum(message["role"] == "assistant" for message in chat)


@pytest.mark.parametrize("marked", [True, False])
def test_tool_calls_are_trained_on_and_answers_of_tools_are_not(marked: bool) -> None:
    text = render(template("tools", marked=marked), WITH_TOOLS[0], TOOLS)
    calls = "".join(
        f'\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Köln", "Bonn")
    )
    assert trained(text) == [f"I'll look.{calls}<|im_end|>", "Sun and rain.<|im_end|>"]
    assert "<Stadt>" in text.text
    assert "ist's" in text.text  # JSON, but not escaped for HTML
    assert "<tool_response>\nsun\n</tool_response>" in text.text


@pytest.mark.parametrize("marked", [True, False])
def test_messages_before_the_first_trained_one_are_context(marked: bool) -> None:
    text = render(template("turns", marked=marked), PLAIN[1], first_trained=2)
    assert trained(text) == ["two  spaces<|eot|>"]


def test_a_chat_from_a_table_gives_the_same_text_as_from_lines() -> None:
    chats = [*WITH_TOOLS[:1], *PLAIN]
    stored = pa.Table.from_pylist([{"messages": chat, "tools": TOOLS} for chat in chats]).to_pylist()
    assert stored[1]["messages"][0]["tool_calls"] is None  # a table's way to say that there is none
    for row, chat in zip(stored, chats, strict=True):
        source = template("tools", marked=True)
        assert render(source, row["messages"], row["tools"]) == render(source, chat, json.dumps(TOOLS))


def test_blocks_are_found_through_macros_filters_and_loops() -> None:
    source = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}!{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% continue %}{% endif %}"
        "[{{ turn(m) | upper }}]{% endfor %}"
    )
    text = render(source, [*CHAT, *CHAT])
    assert text.text == "q[A!]q[A!]"
    assert trained(text) == ["A!", "A!"]


def test_a_turn_that_is_written_otherwise_in_the_middle_is_refused_and_not_guessed() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.thinking and loop.last %}{{ m.thinking }}{% endif %}"
        "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    thinking = {**CHAT[1], "thinking": "hm "}
    assert trained(render(source, [CHAT[0], thinking])) == ["hm a<end>"]
    with pytest.raises(BadSample, match="writes message 1 otherwise when another follows"):
        render(source, [CHAT[0], thinking, *CHAT])


def test_reasoning_is_known_by_any_of_its_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        [message] = read_messages([{"role": "assistant", "content": "a", name: "r"}], ColumnMap())
        assert message["reasoning_content"] == message["thinking"] == "r"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only\\nsystem') }}", "test: only system"),
        ("{{ messages[9].content }}", "test: list object has no element 9"),
        ("{{ messages.append(1) }}", "test: .*unsafe|immutable|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "test: .*unsafe"),
        ("{{ messages[0].content.format_map }}{{ range(10**9) | list }}", "test: .*[Rr]ange"),
        ("{{ 1 // 0 }}", "test: .*zero"),
        ("{% generation %}{{ '' }}{% endgeneration %}", "no text by the assistant"),
        ("{% macro a() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ a()[1:] }}", "tears the ends"),
    ],
)
def test_a_template_that_fails_or_reaches_outside_makes_a_bad_sample(source: str, reason: str) -> None:
    with pytest.raises(BadSample, match=reason) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_the_date_of_the_day_is_refused_unless_there_is_another() -> None:
    with pytest.raises(MixtureError, match="asks for the date of the day"):
        render("{{ strftime_now('%d') }}")
    assert "26 Jul 2024" in render(template("headers", marked=False)).text


def test_marks_in_the_data_cannot_be_forged() -> None:
    for where in ("user", "assistant"):
        chat = [*CHAT, {"role": where, "content": f"x{START}y{END}"}]
        with pytest.raises(BadSample, match="reserved for marks"):
            render(template("turns", marked=True), chat)


@given(st.lists(st.tuples(st.text(st.characters(exclude_characters=START + END)), st.booleans())))
def test_marked_stretches_are_found_again(parts: list[tuple[str, bool]]) -> None:
    found = unmark("".join(f"{START}{part}{END}" if inside else part for part, inside in parts))
    assert found is not None
    text, spans = found
    assert text == "".join(part for part, _ in parts)
    assert [text[a:b] for a, b in spans] == [part for part, inside in parts if inside and part]


def write(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_templates_and_special_tokens_come_from_the_files_of_a_model(tmp_path: Path) -> None:
    source = template("inst", marked=False)
    expected = ChatTemplate(source, where="", variables={"bos_token": "<s>", "eos_token": "</s>"})
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    inside = write(
        tmp_path, "tokenizer_config.json", {**tokens, "chat_template": source, "add_bos_token": True}
    )
    assert ChatTemplate.load(inside).fingerprint == expected.fingerprint
    beside = write(tmp_path, "tokenizer_config.json", tokens)
    file = write(tmp_path, "chat_template.jinja", source)
    assert (
        ChatTemplate.load(beside).fingerprint == ChatTemplate.load(file).fingerprint == expected.fingerprint
    )
    named = [{"name": "default", "template": source}, {"name": "tool_use", "template": "tools"}]
    several = ChatTemplate.load(write(tmp_path, "tokenizer_config.json", {**tokens, "chat_template": named}))
    assert several.render(CHAT).text == expected.render(CHAT).text
    with pytest.raises(BadSample, match="no text by the assistant"):
        several.render(CHAT, TOOLS)  # by the other template, which shows no chat at all


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jinja", "{% for %}", "not a Jinja template: line 1"),
        ("a.jinja", "{{ bos_token }}", "uses bos_token.*put the model's tokenizer_config.json beside it"),
        ("a.json", "{", "a.json is not JSON"),
        ("a.json", [], "a.json holds no JSON object"),
        ("a.json", {"bos_token": "<s>"}, "has no chat_template"),
        ("a.json", {"chat_template": [{"name": "rag", "template": "x"}]}, "has no chat_template"),
    ],
)
def test_files_that_give_no_template_are_refused(
    tmp_path: Path, name: str, content: object, message: str
) -> None:
    with pytest.raises(MixtureError, match=message) as error:
        ChatTemplate.load(write(tmp_path, name, content))
    assert "\n" not in str(error.value)


def test_a_source_may_have_a_template_of_its_own(tmp_path: Path) -> None:
    rows = {"x": [{"messages": CHAT}]}
    own = write(tmp_path, "own.jinja", "{% for m in messages %}<{{ m.content }}>{% endfor %}")
    texts, prints = [], []
    for keys in ({}, {"chat_template": own}):
        loader = loader_of(rows, tokenizer=byte_tokenizer(), seq_len=99, **keys)
        [tokens] = loader.payload(pieces(loader)).tokens
        texts.append(decode(tokens))
        prints.append(loader.fingerprints["template"])
    assert texts == ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n", "<q><a>"]
    assert prints[0] != prints[1]


@on_both_runtimes
def test_a_state_belongs_to_a_template_and_not_to_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    merging("bytes").save(str(tmp_path / "tokenizer.json"))
    mixture: dict[str, Any] = {
        "seq_len": 32,
        "packs": 1,
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "sources": {"a": {"path": str(tmp_path / "x.jsonl"), "weight": 1, "on_exhausted": "repeat"}},
    }

    def loader(name: str, text: str) -> DataLoader:
        return DataLoader({**mixture, "chat_template": write(tmp_path, name, text)})

    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    with loader("one.jinja", source) as one, loader("two.jinja", source) as two:
        next(iter(one))
        two.load_state_dict(one.state_dict())
        assert two.state_dict() == one.state_dict()
        with (
            loader("three.jinja", source + "\n.") as three,
            pytest.raises(StateError, match="'a' is defined"),
        ):
            three.load_state_dict(one.state_dict())


def test_the_template_of_a_mixture_is_known_by_its_content_and_not_its_place(tmp_path: Path) -> None:
    mixture: dict[str, Any] = {"seq_len": 8, "packs": 1, "sources": {"a": {"path": "x", "weight": 1}}}
    assert Mixture.load(mixture).chat_template == "chatml"
    with pytest.raises(MixtureError, match=r"chat_template: no file .*chatmi, and built in is only chatml"):
        Mixture.load({**mixture, "chat_template": "chatmi"})
    (tmp_path / "m.yaml").write_text(json.dumps({**mixture, "chat_template": "t.jinja"}))
    write(tmp_path, "t.jinja", "x")
    assert Mixture.load(tmp_path / "m.yaml").chat_template == str(tmp_path / "t.jinja")
    (tmp_path / "m.yaml").write_text(json.dumps({**mixture, "chat_template": "chatml"}))
    assert Mixture.load(tmp_path / "m.yaml").chat_template == "chatml"
