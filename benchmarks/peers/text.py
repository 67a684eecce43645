"""Text tokenised and packed by peers, each from the format that is its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tokenizers

from benchmarks.definition import Contender, Kind
from benchmarks.loading.corpus import Corpus
from benchmarks.peers import grains, huggingface, mosaicml
from benchmarks.peers.packed import packed_tokens, with_workers

_BATCH_TEXTS = 100


def contenders(
    corpus: Corpus, tokenizer: tokenizers.Tokenizer, directory: Path, measure: str
) -> list[Contender]:
    """Each peer without workers and with two; the tokenizers library has threads of its own only without.

    Args:
        corpus: text in Parquet.
        tokenizer: for all of them.
        directory: for the other formats.
        measure: to be part of.
    """
    encode = tokenizer.encode_batch_fast
    texts = [text for path in corpus.files for text in pq.read_table(path)["text"].to_pylist()]
    streamed = huggingface.tokenised(corpus.files, encode)
    shards = mosaicml.write(({"text": text} for text in texts), {"text": "str"}, directory / "mds")

    def sharded(samples: mosaicml.Shuffled, worker: int, num_workers: int) -> Iterator[np.ndarray]:
        return (ids for batch in samples.batches(_BATCH_TEXTS) for ids in _ids(encode(batch)))

    def document(text: str) -> dict[str, np.ndarray]:
        return {"input_ids": np.array(tokenizer.encode(text).ids, np.uint16)}

    runs = {"grain, 2 threads": partial(grains.packed_tokens, texts, document, 0, num_threads=2)}
    for workers in (0, 2):
        samples = mosaicml.Shuffled([shards], "text")
        also = f", {workers} workers" if workers else ""
        runs[f"datasets, streaming{also}"] = partial(huggingface.packed_tokens, streamed, workers)
        runs[f"mosaicml-streaming{also}"] = partial(packed_tokens, partial(sharded, samples), workers)
    return [
        Contender(name=name, measure=measure, kind=Kind.PEER, run=run, cpu_seconds=with_workers)
        for name, run in runs.items()
    ]


def _ids(encodings: Sequence[Any]) -> Iterator[np.ndarray]:
    return (np.array(one.ids, np.uint16) for one in encodings)
