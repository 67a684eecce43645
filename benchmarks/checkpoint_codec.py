"""Compression of bfloat16 weights, on one core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import zstandard

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from checkpoint.format.codec import RAW_PIECE_BYTES, decode_piece, encode_piece

_OURS, _PLAIN = "byte planes, zstd", "zstd alone"
_ITEMSIZE = 2


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    num_bytes = settings.sized(128 << 20, 8 << 20)
    torch.manual_seed(0)
    weights = torch.randn(num_bytes // _ITEMSIZE).mul_(0.02).bfloat16()
    raw = weights.view(torch.uint8).numpy()
    pieces = [raw[begin : begin + RAW_PIECE_BYTES].data for begin in range(0, num_bytes, RAW_PIECE_BYTES)]
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    split = [encode_piece(piece, _ITEMSIZE) for piece in pieces]
    plain = [compressor.compress(piece) for piece in pieces]
    out = np.empty(RAW_PIECE_BYTES, dtype=np.uint8)

    def encode() -> int:
        for piece in pieces:
            encode_piece(piece, _ITEMSIZE)
        return num_bytes

    def encode_plain() -> int:
        for piece in pieces:
            compressor.compress(piece)
        return num_bytes

    def decode() -> int:
        for stored, piece in zip(split, pieces, strict=True):
            decode_piece(stored, _ITEMSIZE, out[: len(piece)], "benchmark")
        return num_bytes

    def decode_plain() -> int:
        for stored in plain:
            out[:] = np.frombuffer(decompressor.decompress(stored), dtype=np.uint8)
        return num_bytes

    def times_smaller(stored: Sequence[bytes]) -> int:
        return 1000 * num_bytes // sum(map(len, stored))

    yield [
        Contender(name=_OURS, measure="compress", kind=Kind.OURS, run=encode),
        Contender(name=_PLAIN, measure="compress", kind=Kind.PEER, run=encode_plain),
        Contender(name=f"{_PLAIN} (A/A)", measure="compress", kind=Kind.CONTROL, run=encode_plain),
        Contender(name=_OURS, measure="decompress", kind=Kind.OURS, run=decode),
        Contender(name=_PLAIN, measure="decompress", kind=Kind.PEER, run=decode_plain),
        Contender(name=f"{_PLAIN} (A/A)", measure="decompress", kind=Kind.CONTROL, run=decode_plain),
        Contender(name=_OURS, measure="size", kind=Kind.OURS, run=lambda: times_smaller(split)),
        Contender(name=_PLAIN, measure="size", kind=Kind.PEER, run=lambda: times_smaller(plain)),
    ]


BENCHMARK = Benchmark(
    name="checkpoint_codec",
    measures_what="Speed and gain of compressing weights piece by piece, on one core.",
    how_to_read=(
        "Bytes are those before compression. The weights are random and normal, in bfloat16: their exponents can be"
        " compressed, their mantissas cannot. Trained weights gain about as much; moments of AdamW in float32 less."
    ),
    measures=(
        Measure(name="compress", unit="GB/s", scale=1e9, higher_is_better=True, reference=_PLAIN),
        Measure(name="decompress", unit="GB/s", scale=1e9, higher_is_better=True, reference=_PLAIN),
        Measure(
            name="size",
            unit="times smaller",
            scale=1000,
            higher_is_better=True,
            reference=_PLAIN,
            timed=False,
        ),
    ),
    contenders=_contenders,
)
