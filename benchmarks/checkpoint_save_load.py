"""Save, asynchronous save and load of one process's training state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpointing.formats import (
    AsyncFormat,
    Copy,
    Format,
    Ours,
    Raw,
    Safetensors,
    TorchDcp,
    TorchSave,
    remove,
)
from benchmarks.checkpointing.state import training_state
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings

_SAVE_REFERENCE, _LOAD_REFERENCE = "pwrite + xxh3", "pread + xxh3"
_ASYNC_REFERENCE = "copy into kept memory"


class _Pending:
    """An asynchronous save between its begin, which is timed, and its end, which is not."""

    def __init__(self, form: AsyncFormat, path: Path, num_bytes: int) -> None:
        self._form = form
        self._path = path
        self._num_bytes = num_bytes
        self._finish: Callable[[], object] | None = None

    def begin(self) -> int:
        self._finish = self._form.begin(self._path)
        return self._num_bytes

    def end(self) -> None:
        assert self._finish is not None, "runs after begin"
        self._finish()
        remove(self._path)


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_save_load-") as name,
        _group_of_one(),
    ):
        state = training_state(settings.sized(2**30, 2**26))
        num_bytes, directory = state.num_bytes, Path(name)
        saved = directory / "saved"
        saved.mkdir()

        def save(name: str, kind: Kind, form: Format) -> Contender:
            path = directory / "save"

            def run() -> int:
                form.save(path)
                return num_bytes

            return Contender(name=name, measure="save", kind=kind, run=run, after=lambda: remove(path))

        def blocked(name: str, kind: Kind, form: AsyncFormat) -> Contender:
            pending = _Pending(form, directory / "async", num_bytes)
            return Contender(name=name, measure="async save", kind=kind, run=pending.begin, after=pending.end)

        def load(name: str, kind: Kind, form: Format, path: Path) -> Contender:
            def run() -> int:
                form.load(path)
                return num_bytes

            return Contender(name=name, measure="load", kind=kind, run=run)

        plain, hashed = Raw(state, hashed=False), Raw(state, hashed=True)
        copy, torch_save, ours = Copy(state, threaded=False), TorchSave(state), Ours(state)
        tensors, distributed = Safetensors(state), TorchDcp(state)
        stored: dict[str, Format] = {
            "raw": plain,
            "torch": torch_save,
            "safetensors": tensors,
            "dcp": distributed,
            "ours": ours,
        }
        for name, form in stored.items():
            form.save(saved / name)

        yield [
            save("pwrite", Kind.FLOOR, plain),
            save(_SAVE_REFERENCE, Kind.FLOOR, hashed),
            save(f"{_SAVE_REFERENCE} (A/A)", Kind.CONTROL, hashed),
            save("checkpoint.save", Kind.OURS, ours),
            save("torch.save", Kind.PEER, torch_save),
            save("safetensors save_file", Kind.PEER, tensors),
            save("torch DCP save", Kind.PEER, distributed),
            blocked(_ASYNC_REFERENCE, Kind.FLOOR, copy),
            blocked(f"{_ASYNC_REFERENCE} (A/A)", Kind.CONTROL, copy),
            blocked(f"{_ASYNC_REFERENCE}, torch threads", Kind.FLOOR, Copy(state, threaded=True)),
            blocked("checkpoint.async_save", Kind.OURS, ours),
            blocked("torch DCP async_save", Kind.PEER, distributed),
            blocked("torch DCP async_save, kept memory", Kind.PEER, TorchDcp(state, keep_staging=True)),
            load("pread", Kind.FLOOR, plain, saved / "raw"),
            load(_LOAD_REFERENCE, Kind.FLOOR, hashed, saved / "raw"),
            load(f"{_LOAD_REFERENCE} (A/A)", Kind.CONTROL, hashed, saved / "raw"),
            load("checkpoint.load", Kind.OURS, ours, saved / "ours"),
            load("torch.load", Kind.PEER, torch_save, saved / "torch"),
            load("torch.load, mmap", Kind.PEER, TorchSave(state, mmap=True), saved / "torch"),
            load("safetensors load_file", Kind.PEER, tensors, saved / "safetensors"),
            load("torch DCP load", Kind.PEER, distributed, saved / "dcp"),
        ]


@contextmanager
def _group_of_one() -> Iterator[None]:
    """The process group that torch's asynchronous save insists on."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


BENCHMARK = Benchmark(
    name="checkpoint_save_load",
    measures_what="Bytes per second of saving and loading a model with AdamW's moments, in one process.",
    how_to_read=(
        "All contenders move the same bytes, fsync what they save and load into the live tensors. async save is the"
        " time until training may go on, nothing else being in flight; the rest of the save is not timed. Only"
        " checkpoint and the contenders with xxh3 would notice a flipped bit. On a disk (--dir) writes vary by more"
        " than the contenders differ, and loads come from the page cache."
    ),
    measures=(
        Measure(name="save", unit="GB/s", scale=1e9, higher_is_better=True, reference=_SAVE_REFERENCE),
        Measure(
            name="async save",
            unit="ms blocked",
            scale=1e-3,
            higher_is_better=False,
            reference=_ASYNC_REFERENCE,
        ),
        Measure(name="load", unit="GB/s", scale=1e9, higher_is_better=True, reference=_LOAD_REFERENCE),
    ),
    contenders=_contenders,
)
