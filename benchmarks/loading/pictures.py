"""Photographs that nobody took, and the plain way from a JPEG to the patches of a vision tower."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PATCH, MERGE, FRAMES = 14, 2, 2
"""Pixels along a side of a patch, patches along a side of a token, frames in a patch: those of Qwen2-VL."""
PLACEHOLDER = 1
"""Token that stands for an image."""

_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
_ROW_GROUP_ROWS = 50


def jpegs(count: int, *, seed: int = 0) -> list[bytes]:
    """JPEGs of about 640 x 480 pixels and 70 KB: soft shapes, an edge, and the noise of a sensor."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        width, height = int(generator.integers(580, 700)), int(generator.integers(430, 530))
        shapes = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(shapes).astype(np.int16)
        pixels[:, generator.integers(0, width) :] //= 2
        pixels += generator.normal(0, 6, pixels.shape).astype(np.int16)
        stream = io.BytesIO()
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


def write(images: list[bytes], path: Path) -> Path:
    """Write rows of an image and a few tokens as Parquet. Returns the path."""
    column = pa.array(
        [{"bytes": image, "path": None} for image in images],
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    captions = pa.array([[2 + i % 7, 3, 4] for i in range(len(images))], pa.list_(pa.int32()))
    pq.write_table(pa.table({"image": column, "input_ids": captions}), path, row_group_size=_ROW_GROUP_ROWS)
    return path


def patches(image: Image.Image) -> np.ndarray:
    """The patches of an image whose number of pixels is within the bounds, as Qwen2-VL's processor makes them.

    Returns:
        ``float32[n, 3 * FRAMES * PATCH²]``, squares of ``MERGE``² patches together.
    """
    unit = PATCH * MERGE
    height, width = round(image.height / unit), round(image.width / unit)
    resized = image.convert("RGB").resize((width * unit, height * unit), Image.Resampling.BICUBIC)
    pixels = (np.asarray(resized, np.float32) / 255 - _MEAN) / _STD
    squares = pixels.reshape(height, MERGE, PATCH, width, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    # → [height, width, MERGE, MERGE, 3, PATCH, PATCH], each picture as often as there are frames
    framed = np.broadcast_to(squares[..., None, :, :], (*squares.shape[:5], FRAMES, PATCH, PATCH))
    return framed.reshape(-1, 3 * FRAMES * PATCH**2)


def num_decoded(images: Iterable[bytes]) -> int:
    """Decode images and make their patches, one after the other. Returns how many."""
    return sum(len(patches(Image.open(io.BytesIO(image)))) > 0 for image in images)
