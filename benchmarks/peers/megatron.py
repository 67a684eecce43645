"""megatron-core: its indexed dataset, packed by hand or by its GPTDataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-not-found]
from megatron.core.datasets.indexed_dataset import (  # type: ignore[import-not-found]
    IndexedDataset,
    IndexedDatasetBuilder,
)
from megatron.core.datasets.utils import Split  # type: ignore[import-not-found]
from torch.utils.data import ConcatDataset, DataLoader

from benchmarks.loading.corpus import VOCABULARY
from benchmarks.peers.packed import ROWS, SEQ_LEN, num_tokens


def write(documents: Iterable[np.ndarray], prefix: Path) -> Path:
    """Write ``uint16`` tokens as ``prefix.bin`` and ``prefix.idx``. Returns the latter."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
    index = prefix.with_name(f"{prefix.name}.idx")
    builder.finalize(str(index))
    return index


class Indexed:
    """Documents in an order shuffled over all files.

    Args:
        indices: the ``.idx`` files.
        passes: over the documents.
    """

    def __init__(self, indices: Sequence[Path], passes: int) -> None:
        self._files = [IndexedDataset(str(path.with_suffix(""))) for path in indices]
        self._passes = passes

    def __call__(self, worker: int, num_workers: int) -> Iterator[np.ndarray]:
        """Every ``num_workers``-th document."""
        addresses = np.array([(f, i) for f, file in enumerate(self._files) for i in range(len(file))])
        for seed in range(self._passes):
            order = np.random.default_rng(seed).permutation(len(addresses))[worker::num_workers]
            for file, document in addresses[order].tolist():
                yield self._files[file][document]


class GptRows:
    """Rows cut by GPTDataset from shuffled documents, with labels, positions and loss mask.

    Args:
        indices: the ``.idx`` files.
        directory: where it keeps its own indices.
    """

    def __init__(self, indices: Sequence[Path], directory: Path) -> None:
        tokenizer = SimpleNamespace(eod=0, pad=-1, vocab_size=VOCABULARY, unique_identifiers={})
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=SEQ_LEN,
            blend=([str(path.with_suffix("")) for path in indices], None),
            split="1",
            path_to_cache=str(directory),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        parts = []
        for path in indices:
            prefix = str(path.with_suffix(""))
            file = IndexedDataset(prefix)
            documents = np.arange(len(file), dtype=np.int32)
            parts.append(GPTDataset(file, prefix, documents, None, Split.train, config))
        self._rows: ConcatDataset[Any] = ConcatDataset(parts)

    def tokens(self, passes: int, num_workers: int) -> int:
        """Load all rows. Returns the tokens delivered."""
        loader = DataLoader(self._rows, batch_size=ROWS, shuffle=True, num_workers=num_workers)
        return sum(num_tokens(batch["tokens"] for batch in loader) for _ in range(passes))
