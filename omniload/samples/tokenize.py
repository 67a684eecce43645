"""Text to token ids with a ``tokenizer.json`` of the `tokenizers` library."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tokenizers
import xxhash

from omniload.errors import MixtureError

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Bounds of stretches of a text, in characters, ascending."""


class Tokenizer:
    """A tokenizer without padding, truncation and added special tokens: ids depend on the text alone.

    Args:
        tokenizer: of the `tokenizers` library; a private copy is made.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(self._vocab.values(), default=-1) + 1
        """One more than the largest id."""
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(
            np.uint16 if self.vocab_size <= 2**16 else np.uint32
        )
        """Narrowest type that holds every id."""
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(self._tokenizer.to_str().encode())
        """Hex digest of everything the ids depend on."""
        # Without special tokens a post-processor only shortens the offsets, by white space that is part of the tokens.
        self._tokenizer.post_processor = None

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Load a ``tokenizer.json``.

        Raises:
            MixtureError: the file is not there or not a tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise MixtureError(
                f"tokenizer {path}: not a tokenizer.json of the tokenizers library ({reason}); "
                "save one with Tokenizer.save"
            ) from error

    def token_id(self, token: str | int, key: str = "eos") -> int:
        """Id of a token given by name or id.

        Args:
            token: name or id.
            key: what of the mixture gives it, for the message.

        Raises:
            MixtureError: there is no such token.
        """
        if isinstance(token, int):
            if not 0 <= token < self.vocab_size:
                raise MixtureError(f"{key}: id {token} is not below the vocabulary size {self.vocab_size}")
            return token
        if token not in self._vocab:
            near = difflib.get_close_matches(token, [t for t in self._vocab if len(t) > 2], n=3, cutoff=0.4)
            hint = f"nearest are {near}" if near else "give its id instead"
            raise MixtureError(f"{key}: the tokenizer has no token '{token}'; {hint}")
        return self._vocab[token]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of some ids, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Token ids of each text, without special tokens; None for one that cannot be encoded (a lone surrogate)."""
        encodings = self._encode(self._tokenizer.encode_batch_fast, texts)
        return [None if one is None else np.array(one.ids, dtype=self.dtype) for one in encodings]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Token ids of each text as by `encode`, and ``bool`` of which tokens hold a character of one of its spans."""
        encodings = self._encode(self._tokenizer.encode_batch, texts)
        return [
            None
            if one is None
            else (np.array(one.ids, dtype=self.dtype), _tokens_in(one, spans_of, len(text)))
            for one, text, spans_of in zip(encodings, texts, spans, strict=True)
        ]

    def _encode(
        self, encode: Callable[..., list[tokenizers.Encoding]], texts: Sequence[str]
    ) -> Sequence[tokenizers.Encoding | None]:
        try:
            return encode(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # of one text among them: find which
            return [
                encode([text], add_special_tokens=False)[0] if _encodable(text) else None for text in texts
            ]


def _tokens_in(encoding: tokenizers.Encoding, spans: Spans, length: int) -> np.ndarray:
    """``bool[n]``: tokens that hold a character of one of the spans."""
    inside = np.zeros(len(encoding), dtype=bool)
    for start, end in spans:
        first, after = _token_at(encoding, start, length), _token_at(encoding, end, length)
        chars = encoding.token_to_chars(after) if after < len(encoding) else None
        if chars is not None and chars[0] < end:  # it straddles the end
            after += 1
        inside[first:after] = True
    return inside


def _token_at(encoding: tokenizers.Encoding, char: int, length: int) -> int:
    """The first token that holds this character or, where the tokenizer drops it, the next that is held."""
    for at in range(char, length):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
    return len(encoding)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
