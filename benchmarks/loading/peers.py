"""How the same is done without this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow.parquet as pq
import tokenizers
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loading.corpus import Corpus


class FixedRows(Dataset[torch.Tensor]):
    """Rows of fixed length cut from one array of tokens: no documents, no mixing, no packing.

    Args:
        tokens: ``uint16[n]`` in memory.
        seq_len: tokens per row.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._rows = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        """``int64[seq_len]``."""
        return torch.from_numpy(self._rows[index].astype(np.int64))


def torch_loader_tokens(dataset: FixedRows, batch_rows: int) -> int:
    """Iterate one epoch of a shuffling torch DataLoader without workers. Returns the tokens delivered."""
    loader = DataLoader(dataset, batch_size=batch_rows, shuffle=True)
    return sum(batch.numel() for batch in loader)


Encode = Callable[[Sequence[str]], Sequence[tokenizers.Encoding]]


def plain_text_tokens(corpus: Corpus, encode: Encode, lane_tokens: int) -> int:
    """Read text with pyarrow, encode a row group at a time, fill ``int64`` lanes in stored order.

    Returns:
        Tokens encoded.
    """
    lane = np.empty(lane_tokens, np.int64)
    total = used = 0
    for path in corpus.files:
        with pq.ParquetFile(path) as file:
            for block in range(file.num_row_groups):
                texts = file.read_row_group(block, columns=["text"]).column(0).to_pylist()
                for encoding in encode(texts):
                    ids = np.array(encoding.ids, np.uint16)
                    total += len(ids)
                    while len(ids):
                        count = min(len(ids), lane_tokens - used)
                        lane[used : used + count] = ids[:count]
                        ids, used = ids[count:], used + count
                        if used == lane_tokens:
                            lane, used = np.empty(lane_tokens, np.int64), 0
    return total
