"""Tokens per second from actors into one rank: a single hop, and the whole path from files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from torch.utils.data import DataLoader, Dataset

import omniload
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading import peers
from benchmarks.loading.corpus import VOCABULARY, as_arrow, write_tokens
from omniload.payload import Payload
from omniload.runtime.bundle import Bundle
from omniload.runtime.ray import cluster

_SEQ_LEN, _LANES = 8192, 16
_PACKS = 256
"""So that a step is 2.1 M tokens, 4 MiB as they travel. A message costs the same whatever is in it, so whole paths are
measured with steps of twice the size, too."""
_DOCUMENT_TOKENS = 1024

_HOP = "one hop"
_PATHS = {
    (kind, times): f"whole path, from {kind}, {4 * times} MiB a step"
    for kind in ("Parquet", "Arrow")
    for times in (1, 2)
}
_COPY = "copy of the same bytes"
_INLINE = "omniload.DataLoader, threads of the rank"


class _Holder:
    """An actor that has payload ready, as a loader has."""

    def __init__(self, num_tokens: int) -> None:
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, np.uint16)
        bounds = np.arange(0, num_tokens + 1, _DOCUMENT_TOKENS)
        places = np.stack([np.zeros_like(bounds[1:]), bounds[:-1], bounds[1:]])
        self._payload = Payload(values=[tokens], masks=[None], places=places)

    def bundle(self) -> Bundle:
        return Bundle.of(self._payload)


class _Rows(Dataset[Any]):
    """Steps' worth of tokens as ``int64``, made by a worker of torch's loader."""

    def __init__(self, num_tokens: int, count: int) -> None:
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, np.uint16)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._tokens.astype(np.int64)


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    packs, steps = settings.sized(_PACKS, 32), settings.sized(32, 4)
    num_tokens = packs * _SEQ_LEN
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, np.uint16)
    rows = peers.FixedRows(np.tile(tokens, max(1, steps // 4)), _SEQ_LEN)
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="runtime_transport-") as name,
        ExitStack() as open_,
    ):
        stored = write_tokens(Path(name), settings.sized(40_000_000, 2_000_000))
        open_.callback(cluster.end)
        ours: list[Contender] = []
        corpora = {"Parquet": stored, "Arrow": as_arrow(stored)}
        for number, ((kind, times), path) in enumerate(_PATHS.items()):
            mixture = corpora[kind].mixture(
                seed=1, seq_len=_SEQ_LEN, packs=times * packs, lanes=_LANES, steps=10**6
            )
            ours += _paths(mixture, path, f"transport-{number}", steps // times, open_)
        holder = ray.remote(_Holder).options(num_cpus=0).remote(num_tokens)
        yield [
            _contender(_COPY, _HOP, Kind.FLOOR, lambda: _copies(tokens, steps)),
            _contender("loader actor to rank", _HOP, Kind.OURS, lambda: _hops(holder, steps)),
            _contender(
                "torch worker to its loader, int64",
                _HOP,
                Kind.PEER,
                lambda: _worker_tokens(num_tokens, steps),
            ),
            *ours,
            *(
                _contender(
                    "torch DataLoader, fixed rows in memory, 2 workers",
                    path,
                    Kind.PEER,
                    lambda: _torch_tokens(rows, packs // _LANES),
                )
                for path in _PATHS.values()
            ),
        ]


def _paths(
    mixture: Mapping[str, object], measure: str, job: str, steps: int, open_: ExitStack
) -> list[Contender]:
    """The loader in the threads of the rank and on Ray."""
    keys: dict[str, Any] = {"derived": (), "timeout_s": 120}
    on_ray = omniload.DataLoader(mixture, execution="ray", ray={"job": job, "loaders": 1}, **keys)
    shared = open_.enter_context(on_ray)
    alone = open_.enter_context(omniload.DataLoader(mixture, execution="inline", **keys))
    return [
        _contender(_INLINE, measure, Kind.OURS, lambda: _taken(alone, steps)),
        _contender(f"{_INLINE} (A/A)", measure, Kind.CONTROL, lambda: _taken(alone, steps)),
        _contender("omniload.DataLoader, on Ray", measure, Kind.OURS, lambda: _taken(shared, steps)),
    ]


def _contender(name: str, measure: str, kind: Kind, run: Any) -> Contender:
    return Contender(name=name, measure=measure, kind=kind, run=run)


def _copies(tokens: np.ndarray, count: int) -> int:
    kept = np.empty_like(tokens)
    for _ in range(count):
        np.copyto(kept, tokens)
    return count * len(tokens)


def _hops(holder: Any, count: int) -> int:
    """As the rank's fetching does: two on the way."""
    total = 0
    waiting = [holder.bundle.remote() for _ in range(2)]
    for number in range(count):
        payload = ray.get(waiting.pop(0)).payload()
        if number + 2 < count:
            waiting.append(holder.bundle.remote())
        total += int((payload.places[2] - payload.places[1]).sum())
    return total


def _worker_tokens(num_tokens: int, count: int) -> int:
    loader = DataLoader(_Rows(num_tokens, count), batch_size=None, num_workers=1)
    return sum(batch.numel() for batch in loader)


def _taken(loader: Any, steps: int) -> int:
    """The next steps of a stream that goes on for ever."""
    total = 0
    for number, lanes in enumerate(loader.steps(), 1):
        total += sum(lane["input_ids"].numel() for lane in lanes)
        if number == steps:
            break
    return total


def _torch_tokens(rows: peers.FixedRows, batch_rows: int) -> int:
    loader = DataLoader(rows, batch_size=batch_rows, shuffle=True, num_workers=2)
    return sum(batch.numel() for batch in loader)


BENCHMARK = Benchmark(
    name="runtime_transport",
    measures_what="Tokens per second into one rank, from an actor that has them and from files.",
    how_to_read=(
        "A hop packs documents of 1,024 tokens into shared memory, 4 MiB at a time, and unpacks them in the rank. The"
        " whole path reads files, mixes, shuffles, packs and fills input_ids; on Ray, payload passes through shared"
        " memory, and reading and planning run in processes of their own, which on two cores share them with the rank."
        " The torch loader has its tokens in memory, and no documents."
    ),
    measures=(
        Measure(name=_HOP, unit="M tokens/s", scale=1e6, higher_is_better=True, reference=_COPY),
        *(
            Measure(name=path, unit="M tokens/s", scale=1e6, higher_is_better=True, reference=_INLINE)
            for path in _PATHS.values()
        ),
    ),
    contenders=_contenders,
)
