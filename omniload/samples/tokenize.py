"""Text to token ids with a ``tokenizer.json`` of the `tokenizers` library."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
import xxhash

from omniload.errors import MixtureError


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

    def token_id(self, token: str | int) -> int:
        """Id of a token given by name or id.

        Raises:
            MixtureError: there is no such token.
        """
        if isinstance(token, int):
            if not 0 <= token < self.vocab_size:
                raise MixtureError(f"eos: id {token} is not below the vocabulary size {self.vocab_size}")
            return token
        if token not in self._vocab:
            near = difflib.get_close_matches(token, [t for t in self._vocab if len(t) > 2], n=3, cutoff=0.4)
            hint = f"nearest are {near}" if near else "give its id instead"
            raise MixtureError(f"eos: the tokenizer has no token '{token}'; {hint}")
        return self._vocab[token]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of some ids, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Token ids of each text, without special tokens; None for one that cannot be encoded (a lone surrogate)."""
        try:
            return self._encode(texts)
        except (TypeError, UnicodeEncodeError):  # of one text among them: find which
            return [self._encode([text])[0] if _encodable(text) else None for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
