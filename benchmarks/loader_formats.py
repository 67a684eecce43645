"""Pre-tokenised documents, in the formats that people have them in, to packed batches: peers and ours."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading import floors, ours
from benchmarks.loading.corpus import VOCABULARY, Corpus, write_tokens
from omniload.constructor import DERIVED

_SEQ_LEN = 8192
_PACKS, _LANES = 256, 32
"""A step of 2.1 M tokens, as is usual; lanes as large as the batches of the peers."""
_LANE_TOKENS = _PACKS // _LANES * _SEQ_LEN
_STEP_TOKENS = _PACKS * _SEQ_LEN
_PASSES = 3
"""Over the documents, for who is so fast that starting up would weigh."""

_ALONE, _DERIVED, _WORKERS = "one process", "one process, derived arrays too", "two workers"
_REFERENCE = "megatron-core IndexedDataset + numpy packer"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="loader_formats-") as name:
        directory = Path(name)
        corpus = write_tokens(directory, settings.sized(40_000_000, 2_000_000))
        formats = _write_formats(corpus, directory)
        yield [*_floors(corpus), *_ours(corpus, formats), *_peers(corpus, formats, directory)]


def _documents(files: Sequence[Path]) -> Iterator[np.ndarray]:
    """``uint16[n]``: the documents of Parquet files in stored order."""
    for path in files:
        column = pq.read_table(path)["input_ids"].combine_chunks()
        tokens = column.values.to_numpy().astype(np.uint16)
        yield from (tokens[a:b] for a, b in itertools.pairwise(column.offsets.to_numpy().tolist()))


def _write_formats(corpus: Corpus, directory: Path) -> dict[str, dict[str, Path]]:
    """Every source in every format that ours and peers share: paths by format and source."""
    from benchmarks.peers import huggingface, megatron, mosaicml

    found: dict[str, dict[str, Path]] = {"Megatron": {}, "MDS": {}, "Arrow": {}}
    for source, files in corpus.sources.items():
        samples = ({"input_ids": document} for document in _documents(files))
        encoding = {"input_ids": "ndarray:uint16"}
        found["Megatron"][source] = megatron.write(_documents(files), directory / source)
        found["MDS"][source] = mosaicml.write(samples, encoding, directory / f"{source}-mds")
        found["Arrow"][source] = huggingface.write(files, directory / f"{source}-arrow")
    return found


def _floors(corpus: Corpus) -> list[Contender]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, corpus.num_tokens, np.uint16)
    runs: list[tuple[str, str, Callable[[], int]]] = [
        ("copy uint16 to int64", _ALONE, lambda: floors.copy_contiguous(tokens, _LANE_TOKENS)),
        ("Parquet, decode", _ALONE, lambda: floors.decode(corpus.files)),
        ("Parquet, decode + copy + derive", _DERIVED, lambda: floors.decode_and_build(corpus, _LANE_TOKENS)),
    ]
    return [Contender(name=name, measure=measure, kind=Kind.FLOOR, run=run) for name, measure, run in runs]


def _ours(corpus: Corpus, formats: dict[str, dict[str, Path]]) -> list[Contender]:
    """The loader on each format; it has threads in place of workers, so its run is the same with two workers."""
    steps = _PASSES * corpus.num_tokens // _STEP_TOKENS
    corpora = {"Parquet": corpus}
    for name, paths in formats.items():
        corpora[name] = replace(corpus, sources={source: (path,) for source, path in paths.items()})

    def contender(name: str, of: Corpus, measure: str) -> Contender:
        mixture = of.mixture(seed=1, seq_len=_SEQ_LEN, packs=_PACKS, lanes=_LANES, steps=steps)
        return Contender(
            name=f"omniload, {name}",
            measure=measure,
            kind=Kind.OURS,
            run=lambda: ours.packed_tokens(mixture, () if measure == _ALONE else DERIVED),
            after=ours.drain,
        )

    return [
        contender(name, of, measure)
        for measure in (_ALONE, _DERIVED, _WORKERS)
        for name, of in corpora.items()
    ]


def _peers(corpus: Corpus, formats: dict[str, dict[str, Path]], directory: Path) -> list[Contender]:
    from benchmarks.peers import grains, huggingface, lightning, megatron, mosaicml, tars
    from benchmarks.peers.packed import packed_tokens, with_workers

    paths = {name: list(of.values()) for name, of in formats.items()}
    indexed = megatron.Indexed(paths["Megatron"], _PASSES)
    gpt = megatron.GptRows(paths["Megatron"], directory / "gpt")
    chunks = lightning.write(_documents(corpus.files), directory / "litdata")
    saved = huggingface.MapStyle(paths["Arrow"], "input_ids")
    streamed = huggingface.streamed(corpus.files, "input_ids")
    in_memory = list(_documents(corpus.files))
    records = grains.records([grains.write((one.tobytes() for one in in_memory), directory / "records")])
    archives = tars.write(map(tars.as_npy, in_memory), "npy", directory / "tars")
    npy = tars.Shuffled(archives, "npy")
    # One for each number of workers, since a dataset does not get over a change of it.
    shards = {workers: mosaicml.Shuffled(paths["MDS"], "input_ids") for workers in (0, 2)}
    runs: dict[str, Callable[[int], int]] = {
        _REFERENCE: lambda workers: packed_tokens(indexed, workers),
        f"{_REFERENCE} (A/A)": lambda workers: packed_tokens(indexed, workers),
        "litdata TokensLoader": lambda workers: lightning.tokens(chunks, _PASSES, workers),
        "datasets, rows": lambda workers: huggingface.packed_tokens(saved.rows, workers),
        "datasets, Arrow batches": lambda workers: huggingface.packed_tokens(saved.batches, workers),
        "datasets, streaming": lambda workers: huggingface.packed_tokens(streamed, workers),
        "grain, ArrayRecord": lambda workers: grains.packed_tokens(records, grains.as_tokens, workers),
        "grain, in memory": lambda workers: grains.packed_tokens(in_memory, grains.as_tokens, workers),
        "webdataset": lambda workers: packed_tokens(npy, workers),
        "mosaicml-streaming": lambda workers: packed_tokens(shards[workers], workers),
    }

    def contender(name: str, run: Callable[[int], int], measure: str) -> Contender:
        def loaded() -> int:
            tokens = run(2 if measure == _WORKERS else 0)
            assert tokens > 0.95 * corpus.num_tokens, f"{tokens} of {corpus.num_tokens} tokens were delivered"
            return tokens

        return Contender(
            name=name,
            measure=measure,
            kind=Kind.CONTROL if name.endswith("(A/A)") else Kind.PEER,
            run=loaded,
            cpu_seconds=with_workers,
        )

    with_derived: dict[str, Callable[[int], int]] = {
        _REFERENCE: lambda workers: packed_tokens(indexed, workers, derived=True),
        f"{_REFERENCE} (A/A)": lambda workers: packed_tokens(indexed, workers, derived=True),
        "megatron-core GPTDataset": lambda workers: gpt.tokens(_PASSES, workers),
    }
    # Its workers would each be sent all documents.
    with_workers_too = {name: run for name, run in runs.items() if name != "grain, in memory"}
    return [
        contender(name, run, measure)
        for measure, some in ((_ALONE, runs), (_DERIVED, with_derived), (_WORKERS, with_workers_too))
        for name, run in some.items()
    ]


def _measure(name: str) -> Measure:
    return Measure(name=name, unit="M tokens/s", scale=1e6, higher_is_better=True, reference=_REFERENCE)


BENCHMARK = Benchmark(
    name="loader_formats",
    measures_what="Tokens per second from pre-tokenised documents in each format to batches of packed rows.",
    how_to_read=(
        "Ours mixes two sources, shuffles in windows and packs by best fit. litdata laid its rows end to end when it"
        " wrote them. All others shuffle documents and lay them end to end with the same packer, or with their own;"
        " grain delivers positions and segments too. Derived arrays are targets, positions and segments: the reference"
        " makes them with numpy, GPTDataset by itself. Ours has threads in place of workers: with two workers it is the"
        " run with derived arrays again, so compare busy cores. Starting two workers is part of a run."
    ),
    measures=tuple(map(_measure, (_ALONE, _DERIVED, _WORKERS))),
    contenders=_contenders,
)
