"""Rows with images become patches and placeholder tokens; what cannot be decoded is quarantined."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("PIL")

from PIL import Image

from omniload.client import DataLoader
from omniload.errors import MixtureError, SampleError
from omniload.mixture import TransformSpec
from omniload.pieces import Cursor
from omniload.runtime.chaos import Chaos
from omniload.samples.images import MAX_DECODED_PIXELS, ImagePatches
from omniload.samples.sample import BadSample
from omniload.samples.transforms import Transform
from tests.omniload.images import picture
from tests.omniload.loading import byte_tokenizer, decode, loader_of
from tests.omniload.mixtures import on_both_runtimes

SMALL = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 12}
PAD = "<|image_pad|>"
PATCH_BYTES = 3 * 4 * 4


def patches(**keys: Any) -> ImagePatches:
    return ImagePatches(**{**SMALL, **keys})


def spec(**keys: Any) -> dict[str, Any]:
    return {"call": "image_patches", "args": {**SMALL, "placeholder": "<eos>", **keys}}


def in_lane(transform: ImagePatches, kept: np.ndarray, name: str = "pixel_values") -> np.ndarray:
    declared = transform.extras.arrays[name]
    out = np.full((len(kept), *declared.row_shape), 77, declared.dtype)
    declared.write(out, kept)
    return out


def test_patches_are_ordered_by_squares_that_the_model_merges() -> None:
    image = np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    transform = patches(dtype="uint8")
    row = transform({"image": stream.getvalue(), "text": "x"})
    assert row.keys() == {"text", "pixel_values", "image_grid_thw", "image_tokens"}
    assert row["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert row["image_tokens"] == [6]
    laid = in_lane(transform, row["pixel_values"])
    expected = [
        image[4 * (2 * r + y) :][:4, 4 * (2 * c + x) :][:, :4].transpose(2, 0, 1)
        for r in range(2)
        for c in range(3)
        for y in range(2)
        for x in range(2)
    ]
    for patch, colours in zip(laid, expected, strict=True):
        assert np.array_equal(patch.reshape(3, 2, 4, 4), np.repeat(colours[:, None], 2, axis=1))


def test_colours_are_normalised_in_the_lane_and_kept_as_bytes_before() -> None:
    transform = patches(mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0), temporal_patch_size=1)
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 51)).save(stream, "PNG")
    kept = transform({"images": [stream.getvalue()]})["pixel_values"]
    assert kept.dtype == np.uint8
    assert kept.shape == (4, PATCH_BYTES)
    laid = in_lane(transform, kept)
    assert laid.dtype == np.float32
    assert np.unique(laid.reshape(4, 3, 16)[:, 0]).tolist() == [1.0]
    assert np.unique(laid.reshape(4, 3, 16)[:, 1]).tolist() == [-1.0]
    assert np.allclose(laid.reshape(4, 3, 16)[:, 2], 0.2)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 400))
def test_sizes_are_multiples_of_a_token_and_within_the_bounds(width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    stream = io.BytesIO()
    Image.new("L", (width, height)).save(stream, "PNG")
    row = patches()({"image": stream.getvalue()})
    _, rows, columns = row["image_grid_thw"][0].tolist()
    assert rows % 2 == columns % 2 == 0
    assert len(row["pixel_values"]) == rows * columns == 4 * row["image_tokens"][0]
    # A side is never below one token, which for a very long image is more than the bound.
    assert rows * columns * 16 <= 64 * 12 or min(rows, columns) == 2


def test_an_image_is_turned_as_its_camera_says_and_laid_over_white() -> None:
    image = Image.new("RGB", (8, 16))
    image.paste((255, 0, 0), (0, 0, 8, 8))
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(stream, "PNG", exif=exif)
    row = patches()({"image": stream.getvalue()})
    assert row["image_grid_thw"].tolist() == [[1, 2, 4]]
    clear = io.BytesIO()
    Image.new("RGBA", (8, 8), (1, 2, 3, 0)).save(clear, "PNG")
    assert set(patches()({"image": clear.getvalue()})["pixel_values"].ravel().tolist()) == {255}


def test_images_are_found_wherever_rows_keep_them() -> None:
    one, two = picture(8, 8), picture(16, 8)
    stored = [
        {"image": one},
        {"image": {"bytes": one, "path": None}},
        {"images": [{"bytes": one, "path": "x.png"}, two]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": {"bytes": one}}, {"type": "text"}]},
                {"role": "user", "content": "text"},
                {"role": "user", "content": [{"type": "image", "image": two}, {"type": "image"}]},
            ]
        },
    ]
    assert [len(patches()(dict(row))["image_tokens"]) for row in stored] == [1, 1, 2, 2]
    for none in (
        {"text": "x"},
        {"image": None},
        {"images": []},
        {"messages": [{"content": [{"type": "image"}]}]},
    ):
        assert patches()(dict(none)) == none


def png_of(width: int, height: int) -> bytes:
    """An image whose pixels nobody should ask for."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b""))]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


JPEG = picture(64, 64, format="JPEG")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "image without bytes"),
        ({"bytes": None, "path": "elsewhere.png"}, "image without bytes"),
        ("elsewhere.png", "image of type str"),
        ([1, 2], "image of type int"),
        (b"no image", "no format that Pillow knows"),
        (JPEG[:-300], "truncated"),
        (JPEG[:20], "no format that Pillow knows"),
        (picture(64, 64)[:-40], "image cannot be decoded"),
        (picture(8 * 300, 8), "longer than 200 times"),
        (png_of(30_000, 30_000), "decompression bomb"),
        (png_of(10_000, MAX_DECODED_PIXELS // 10_000 + 1), "decompression bomb"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_decoded_whole_is_a_bad_sample(image: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=reason) as error:
        Transform("a", TransformSpec(**spec()))({"image": image}, 0)
    assert "\n" not in str(error.value)
    assert "0x" not in str(error.value)  # no address of memory: the same reason in any process


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=40), st.integers(0, 600), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]))
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_never_end_the_run(noise: bytes, at: int, format: str) -> None:  # noqa: A002
    data = bytearray(picture(24, 24, format=format))
    data[at : at + len(noise)] = noise
    try:
        row = patches()({"image": bytes(data)})
    except BadSample:
        return
    assert len(row["pixel_values"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_pixels": 10}, "max_pixels: 10 is below min_pixels 64"),
        ({"std": [1, 0, 1]}, "std"),
        ({"patch_size": 0}, "patch_size: Input should be greater than or equal to 1"),
        ({"patchsize": 4}, "takes no argument 'patchsize'"),
        ({"dtype": "float16"}, "dtype: Input should be 'float32' or 'uint8'"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_at_once(args: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message) as error:
        Transform("a", TransformSpec(**spec(**args)))
    assert "\n" not in str(error.value)


ROWS: list[dict[str, Any]] = [
    {"text": "no image", "image": None, "images": None},
    {"text": "<eos>one and two<eos>", "images": [picture(8, 8), picture(24, 16)]},
    {"text": "in front", "image": picture(16, 8)},
    {"text": "<eos>one too many", "images": [picture(8, 8), picture(8, 8)]},
    {"text": "<eos>and none", "images": None},
]


def test_placeholders_are_written_out_and_not_trained_on() -> None:
    loader = loader_of(
        {"x": ROWS},
        transforms=(spec(),),
        tokenizer=byte_tokenizer(),
        seq_len=64,
        shuffle="none",
        block_rows=9,
    )
    chunk = loader.read(Cursor(), 100)
    payload = loader.payload(chunk.pieces)
    assert [decode(tokens) for tokens in payload.tokens] == [
        "no image",
        "<eos>one and two" + "<eos>" * 6,
        "<eos>" * 2 + "in front",
    ]
    assert payload.loss_mask[0] is None
    assert payload.arrays is not None
    assert payload.arrays[0] == {}
    for tokens, mask, arrays in zip(
        payload.tokens[1:], payload.loss_mask[1:], payload.arrays[1:], strict=True
    ):
        assert mask is not None
        assert np.array_equal(~mask, tokens == byte_tokenizer().token_id("<eos>"))
        assert len(arrays["pixel_values"]) == 4 * (~mask).sum() == arrays["image_grid_thw"].prod(axis=1).sum()
    assert [failure.reason for failure in loader.failures] == [
        "1 placeholders for 2 items of 2 tokens",
        "1 placeholders for 0 items of 0 tokens",
    ]
    assert loader.buffered_bytes > sum(len(a.get("pixel_values", ())) for a in payload.arrays) * PATCH_BYTES


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop", "error"])
def test_a_sample_with_images_is_never_cut(overflow: str) -> None:
    rows = [
        {"text": "t" * 30, "image": None},
        {"text": "i" * 30, "image": picture(8, 8)},
        {"text": "i", "image": picture(8, 8)},
    ]
    loader = loader_of(
        {"x": rows[1:] if overflow == "error" else rows},
        transforms=(spec(),),
        tokenizer=byte_tokenizer(),
        seq_len=16,
        shuffle="none",
        overflow=overflow,
    )
    if overflow == "error":
        with pytest.raises(SampleError, match="31 tokens, over seq_len 16"):
            loader.read(Cursor(), 100)
        return
    chunk = loader.read(Cursor(), 100)
    with_images = loader.payload(chunk.pieces).arrays
    assert with_images is not None
    assert [bool(arrays) for arrays in with_images] == [False] * (len(chunk.pieces) - 1) + [True]
    if overflow == "drop":
        assert chunk.dropped.tolist() == [30, 31, 0]
        assert not loader.failures
    else:
        assert [failure.reason for failure in loader.failures] == ["31 tokens with images exceed seq_len 16"]


def vision_mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    """A source of chats with images and one of text."""
    byte_tokenizer_file(folder / "tokenizer.json")
    chats = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}] * (i % 3) + [{"type": "text", "text": "?" * i}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": f"{i}"}]},
            ],
            "images": [{"bytes": picture(8 * (1 + j), 8, seed=i), "path": None} for j in range(i % 3)],
        }
        for i in range(40)
    ]
    (folder / "chats").mkdir()
    pq.write_table(pa.Table.from_pylist(chats), folder / "chats/0.parquet", row_group_size=7)
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(90)]}), folder / "text.parquet")
    return {
        "seq_len": 128,
        "packs": 4,
        "lanes": 4,
        "tokenizer": str(folder / "tokenizer.json"),
        "sources": {
            "chats": {
                "path": str(folder / "chats"),
                "weight": 1,
                "transforms": [spec(placeholder=PAD)],
                "on_exhausted": "drop_source",
            },
            "text": {"path": str(folder / "text.parquet"), "weight": 1, "on_exhausted": "drop_source"},
        },
        **keys,
    }


def byte_tokenizer_file(path: Path) -> None:
    """`byte_tokenizer` with the tokens of images."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|vision_start|>", PAD, "<|vision_end|>"])
    made.save(str(path))


@on_both_runtimes
def test_every_lane_carries_the_images_of_its_placeholders_in_order(tmp_path: Path) -> None:
    mixture = vision_mixture(tmp_path)
    with DataLoader(mixture) as loader:
        lanes = list(loader)
        origins = [loader.samples(lane) for lane in lanes]
    assert {int(len(lane["image_grid_thw"]) > 0) for lane in lanes} == {0, 1}  # also lanes without images
    pad = 259
    seen = 0
    for lane, origin in zip(lanes, origins, strict=True):
        pixels, grid = lane["pixel_values"], lane["image_grid_thw"]
        of_chats = origin.filter(pa.compute.equal(origin["source"], "chats"))
        assert len(grid) == sum(row % 3 for row in of_chats["row"].to_pylist())
        assert tuple(pixels.shape) == (int(grid.prod(dim=1).sum()), 2 * PATCH_BYTES)
        assert tuple(grid.shape) == (len(grid), 3)
        assert (pixels.dtype, grid.dtype) == (lane["pixel_values"].dtype, lane["input_ids"].dtype)
        at = lane["input_ids"].ravel() == pad
        assert int(at.sum()) == len(pixels) // 4
        assert not (lane["targets"].ravel() == pad).any()
        # Each image follows a <|vision_start|>; their widths, in order, are those of the grid.
        starts = np.flatnonzero((lane["input_ids"].ravel() == pad - 1).numpy())
        runs = [int((~at[start + 1 :].numpy()).argmax()) for start in starts.tolist()]
        assert runs == (grid[:, 1] * grid[:, 2] // 4).tolist()
        seen += len(grid)
    assert seen > 20


@on_both_runtimes
def test_images_do_not_depend_on_timing_buffers_and_loaders(tmp_path: Path) -> None:
    mixture = vision_mixture(tmp_path)
    quiet = list(DataLoader(mixture))
    disturbed = list(DataLoader(mixture, chaos=Chaos(seed=3, evict_probability=0.9), buffer_bytes=0))
    for one, other in zip(quiet, disturbed, strict=True):
        for key in ("input_ids", "targets", "pixel_values", "image_grid_thw"):
            assert np.array_equal(one[key], other[key]), key


def test_a_mixture_without_images_has_no_such_keys(tmp_path: Path) -> None:
    mixture = vision_mixture(tmp_path)
    del mixture["sources"]["chats"]
    lane = next(iter(DataLoader(mixture)))
    assert "pixel_values" not in lane
    assert "image_grid_thw" not in lane


def test_sources_whose_patches_differ_in_shape_are_refused(tmp_path: Path) -> None:
    mixture = vision_mixture(tmp_path)
    other = {**mixture["sources"]["chats"], "transforms": [spec(placeholder=PAD, patch_size=2)]}
    mixture["sources"]["more"] = other
    with pytest.raises(
        MixtureError, match=r"'more': 'pixel_values' has rows of float32\[24\], those of another"
    ):
        list(DataLoader(mixture))
