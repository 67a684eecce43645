"""JPEGs decoded by peers, each from the format that is its own, and cut to patches by one function."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grain  # type: ignore[import-not-found]
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.definition import Contender, Kind
from benchmarks.loading import pictures
from benchmarks.peers import grains, huggingface, mosaicml, tars
from benchmarks.peers.packed import with_workers

_SHARD_IMAGES = 25

Images = Callable[[int, int], Iterable[Image.Image]]
"""Given a worker's number and how many there are, its images."""


class Patches(IterableDataset[torch.Tensor]):
    """Patches of images, made where they are read.

    Args:
        images: of each worker.
    """

    def __init__(self, images: Images) -> None:
        self._images = images

    def __iter__(self) -> Iterator[torch.Tensor]:
        """``float32[n, d]`` of each image."""
        info = get_worker_info()
        mine = self._images(info.id, info.num_workers) if info else self._images(0, 1)
        return (torch.from_numpy(pictures.patches(image)) for image in mine)


def contenders(jpegs: list[bytes], directory: Path, measure: str) -> list[Contender]:
    """Each peer without workers and with two.

    Args:
        jpegs: the images.
        directory: for the formats.
        measure: to be part of.
    """
    parquet = pictures.write(jpegs, directory / "hf.parquet")
    rows = huggingface.images([parquet], directory / "hf", "image")
    archives = tars.write(jpegs, "jpg", directory / "tars", shard_samples=_SHARD_IMAGES)
    shards = mosaicml.write(
        ({"image": Image.open(io.BytesIO(one))} for one in jpegs), {"image": "jpeg"}, directory / "mds"
    )
    records = grains.records([grains.write(jpegs, directory / "records")])
    runs: dict[str, Callable[[], int]] = {}
    for workers in (0, 2):
        readers: dict[str, Images] = {
            "datasets, rows": rows,
            "webdataset": tars.Shuffled(archives, "jpg", "pil"),
            "mosaicml-streaming": mosaicml.Shuffled([shards], "image"),
        }
        for name, images in readers.items():
            runs[f"{name}, {workers} workers" if workers else name] = partial(_num_images, images, workers)
    runs["grain"] = partial(_grain_images, records, 0)
    runs["grain, 2 threads"] = partial(_grain_images, records, 2)
    return [
        Contender(name=name, measure=measure, kind=Kind.PEER, run=run, cpu_seconds=with_workers)
        for name, run in runs.items()
    ]


def _num_images(images: Images, num_workers: int) -> int:
    return sum(1 for _ in DataLoader(Patches(images), batch_size=None, num_workers=num_workers))


def _grain_images(records: Any, num_threads: int) -> int:
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=16 if num_threads else 0)
    images = grain.MapDataset.source(records).shuffle(seed=0).map(_patches_of).to_iter_dataset(options)
    return sum(1 for _ in images)


def _patches_of(record: bytes) -> np.ndarray:
    return pictures.patches(Image.open(io.BytesIO(record)))
