"""Chats, and tokenizers whose tokens like to straddle the borders of turns."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from omniload.samples.tokenize import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|tail|>", "<|eot|>"]

Chat = list[dict[str, Any]]

PLAIN: list[Chat] = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "user", "content": "Écris un mot.\n\n"},
        {"role": "assistant", "content": "\n\nÉté 🌞🌞"},
        {"role": "user", "content": "   "},
        {"role": "assistant", "content": "  two  spaces  "},
    ],
    [
        {"role": "user", "content": "[/INST] <|im_end|> </s>"},
        {"role": "assistant", "content": "a{b}c <|im_end|>\n"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "x"},
    ],
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist's in <Stadt>?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

WITH_TOOLS: list[Chat] = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Köln and Bonn?"},
        {
            "role": "assistant",
            "content": "I'll look.",
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}},
            ],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain\n"},
        {"role": "assistant", "content": "Sun and rain."},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]},
    ],
]


@functools.cache
def merging(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of the `tokenizers` library that merges across turns where no special token stands.

    Args:
        kind: ``bytes`` (byte-level BPE with offsets trimmed) or ``pieces`` (SentencePiece-like, with byte fallback).
    """
    text = [m["content"] for chat in (*PLAIN, *WITH_TOOLS) for m in chat if m.get("content")]
    corpus = [*text, "\n\n", " [/INST]  two", "assistant\n\n", "[/INST] 4", "\n  "] * 20
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(corpus, trainer)
        return made
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    made.train_from_iterator([one for one in corpus if one.isascii()], trainer)
    vocab = list(made.get_vocab())
    merges = [tuple(merge) for merge in _merges(made)]
    ids = {token: i for i, token in enumerate(dict.fromkeys([*SPECIAL, *bytes_, *vocab]))}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def wrapped(kind: str) -> Tokenizer:
    """The same as ours."""
    return Tokenizer(merging(kind))


def _merges(tokenizer: tokenizers.Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges
