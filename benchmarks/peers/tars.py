"""webdataset: tar archives, shuffled by shards and in a buffer."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import webdataset  # type: ignore[import-not-found]

_SHARD_SAMPLES = 4000
_BUFFER_SAMPLES = 1000


def write(
    values: Iterable[bytes], extension: str, directory: Path, *, shard_samples: int = _SHARD_SAMPLES
) -> list[Path]:
    """Write samples of one member each. Returns the archives."""
    directory.mkdir()
    with webdataset.ShardWriter(f"{directory}/%05d.tar", maxcount=shard_samples, verbose=0) as writer:
        for number, value in enumerate(values):
            writer.write({"__key__": f"{number:08d}", extension: value})
    return sorted(directory.iterdir())


def as_npy(document: np.ndarray) -> bytes:
    """An array as a file."""
    stream = io.BytesIO()
    np.save(stream, document)
    return stream.getvalue()


class Shuffled:
    """Decoded samples; workers share the archives.

    Args:
        archives: written by `write`.
        extension: of the members.
        decoder: names of the library's decoders.
    """

    def __init__(self, archives: Sequence[Path], extension: str, *decoder: str) -> None:
        samples = webdataset.WebDataset(
            [str(path) for path in archives], shardshuffle=len(archives), empty_check=False
        )
        self._samples = samples.shuffle(_BUFFER_SAMPLES).decode(*decoder).to_tuple(extension)

    def __call__(self, worker: int, num_workers: int) -> Iterator[Any]:
        """What falls to this worker."""
        return (value for (value,) in self._samples)
