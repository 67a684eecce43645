"""Corpora to load: pre-tokenised documents of heavy-tailed length, and the text of Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCABULARY = 50_000
"""Token ids of the pre-tokenised corpus are below this, so uint16 holds them."""
ROW_GROUP_ROWS = 1000
"""Documents per row group: about 1.2 M tokens."""

_MEDIAN_TOKENS, _MEAN_TOKENS, _MAX_TOKENS = 589, 1215, 65_536
_FILES_PER_SOURCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Parquet files of several sources."""

    sources: dict[str, tuple[Path, ...]]
    """Files of each source."""
    weights: dict[str, float]
    """Share of each source in the mixture, in tokens."""
    num_documents: int
    """Rows of all files."""
    num_tokens: int
    """Tokens of all files; for text, not known and 0."""

    @property
    def files(self) -> list[Path]:
        """All files, source by source."""
        return [path for paths in self.sources.values() for path in paths]

    def mixture(self, **keys: object) -> dict[str, object]:
        """A mixture over the sources, each repeated for ever, with these top-level keys besides."""
        return {
            "sources": {
                name: {
                    "path": [str(path) for path in paths],
                    "weight": self.weights[name],
                    "on_exhausted": "repeat",
                }
                for name, paths in self.sources.items()
            },
            **keys,
        }


def write_tokens(directory: Path, num_tokens: int, *, seed: int = 0) -> Corpus:
    """Write about ``num_tokens`` as ``input_ids: list<int32>``, half of them in each of two sources.

    Lengths are log-normal (median 589, mean about 1,215, at most 65,536 tokens, as web documents are); ids follow
    Zipf's law, so that dictionary pages and compression behave as on text.
    """
    generator = np.random.default_rng(seed)
    # A log-normal variable has median exp(mu) and mean exp(mu + sigma² / 2).
    sigma = math.sqrt(2 * math.log(_MEAN_TOKENS / _MEDIAN_TOKENS))
    sources: dict[str, tuple[Path, ...]] = {}
    written = documents = 0
    for name in ("books", "web"):
        paths = []
        for i in range(_FILES_PER_SOURCE):
            count = max(1, round(num_tokens / (2 * _FILES_PER_SOURCE * _MEAN_TOKENS)))
            lengths = np.exp(generator.normal(math.log(_MEDIAN_TOKENS), sigma, count)).astype(np.int64)
            lengths = np.clip(lengths, 1, _MAX_TOKENS)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            # exp of a uniform variable has density 1/x: Zipf's law.
            ids = np.exp(generator.random(offsets[-1]) * math.log(VOCABULARY)).astype(np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
            paths.append(directory / f"{name}-{i}.parquet")
            pq.write_table(pa.table({"input_ids": column}), paths[-1], row_group_size=ROW_GROUP_ROWS)
            written, documents = written + len(ids), documents + count
        sources[name] = tuple(paths)
    return Corpus(
        sources=sources,
        weights={"books": 0.3, "web": 0.7},
        num_documents=documents,
        num_tokens=written,
    )


def as_arrow(corpus: Corpus) -> Corpus:
    """Write the tables of a corpus once more, beside its Parquet files, as Arrow files with a batch per row group."""
    sources = {}
    for name, paths in corpus.sources.items():
        sources[name] = tuple(path.with_suffix(".arrow") for path in paths)
        for stored, path in zip(paths, sources[name], strict=True):
            table = pq.read_table(stored)
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=ROW_GROUP_ROWS)
    return replace(corpus, sources=sources)


def write_text(directory: Path, num_bytes: int) -> Corpus:
    """Write the first ``num_bytes`` of the standard library's modules as ``text``, one source of two files."""
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text and total < num_bytes:
            texts.append(text)
            total += len(text)
    paths = []
    for i in range(2):
        paths.append(directory / f"code-{i}.parquet")
        pq.write_table(pa.table({"text": texts[i::2]}), paths[-1], row_group_size=100)
    return Corpus(
        sources={"code": tuple(paths)}, weights={"code": 1.0}, num_documents=len(texts), num_tokens=0
    )


def train_tokenizer(corpus: Corpus, path: Path, *, vocabulary: int) -> None:
    """Train a byte-level BPE on a text corpus and save it as a ``tokenizer.json``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for file in corpus.files for text in pq.read_table(file)["text"].to_pylist())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
