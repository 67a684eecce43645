"""mosaicml-streaming: shards of samples, shuffled by its own algorithm."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any


def _import_streaming() -> Any:
    """The library, where need be with an empty torchvision.

    It imports torchvision for datasets not used here, and that does not load from PyPI beside a CPU build of torch.
    """
    import transformers  # type: ignore[import-not-found, import-untyped, unused-ignore]  # looks for torchvision too

    assert transformers
    try:
        import torchvision  # type: ignore[import-not-found]

        assert torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        used = {"datasets": "VisionDataset", "transforms": "", "transforms.functional": "to_tensor"}
        for name, attribute in {"": "", **used}.items():
            full = f"torchvision.{name}".rstrip(".")
            sys.modules[full] = module = module_from_spec(ModuleSpec(full, None))
            if attribute:
                setattr(module, attribute, object)
    import streaming  # type: ignore[import-not-found]

    return streaming


streaming = _import_streaming()


def write(samples: Iterable[Mapping[str, Any]], columns: dict[str, str], directory: Path) -> Path:
    """Write samples as shards. Returns the directory."""
    with streaming.MDSWriter(out=str(directory), columns=columns) as writer:
        for sample in samples:
            writer.write(sample)
    return directory


_BATCH = 128
"""Samples; it looks ahead by a few of these, and sleeps where that is little."""


class Shuffled:
    """The values of one column, shuffled over all shards; workers share them by the library's own rules.

    Args:
        directories: written by `write`.
        column: its name.
    """

    def __init__(self, directories: Sequence[Path], column: str) -> None:
        streaming.base.util.clean_stale_shared_memory()
        streams = [streaming.Stream(local=str(directory)) for directory in directories]
        self._samples = streaming.StreamingDataset(streams=streams, shuffle=True, batch_size=_BATCH)
        self._column = column

    def __call__(self, worker: int, num_workers: int) -> Iterator[Any]:
        """What falls to this worker."""
        return (sample[self._column] for sample in self._samples)

    def batches(self, size: int) -> Iterator[list[Any]]:
        """What falls to this worker, so many at a time."""
        values = self(0, 1)
        while batch := list(itertools.islice(values, size)):
            yield batch
