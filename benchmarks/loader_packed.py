"""Pre-tokenised Parquet to shuffled, mixed, packed lanes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading import floors, ours, peers
from benchmarks.loading.corpus import VOCABULARY, write_tokens

_SEQ_LEN = 8192
_PACKS, _LANES = 64, 16
_LANE_TOKENS = _PACKS // _LANES * _SEQ_LEN
_STEP_TOKENS = _PACKS * _SEQ_LEN

_REFERENCE = "decode + copy + derive"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="loader_packed-") as directory:
        corpus = write_tokens(Path(directory), settings.sized(40_000_000, 8_000_000))
        in_memory = np.random.default_rng(0).integers(0, VOCABULARY, corpus.num_tokens, np.uint16)
        rows = peers.FixedRows(in_memory, _SEQ_LEN)
        # Two passes' worth, so that starting up and reading ahead weigh little.
        mixture = corpus.mixture(
            seed=1,
            seq_len=_SEQ_LEN,
            packs=_PACKS,
            lanes=_LANES,
            steps=2 * corpus.num_tokens // _STEP_TOKENS,
        )

        def contender(
            name: str,
            run: Callable[[], int],
            *,
            kind: Kind = Kind.FLOOR,
            after: Callable[[], None] = lambda: None,
        ) -> Contender:
            return Contender(name=name, measure="packed", kind=kind, run=run, after=after)

        def reference() -> int:
            return floors.decode_and_build(corpus, _LANE_TOKENS)

        yield [
            contender("copy uint16 to int64", lambda: floors.copy_contiguous(in_memory, _LANE_TOKENS)),
            contender("decode, a thread per source", lambda: floors.decode_side_by_side(corpus)),
            contender("decode", lambda: floors.decode(corpus.files)),
            contender("decode + copy", lambda: floors.decode_and_copy(corpus, _LANE_TOKENS)),
            contender(_REFERENCE, reference),
            contender(f"{_REFERENCE} (A/A)", reference, kind=Kind.CONTROL),
            contender(
                "omniload.DataLoader",
                lambda: ours.packed_tokens(mixture),
                kind=Kind.OURS,
                after=ours.drain,
            ),
            contender(
                "torch DataLoader, fixed rows",
                lambda: peers.torch_loader_tokens(rows, _PACKS // _LANES),
                kind=Kind.PEER,
            ),
        ]


BENCHMARK = Benchmark(
    name="loader_packed",
    measures_what="Tokens per second from pre-tokenised Parquet to packed lanes, in one process.",
    how_to_read=(
        "The reference decodes on one thread and fills the same arrays in shuffled order, without mixing, planning"
        " or best fit. The loader reads and plans on threads of its own, so it may use more than one core: compare"
        " busy cores too. The torch DataLoader has the tokens in memory and neither documents nor a mixture."
    ),
    measures=(
        Measure(name="packed", unit="M tokens/s", scale=1e6, higher_is_better=True, reference=_REFERENCE),
    ),
    contenders=_contenders,
)
