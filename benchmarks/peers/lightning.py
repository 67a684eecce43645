"""litdata: tokens that were laid end to end when they were written, so that loading packs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import litdata  # type: ignore[import-not-found]
import numpy as np
from litdata.streaming.item_loader import TokensLoader  # type: ignore[import-not-found]
from litdata.streaming.writer import BinaryWriter  # type: ignore[import-not-found]

from benchmarks.peers.packed import ROWS, SEQ_LEN, num_tokens

_CHUNK_TOKENS = 1 << 22


def write(documents: Iterable[np.ndarray], directory: Path) -> Path:
    """Write ``uint16`` tokens in chunks. Returns the directory."""
    writer = BinaryWriter(str(directory), chunk_size=_CHUNK_TOKENS, item_loader=TokensLoader())
    for number, document in enumerate(documents):
        writer[number] = document.astype(np.uint16)
    writer.done()
    writer.merge()
    return directory


def tokens(directory: Path, passes: int, num_workers: int) -> int:
    """Load rows shuffled in and between chunks; they travel as ``uint16`` and are widened at the end.

    Returns:
        Tokens delivered.
    """
    rows = litdata.StreamingDataset(
        str(directory), item_loader=TokensLoader(block_size=SEQ_LEN), shuffle=True
    )
    loader = litdata.StreamingDataLoader(rows, batch_size=ROWS, num_workers=num_workers)
    return sum(num_tokens(batch.long() for batch in loader) for _ in range(passes))
