"""Read sources through a `SourceLoader`, and the transforms and tokenizer that the tests of it use."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from omniload.loader import SourceLoader
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, SampleChunk
from omniload.samples.tokenize import Tokenizer
from omniload.sources import InMemorySource

SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """One id per byte, and one for each of `SPECIAL`: what a text becomes can be told by eye."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return Tokenizer(tokenizer)


def decode(tokens: np.ndarray) -> str:
    """Text of the ids of `byte_tokenizer`."""
    return str(byte_tokenizer().decode(tokens))


def loader_of(
    files: Mapping[str, Sequence[Mapping[str, Any]]], *, block_rows: int = 3, **keys: Any
) -> SourceLoader:
    """A loader over rows in memory; ``keys`` are those of the spec and of `SourceLoader`."""
    spec = {key: keys.pop(key) for key in SourceSpec.model_fields if key in keys}
    defaults = {"name": "memory", "seed": 5, "seq_len": 8, "window_blocks": 2}
    return SourceLoader(
        InMemorySource(files, block_rows=block_rows),
        SourceSpec(path=("memory",), weight=1, **spec),
        **{**defaults, **keys},
    )


def chunks(
    loader: SourceLoader, cursor: Cursor | None = None, max_samples: int = 10**6
) -> Iterator[SampleChunk]:
    """The chunks from a cursor to the end of its epoch."""
    cursor = cursor or Cursor()
    epoch = cursor.epoch
    while cursor.epoch == epoch:
        chunk = loader.read(cursor, max_samples)
        yield chunk
        assert chunk.ends_epoch == (chunk.end.epoch > epoch)
        cursor = chunk.end


def pieces(loader: SourceLoader, cursor: Cursor | None = None, max_samples: int = 10**6) -> np.ndarray:
    """All pieces from a cursor to the end of its epoch."""
    return np.concatenate([chunk.pieces for chunk in chunks(loader, cursor, max_samples)])


def address(piece: np.void) -> tuple[int, ...]:
    """Which sample of its epoch a piece is of."""
    return tuple(int(piece[name]) for name in ("file", "block", "row", "sub"))


def tokens(loader: SourceLoader, wanted: np.ndarray) -> list[list[int]]:
    """Payload of pieces as lists."""
    return [one.tolist() for one in loader.payload(wanted).tokens]


def keep_even(row: dict[str, Any]) -> dict[str, Any] | None:
    """A filter."""
    return row if row["input_ids"][0] % 2 == 0 else None


def triple(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row to three."""
    return [{"input_ids": [*row["input_ids"], i]} for i in range(3)]


def varying(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One row to none, one or more, by its first token."""
    return [{"input_ids": row["input_ids"][i:] or [7]} for i in range(row["input_ids"][0] % 4)]


def noisy(row: dict[str, Any], rng: random.Random, spread: int = 1000) -> dict[str, Any]:
    """Adds a random token."""
    return {"input_ids": [*row["input_ids"], rng.randrange(spread)]}


def seeded(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Replaces the tokens by the seed."""
    return {"input_ids": [seed % 2**31]}


def fails_on_odd(row: dict[str, Any]) -> dict[str, Any]:
    """A transform with a bug in some rows."""
    if row["input_ids"][0] % 2:
        raise KeyError("odd")
    return row


def returns_number(row: dict[str, Any]) -> int:
    """Not what a transform may return."""
    return 1


def no_disk(row: dict[str, Any]) -> dict[str, Any]:
    """A transform whose I/O fails."""
    raise OSError(5, "Input/output error")
