"""Builds the demo's data set: four sources, a tokenizer trained on them, and the mixture that names them.

The sources differ on purpose in what a loader has to cope with: `code` is several Parquet files of middling
documents, `prose` one zstd-compressed JSONL stream without random access, `long` a few documents that are
each worth tens of packs, `chat` short conversations that must not be cut. The same Python installation gives
the same bytes.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.demo import corpus

_T = TypeVar("_T")

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a document."""
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
"""The tokenizer's special tokens: the end of a document, and the marks around a message of a conversation."""

_CODE_CHARS = range(500, 40_000)
_LONG_CHARS = range(40_000, 80_000)
_NUM_CODE_FILES = 4
# The row group is the unit of shuffling and read-ahead; small ones let the first step of a run come soon.
_CODE_ROWS_PER_GROUP = 4
_LONG_ROWS_PER_GROUP = 1
_MAX_PASSAGES = 500
_MAX_DIALOGUES = 1_500
_VOCABULARY_SIZE = 4_096
_TOKENIZER_CHARS = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSize:
    """How much of the data a step takes."""

    steps: int
    """Steps of the longest run."""
    seq_len: int
    """Tokens per pack."""
    packs: int
    """Packs per step, over the whole job."""
    lanes: int
    """Microbatch slots per step; every data-parallel size used must divide it."""
    switch_step: int
    """The step at which the second stage of the schedule begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """What one source came to."""

    name: str
    """Its name in the mixture."""
    documents: int
    """Rows written."""
    num_bytes: int
    """UTF-8 bytes of text, before compression."""
    files: tuple[str, ...]
    """File names relative to the data directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """What was built."""

    mixture: Path
    """The mixture file."""
    sources: tuple[SourceFacts, ...]
    """One entry per source, in the order of the mixture."""
    vocabulary_size: int
    """Tokens the tokenizer knows."""


NUM_STAGES = 4
"""How often `build` reports progress."""


def build(
    directory: Path,
    size: MixtureSize,
    *,
    library: Path | None = None,
    on_stage: Callable[[], None] = lambda: None,
) -> DataFacts:
    """Writes sources, `tokenizer.json` and `mixture.yaml` into a directory.

    Args:
        directory: Where to write; created if absent. Files of the same names are replaced.
        size: How much of the data a step takes.
        library: The directory of Python sources to read instead of this interpreter's standard library.
        on_stage: Called after each of `NUM_STAGES` stages.

    Raises:
        CorpusError: The installation carries no Python sources.
    """
    modules = corpus.standard_library(library)
    on_stage()
    code = [module for module in modules if len(module.text) in _CODE_CHARS]
    long = [module for module in modules if len(module.text) in _LONG_CHARS]
    prose = _evenly([*corpus.docstrings(modules), *corpus.package_descriptions()], _MAX_PASSAGES)
    chat = _evenly(list(corpus.dialogues(modules)), _MAX_DIALOGUES)
    on_stage()
    sources = (
        _write_code(directory, code),
        _write_prose(directory, prose),
        _write_long(directory, long),
        _write_chat(directory, chat),
    )
    on_stage()
    tokenizer = _train_tokenizer(
        [module.text for module in code],
        [passage.text for passage in prose],
        [f"{dialogue.question}\n{dialogue.answer}" for dialogue in chat],
    )
    on_stage()
    tokenizer.save(str(directory / "tokenizer.json"))
    mixture = directory / "mixture.yaml"
    mixture.write_text(yaml.safe_dump(_mixture(size), sort_keys=False), encoding="utf-8")
    return DataFacts(mixture=mixture, sources=sources, vocabulary_size=tokenizer.get_vocab_size())


def _mixture(size: MixtureSize) -> dict[str, object]:
    """The content of `mixture.yaml`; weights are shares of tokens."""
    return {
        "seed": 42,
        "steps": size.steps,
        "seq_len": size.seq_len,
        "packs": size.packs,
        "lanes": size.lanes,
        "tokenizer": "tokenizer.json",
        "eos": END_OF_TEXT,
        "held_out": 0.01,
        "execution": "inline",  # so little data that actors would take longer to start than to read it
        "sources": {
            "code": {"path": "code/*.parquet", "weight": 0.4},
            "prose": {"path": "prose.jsonl.zst", "weight": 0.2},
            "long": {"path": "long.parquet", "weight": 0.3},
            "chat": {"path": "chat.jsonl", "weight": 0.1, "overflow": "drop"},
        },
        "schedule": [
            {"step": 0},
            {"step": size.switch_step, "weights": {"code": 0.2, "prose": 0.2, "long": 0.4, "chat": 0.2}},
        ],
    }


def _write_code(directory: Path, modules: Sequence[corpus.Module]) -> SourceFacts:
    names = []
    for index in range(_NUM_CODE_FILES):
        names.append(f"code/part-{index:05d}.parquet")
        # Dealing in turn keeps the files alike in size and in subject.
        _write_parquet(directory / names[-1], modules[index::_NUM_CODE_FILES], _CODE_ROWS_PER_GROUP)
    return _facts("code", [module.text for module in modules], names)


def _write_long(directory: Path, modules: Sequence[corpus.Module]) -> SourceFacts:
    _write_parquet(directory / "long.parquet", modules, _LONG_ROWS_PER_GROUP)
    return _facts("long", [module.text for module in modules], ["long.parquet"])


def _write_prose(directory: Path, passages: Sequence[corpus.Prose]) -> SourceFacts:
    lines = _json_lines({"title": passage.title, "text": passage.text} for passage in passages)
    (directory / "prose.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    return _facts("prose", [passage.text for passage in passages], ["prose.jsonl.zst"])


def _write_chat(directory: Path, dialogues: Sequence[corpus.Dialogue]) -> SourceFacts:
    lines = _json_lines(
        {
            "messages": [
                {"role": "user", "content": dialogue.question},
                {"role": "assistant", "content": dialogue.answer},
            ]
        }
        for dialogue in dialogues
    )
    (directory / "chat.jsonl").write_bytes(lines)
    return _facts("chat", [dialogue.question + dialogue.answer for dialogue in dialogues], ["chat.jsonl"])


def _write_parquet(path: Path, modules: Sequence[corpus.Module], rows_per_group: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "path": pa.array([module.path for module in modules], pa.string()),
            "text": pa.array([module.text for module in modules], pa.string()),
        }
    )
    pq.write_table(table, path, row_group_size=rows_per_group, compression="zstd")


def _json_lines(rows: Iterable[dict[str, object]]) -> bytes:
    out = io.StringIO()
    for row in rows:
        out.write(json.dumps(row, ensure_ascii=False))
        out.write("\n")
    return out.getvalue().encode()


def _facts(name: str, texts: Sequence[str], files: Sequence[str]) -> SourceFacts:
    num_bytes = sum(len(text.encode()) for text in texts)
    return SourceFacts(name=name, documents=len(texts), num_bytes=num_bytes, files=tuple(files))


def _train_tokenizer(*kinds: Sequence[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on about two million characters, an equal share of each kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    budget = _TOKENIZER_CHARS // len(kinds)
    samples = itertools.chain.from_iterable(
        _evenly(texts, max(1, len(texts) * budget // max(1, sum(map(len, texts))))) for texts in kinds
    )
    tokenizer.train_from_iterator(samples, trainer=trainer)
    return tokenizer


def _evenly(items: Sequence[_T], most: int) -> Sequence[_T]:
    """At most `most` items, spread evenly over all."""
    count = min(len(items), most)
    return [items[index * len(items) // count] for index in range(count)]
