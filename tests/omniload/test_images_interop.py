"""Patches are, bit for bit, those of the Qwen2-VL image processor of transformers that uses Pillow too."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omniload.samples.images import ImagePatches
from tests.omniload.images import picture

pytestmark = pytest.mark.interop

IMAGES = [
    picture(640, 480, format="JPEG"),
    picture(30, 20, format="JPEG"),
    picture(1999, 1501, format="JPEG"),
    picture(56, 56),
    picture(100, 90, mode="RGBA"),
    picture(13, 2000, mode="L"),
    picture(700, 20, format="WEBP"),
]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {
            "patch_size": 16,
            "merge_size": 1,
            "temporal_patch_size": 1,
            "min_pixels": 256,
            "max_pixels": 90_000,
        },
        {"merge_size": 3, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    ],
)
def test_patches_and_grids_equal_those_of_transformers(args: dict[str, object]) -> None:
    ours = ImagePatches(**args)  # type: ignore[arg-type]
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels},
        patch_size=ours.patch_size,
        merge_size=ours.merge_size,
        temporal_patch_size=ours.temporal_patch_size,
        image_mean=list(ours.mean),
        image_std=list(ours.std),
    )
    row = ours({"images": IMAGES})
    declared = ours.extras.arrays["pixel_values"]
    pixels = np.empty((len(row["pixel_values"]), *declared.row_shape), declared.dtype)
    declared.write(pixels, row["pixel_values"])
    theirs = processor([Image.open(io.BytesIO(image)) for image in IMAGES], return_tensors="np")
    assert np.array_equal(row["image_grid_thw"], theirs["image_grid_thw"])
    assert np.array_equal(pixels, theirs["pixel_values"])
    sizes = {Image.open(io.BytesIO(image)).size for image in IMAGES}
    resized = {
        (columns * ours.patch_size, rows * ours.patch_size) for _, rows, columns in row["image_grid_thw"]
    }
    assert len(sizes - resized) > 3  # most had to be resized
