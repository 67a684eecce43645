"""Compressed pieces: exact for any bytes, small for weights, and no memory for what only claims to be large."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.errors import FormatError
from checkpoint.format.codec import (
    RAW_PIECE_BYTES,
    decode_piece,
    encode_piece,
    max_stored_bytes,
)

ITEMSIZES = [1, 2, 4, 8, 16]


def decoded(stored: bytes, num_bytes: int, itemsize: int) -> bytes:
    out = np.full(num_bytes, 0xAA, dtype=np.uint8)
    decode_piece(stored, itemsize, out, "here")
    return out.tobytes()


@given(st.sampled_from(ITEMSIZES), st.data())
def test_any_bytes_come_back(itemsize: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    raw = data.draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    stored = encode_piece(raw, itemsize)
    assert decoded(stored, len(raw), itemsize) == raw
    assert len(stored) <= max_stored_bytes(len(raw))


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_a_whole_piece_of_noise_comes_back_and_grows_no_more_than_allowed(itemsize: int) -> None:
    raw = np.random.default_rng(itemsize).bytes(RAW_PIECE_BYTES)
    stored = encode_piece(raw, itemsize)
    assert len(raw) < len(stored) <= max_stored_bytes(len(raw))
    assert decoded(stored, len(raw), itemsize) == raw


def test_the_planes_are_the_bytes_of_the_elements_first_to_last() -> None:
    raw = bytes(range(12))
    assert zstandard.decompress(encode_piece(raw, 4)) == bytes([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])


def test_planes_make_weights_smaller_than_zstd_alone_does() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(RAW_PIECE_BYTES // 2, generator=generator).mul_(0.02).bfloat16()
    raw = weights.view(torch.uint8).numpy()
    planes, plain = encode_piece(raw, 2), encode_piece(raw, 1)
    assert len(raw) / len(planes) > 1.4 > 1.35 > len(raw) / len(plain)


GOOD = encode_piece(bytes(1000), 2)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (b"", "not a zstd frame"),
        (b"not zstd at all", "not a zstd frame"),
        (GOOD[:-1], "not a zstd frame"),
        (GOOD + b"\0", "not a zstd frame"),
        (GOOD + GOOD, "not a zstd frame"),
        (encode_piece(bytes(998), 2), "claims to hold 998 bytes, not 1000"),
        (encode_piece(bytes(1002), 2), "claims to hold 1002 bytes, not 1000"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), "claims to hold"),
        # A skippable frame of 1000 bytes: a valid stream that decompresses to nothing.
        (
            (0x184D2A50).to_bytes(4, "little") + (1000).to_bytes(4, "little") + bytes(1000),
            "decompressed 0 bytes",
        ),
    ],
)
def test_what_is_not_one_frame_of_the_right_size_is_refused(stored: bytes, words: str) -> None:
    with pytest.raises(FormatError, match="here: ") as caught:
        decoded(stored, 1000, 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_damage_is_refused_or_harmless() -> None:
    """Digests are checked before; here the frame alone must never do worse than give wrong bytes."""
    raw = np.arange(5000, dtype=np.uint16).tobytes()
    stored = encode_piece(raw, 2)
    refused = 0
    for position in range(0, len(stored), 7):
        damaged = bytearray(stored)
        damaged[position] ^= 0x55
        try:
            decoded(bytes(damaged), len(raw), 2)
        except FormatError:
            refused += 1
    assert refused


def test_a_bomb_is_refused_before_memory_is_allocated_for_it() -> None:
    """A frame of a few kilobytes that truthfully claims 64 GiB, in a process that may not have 1 GiB more."""
    script = """
import resource
import numpy as np, zstandard
from checkpoint.errors import FormatError
from checkpoint.format.codec import decode_piece
block = 128 << 10
# Frame header: 8-byte content size, single segment; blocks of one repeated byte (type RLE), 4 bytes each.
rle = (block << 3 | 0b010).to_bytes(3, "little") + b"\\0"
last = (block << 3 | 0b011).to_bytes(3, "little") + b"\\0"
def frame(size):
    num = size // block
    header = (0xFD2FB528).to_bytes(4, "little") + bytes([0b11100000]) + size.to_bytes(8, "little")
    return header + rle * (num - 1) + last
assert zstandard.decompress(frame(1 << 20)) == bytes(1 << 20)  # the recipe makes valid frames
bomb = frame(64 << 30)
out = np.empty(1 << 20, np.uint8)
lied = frame(1 << 20)[:5] + (1 << 20).to_bytes(8, "little") + bomb[13:]  # claims 1 MiB, holds 64 GiB
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for stored in (bomb, lied):
    try:
        decode_piece(stored, 2, out, "here")
    except FormatError as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, ended.stdout
    assert f"claims to hold {64 << 30} bytes" in lines[0]
    assert "not a zstd frame" in lines[1]
