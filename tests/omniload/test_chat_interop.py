"""Chats become the tokens and masks that transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from omniload.mixture import ColumnMap
from omniload.samples.chat import ChatTemplate
from omniload.samples.messages import read_messages, read_tools
from omniload.samples.sample import Text
from tests.omniload.chats import PLAIN, TOOLS, WITH_TOOLS, Chat, merging, wrapped
from tests.omniload.templates import KINDS, template

pytestmark = pytest.mark.interop
transformers = pytest.importorskip("transformers")

CASES = [
    (kind, chat, tools)
    for kind in KINDS
    for chat, tools in [
        *((chat, None) for chat in PLAIN),
        *((chat, TOOLS) for chat in WITH_TOOLS if kind == "tools"),
    ]
]


def theirs(tokenizer: str, kind: str, chat: Chat, tools: Any) -> tuple[str, list[int], list[int]]:
    """Text, ids and mask by transformers, from the template with generation blocks."""
    wrapper = transformers.PreTrainedTokenizerFast(
        tokenizer_object=merging(tokenizer), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    keys = {"chat_template": template(kind, marked=True), "tools": tools, "date_string": "26 Jul 2024"}
    out = wrapper.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **keys)
    return (
        wrapper.apply_chat_template(chat, tokenize=False, **keys),
        list(out["input_ids"]),
        list(out["assistant_masks"]),
    )


def ours(kind: str, chat: Any, tools: Any, *, marked: bool) -> Text:
    made = ChatTemplate(
        template(kind, marked=marked), where="test", variables={"bos_token": "<s>", "eos_token": "</s>"}
    )
    return made.render(read_messages(chat, ColumnMap()), read_tools(tools))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("tokenizer", ["bytes", "pieces"])
def test_tokens_and_masks_equal_those_of_transformers(tokenizer: str, marked: bool) -> None:
    straddled = 0
    for kind, chat, tools in CASES:
        text, ids, mask = theirs(tokenizer, kind, chat, tools)
        rendered = ours(kind, chat, tools, marked=marked)
        assert rendered.text == text
        assert rendered.trained is not None
        [encoded] = wrapped(tokenizer).encode_spans([rendered.text], [rendered.trained])
        assert encoded is not None
        assert encoded[0].tolist() == ids
        assert encoded[1].astype(int).tolist() == mask, (kind, chat)
        assert any(mask)
        assert not all(mask)
        starts = {start for start, _ in rendered.trained}
        offsets = merging(tokenizer).encode(text, add_special_tokens=False).offsets
        straddled += sum(begin < start < end for start in starts for begin, end in offsets)
    assert straddled > 0  # tokens across the border were among them
