"""Raw text in Parquet to packed lanes: tokenisation is nearly all of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading import ours, peers
from benchmarks.loading.corpus import Corpus, train_tokenizer, write_text
from benchmarks.peers import installed

_SEQ_LEN = 8192
_PACKS, _LANES = 16, 4
_LANE_TOKENS = _PACKS // _LANES * _SEQ_LEN
_STEP_TOKENS = _PACKS * _SEQ_LEN

_REFERENCE = "pyarrow + encode_batch_fast"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="loader_text-") as name:
        directory = Path(name)
        corpus = write_text(directory, settings.sized(12_000_000, 2_000_000))
        file = directory / "tokenizer.json"
        train_tokenizer(corpus, file, vocabulary=settings.sized(16_384, 2048))
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        num_tokens = peers.plain_text_tokens(corpus, tokenizer.encode_batch_fast, _LANE_TOKENS)
        mixture = corpus.mixture(
            seed=1,
            seq_len=_SEQ_LEN,
            packs=_PACKS,
            lanes=_LANES,
            tokenizer=str(file),
            steps=max(1, num_tokens // _STEP_TOKENS),
        )

        def plain(name: str, encode: peers.Encode, kind: Kind) -> Contender:
            return Contender(
                name=name,
                measure="text",
                kind=kind,
                run=lambda: peers.plain_text_tokens(corpus, encode, _LANE_TOKENS),
            )

        yield [
            plain(_REFERENCE, tokenizer.encode_batch_fast, Kind.FLOOR),
            plain(f"{_REFERENCE} (A/A)", tokenizer.encode_batch_fast, Kind.CONTROL),
            plain("pyarrow + encode_batch", tokenizer.encode_batch, Kind.PEER),
            Contender(
                name="omniload.DataLoader",
                measure="text",
                kind=Kind.OURS,
                run=lambda: ours.packed_tokens(mixture),
                after=ours.drain,
            ),
            *_peers(corpus, tokenizer, directory),
        ]


def _peers(corpus: Corpus, tokenizer: tokenizers.Tokenizer, directory: Path) -> list[Contender]:
    if not installed():
        return []
    from benchmarks.peers import text

    return text.contenders(corpus, tokenizer, directory, "text")


BENCHMARK = Benchmark(
    name="loader_text",
    measures_what="Tokens per second from text in Parquet, through a byte-level BPE, to packed lanes.",
    how_to_read=(
        "The text is that of Python's standard library, so most of it is code. The tokenizers library spreads a"
        " batch over all cores in every contender. The loader tokenises ahead of the steps it serves; those tokens"
        " are not counted, which costs it most in short runs."
    ),
    measures=(
        Measure(name="text", unit="M tokens/s", scale=1e6, higher_is_better=True, reference=_REFERENCE),
    ),
    contenders=_contenders,
)
