"""Images as patches at their native resolution, as the vision towers of Qwen2-VL and its kin take them."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from omniload.samples.builtin import BuiltIn, Row
from omniload.samples.extras import ExtraArray, Extras
from omniload.samples.sample import BadSample

if TYPE_CHECKING:
    from PIL import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_DECODED_PIXELS = 89_478_485
"""An image with more is refused before it is decoded, as a decompression bomb; Pillow's own limit."""
MAX_ASPECT_RATIO = 200
_TOKENS = "image_tokens"
_AT_ONCE = 128  # patches that are written while they are in the cache


class ImagePatches(BuiltIn):
    """Replaces the images of a row by their patches.

    Images are bytes, ``{"bytes": …, "path": …}`` with bytes, or lists of these, in the column ``images`` or ``image``;
    or in content parts ``{"type": "image", "image": …}`` of the messages. A row without images stays as it is. Bytes
    that are no image Pillow can decode whole make the row bad.

    An image is turned as its EXIF data say, laid over white where it is transparent, and resized (bicubic) so that
    both sides are multiples of ``patch_size * merge_size``, its pixels lie within the bounds and the ratio of its
    sides is kept as well as can be: ``smart_resize`` of Qwen2-VL (arXiv 2409.12191). In a lane its patches are rows of
    ``pixel_values``, ``float32[n, C * T * P * P]`` with C = 3 colours, T = ``temporal_patch_size`` times the same
    picture and P = ``patch_size``, by squares of ``merge_size``² patches that the model merges to one token;
    ``image_grid_thw``, ``int64[k, 3]``, has frames (1), rows and columns of patches of each image.
    """

    patch_size: int = Field(default=14, ge=1)
    """Pixels along a side of a patch."""
    merge_size: int = Field(default=2, ge=1)
    """Patches along a side of what becomes one token."""
    temporal_patch_size: int = Field(default=2, ge=1)
    """Frames in a patch."""
    min_pixels: int = Field(default=56 * 56, ge=1)
    """Smaller images are enlarged."""
    max_pixels: int = Field(default=28 * 28 * 1280, ge=1)
    """Larger images are made smaller."""
    mean: tuple[float, float, float] = CLIP_MEAN
    """Taken from the colours, which lie in [0, 1]."""
    std: tuple[float, float, float] = CLIP_STD
    """The difference is divided by this."""
    dtype: Literal["float32", "uint8"] = "float32"
    """``uint8``: colours in 0 … 255 as they are, for a model that normalises them itself."""
    placeholder: str | int = "<|image_pad|>"
    """Token that stands for an image in the text: its name or id. Text without any gets its images in front."""

    @model_validator(mode="after")
    def _bounds_can_be_met(self) -> Self:
        smallest = (self.patch_size * self.merge_size) ** 2
        if not self.min_pixels <= self.max_pixels >= smallest:
            raise ValueError(
                f"max_pixels: {self.max_pixels} is below min_pixels {self.min_pixels} or the {smallest} of one token"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std: {self.std} must be positive")
        _pillow()  # that it is missing is said at the start
        return self

    @functools.cached_property
    def extras(self) -> Extras:
        """The arrays added to rows; pixels are kept as bytes and once, however many frames a patch has."""
        width = 3 * self.temporal_patch_size * self.patch_size**2
        return Extras(
            arrays={
                "pixel_values": ExtraArray(dtype=self.dtype, row_shape=(width,), write=self._write),
                "image_grid_thw": ExtraArray(dtype="int64", row_shape=(3,)),
            },
            tokens=_TOKENS,
            placeholder=self.placeholder,
            encoder="image",
            units="pixel_values",
        )

    def __call__(self, row: Row) -> Row:
        """The row with patches in place of its images."""
        stored = list(_stored_images(row))
        if not stored:
            return row
        patches, grids = zip(*(self._patches(one) for one in stored), strict=True)
        kept = {key: value for key, value in row.items() if key not in ("image", "images")}
        return {
            **kept,
            "pixel_values": np.concatenate(patches),
            "image_grid_thw": np.array(grids, dtype=np.int64),
            _TOKENS: [len(one) // self.merge_size**2 for one in patches],
        }

    def _patches(self, stored: bytes) -> tuple[np.ndarray, tuple[int, int, int]]:
        """``uint8[n, C * P * P]`` and the grid of one image."""
        image = _decode(stored)
        height, width = self._target_size(image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), _pillow().Resampling.BICUBIC)
        p, m = self.patch_size, self.merge_size
        rows, columns = height // p, width // p
        pixels = np.asarray(image).reshape(rows // m, m, p, columns // m, m, p, 3)
        # → [rows/m, columns/m, m, m, C, P, P]
        return pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1), (1, rows, columns)

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise BadSample(
                f"image of {width} x {height} pixels, longer than {MAX_ASPECT_RATIO} times its width"
            )
        unit = self.patch_size * self.merge_size
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit**2 < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * enlarge / unit), math.ceil(width * enlarge / unit)
        return rows * unit, columns * unit

    @functools.cached_property
    def _normalised(self) -> np.ndarray:
        """``float32[3 * 256]``: what each value of each colour becomes."""
        scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return np.ravel((scaled - mean) / std)

    def _write(self, out: np.ndarray, kept: np.ndarray) -> None:
        by_colour = kept.reshape(len(kept), 3, self.patch_size**2)
        frames = out.reshape(len(kept), 3, self.temporal_patch_size, self.patch_size**2)
        if self.dtype == "uint8":
            frames[...] = by_colour[:, :, None]
            return
        colours = (256 * np.arange(3, dtype=np.int16))[:, None]
        for start in range(0, len(kept), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            frames[part] = np.take(self._normalised, by_colour[part] + colours)[:, :, None]


def _stored_images(row: Row) -> Iterator[bytes]:
    """The images of a row as bytes, in order."""
    stored = row.get("images") or row.get("image")
    if stored is None:
        stored = [
            part["image"]
            for message in row.get("messages") or ()
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, dict) and part.get("type") == "image" and part.get("image") is not None
        ]
    for one in stored if isinstance(stored, list | tuple) else [stored]:
        data = one.get("bytes") if isinstance(one, dict) else one
        if not isinstance(data, bytes) or not data:
            raise BadSample("image without bytes" if not data else f"image of type {type(data).__name__}")
        yield data


def _decode(stored: bytes) -> Image.Image:
    """The image, upright and in RGB."""
    pillow = _pillow()
    from PIL import ImageOps, UnidentifiedImageError

    try:
        image: Image.Image = pillow.open(io.BytesIO(stored))
        if image.width * image.height > MAX_DECODED_PIXELS:
            raise BadSample(f"image of {image.width} x {image.height} pixels, a decompression bomb")
        ImageOps.exif_transpose(image, in_place=True)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
            image = pillow.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except (BadSample, MemoryError):
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise BadSample("image with too many pixels, a decompression bomb") from None
    except UnidentifiedImageError:  # its message has an address of memory in it
        raise BadSample("image of no format that Pillow knows") from None
    except Exception as error:  # of bytes in memory, so whatever it is, it is the bytes'
        reason = " ".join(str(error).split())
        raise BadSample(f"image cannot be decoded: {reason or type(error).__name__}") from None


@functools.cache
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("needs Pillow; pip install pillow") from error
    Image.init()  # all formats, before threads ask for them
    return Image
