"""Images for the tests, made from a seed."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(width: int, height: int, *, mode: str = "RGB", format: str = "PNG", seed: int = 0) -> bytes:  # noqa: A002
    """A smooth random picture, encoded."""
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    generator = np.random.default_rng([seed, width, height])
    coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, channels), dtype=np.uint8)
    image = Image.fromarray(coarse.squeeze(2) if channels == 1 else coarse)
    stream = io.BytesIO()
    image.resize((width, height), Image.Resampling.BICUBIC).save(stream, format)
    return stream.getvalue()
