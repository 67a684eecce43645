"""The SourceLoader role: reads a source, publishes metadata in its order, hands out payload by address."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from omniload.digests import Digests
from omniload.errors import MixtureError, SampleError, StateError
from omniload.mixture import Mixture, SourceSpec
from omniload.payload import Payload
from omniload.pieces import Cursor, Failure, SampleChunk
from omniload.samples.buffer import BUFFER_BYTES
from omniload.samples.chat import ChatTemplate
from omniload.samples.convention import Convention
from omniload.samples.cut import Labels
from omniload.samples.prepare import Preparer, id_limit
from omniload.samples.preparing import PreparingReader
from omniload.samples.pretokenised import PretokenisedReader
from omniload.samples.reader import SampleReader
from omniload.samples.run import Run, RunPart, make_chunk
from omniload.samples.tokenize import Tokenizer
from omniload.samples.transforms import Transform
from omniload.samples.window import LoadedWindow, Policy
from omniload.sources import open_source
from omniload.sources.order import Order, Shuffle
from omniload.sources.protocol import FileEntry, Source
from omniload.sources.serial import SerialSource
from omniload.sources.shuffled import ShuffledRows
from omniload.sources.split import Split

_KEPT_FAILURES = 1000
_MOST_BAD_ROWS = 1 << 14
"""Bad rows that a chunk is not made to exceed by another run: each is an object, until it is written or counted."""
_UNBOUNDED = 2**63 - 1
_LEAST_PART = 256
"""Rows of a window below which it is not divided."""
_SELDOM_S = 1.0
"""Between windows; where they come faster, taking fresh memory for each would cost a sixth of the time."""


class SourceLoader:
    """Reads one source.

    All methods may be called from any thread: reads take turns, and payload that is prepared already is handed out
    while a read is under way.

    ``read`` and ``payload`` are pure functions of the data, the configuration and their arguments: buffers,
    evictions and the calls made before change only how long they take.

    Args:
        source: the rows.
        spec: the source's part of the mixture.
        name: its name in the mixture.
        seed: seed of the mixture.
        seq_len: tokens per pack, so the longest piece.
        labels: convention of the labels, which decides what counts as a target.
        tokenizer: needed for sources that are not pre-tokenised.
        eos: name or id of the token appended to every sample that is made from text.
        chat_template: how messages become text if the source does not say: a built-in template's name, or a file.
        shuffle: order of the rows.
        window_blocks: blocks per shuffle window.
        held_out: fraction of the rows that are held out of training.
        split: which of the rows to read; the others count as rows that give nothing.
        buffer_bytes: bound on the payload kept; the blocks of the window being read come on top.

    Raises:
        MixtureError: a transform or token that does not exist; text without a tokenizer.
        ColumnMissing: the first file has no column that can be read.
        CorruptSource: the first file cannot be read.
    """

    def __init__(
        self,
        source: Source,
        spec: SourceSpec,
        *,
        name: str,
        seed: int,
        seq_len: int,
        labels: Labels = "shifted",
        tokenizer: Tokenizer | None = None,
        eos: str | int | None = None,
        chat_template: str = "chatml",
        shuffle: Shuffle = "window",
        window_blocks: int = 4,
        held_out: float = 0.0,
        split: Split = "train",
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.name = name
        self.failures: deque[Failure] = deque(maxlen=_KEPT_FAILURES)
        """The rows quarantined last; one that is read again is listed again."""
        self._shuffled = None
        if shuffle == "global":
            self._shuffled = ShuffledRows(source, seed=seed, split=split, held_out=held_out)
            split, held_out = "train", 0.0  # it gives only rows of the split
        self._source: Source = SerialSource(self._shuffled or source)
        self._spec = spec
        self._seed = seed
        self._seq_len = seq_len
        self._policy = Policy(
            source=name,
            seed=seed,
            split=split,
            held_out=held_out,
            seq_len=seq_len,
            overflow=spec.overflow,
            labels=labels,
        )
        self._order = Order(seed=seed, name=name, shuffle=shuffle, window_blocks=window_blocks)
        self._longest = seq_len if spec.overflow == "truncate" else _UNBOUNDED
        self._window: LoadedWindow | None = None
        self._loaded_s = -_SELDOM_S
        self._reading = threading.Lock()
        transforms = tuple(Transform(name, one) for one in spec.transforms)
        template = ChatTemplate.load(spec.chat_template or chat_template)
        self._reader = self._make_reader(transforms, tokenizer, eos, template, buffer_bytes)
        self._others = {
            "template": template.fingerprint if isinstance(self._reader, PreparingReader) else "",
            "tokenizer": tokenizer.fingerprint if tokenizer else "",
            "transforms": "-".join(transform.fingerprint for transform in transforms),
        }

    def _make_reader(
        self,
        transforms: tuple[Transform, ...],
        tokenizer: Tokenizer | None,
        eos: str | int | None,
        template: ChatTemplate,
        buffer_bytes: int,
    ) -> SampleReader[Any]:
        """Choose how samples are made, by what the first file holds; its index or first rows are read."""
        schema = self._source.schema(0) if self._source.files and not transforms else None
        convention = Convention(self._spec.column, self._spec.columns)
        columns: Callable[[Sequence[str]], list[str]] | None = None
        if schema is not None:
            where = f"source '{self.name}': {self._source.files[0].url}"
            found = convention.of_schema(schema, where)
            column, kind = found
            typed = not pa.types.is_null(schema.field(column).type)
            if kind == "input_ids" and typed:
                return PretokenisedReader(self._source, convention, id_limit(tokenizer), buffer_bytes)
            if kind not in ("input_ids", None) and tokenizer is None:
                raise MixtureError(f"{where}: holds {kind} in '{column}': set tokenizer: to a tokenizer.json")
            if typed:
                columns = functools.partial(convention.needed, found)
        extras = tuple(one.extras for one in transforms if one.extras is not None)
        preparer = Preparer(
            source=self.name,
            convention=convention,
            template=template,
            transforms=transforms,
            tokenizer=tokenizer,
            eos=tokenizer.token_id(eos) if tokenizer is not None and eos is not None else None,
            extras=extras,
            placeholders=tuple(self._placeholder(one.placeholder, tokenizer) for one in extras),
            whole_tokens=self._seq_len if self._spec.overflow in ("split", "truncate") else None,
        )
        return PreparingReader(self._source, columns, preparer, seed=self._seed, buffer_bytes=buffer_bytes)

    def _placeholder(self, placeholder: str | int, tokenizer: Tokenizer | None) -> int:
        where = f"source '{self.name}': placeholder"
        if tokenizer is not None:
            return tokenizer.token_id(placeholder, where)
        if isinstance(placeholder, str):
            raise MixtureError(
                f"{where}: there is no tokenizer that knows '{placeholder}'; give its id instead"
            )
        return placeholder

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests of everything outside the mixture file that the samples depend on; may read the ends of files."""
        return {"data": self._source.fingerprint, **self._others}

    @property
    def digests(self) -> Digests:
        """What the identity of a stream says of the source; may read the ends of files."""
        return Digests(of=self.fingerprints, num_files=len(self._source.files))

    @property
    def source(self) -> Source:
        """The rows it reads."""
        return self._source

    def read(self, cursor: Cursor, max_samples: int) -> SampleChunk:
        """Metadata of the samples from a cursor on, of one window at most.

        Args:
            cursor: where to start.
            max_samples: at least 1; the chunk may have fewer, also none, for the caller to go on at its ``end``. A
                window comes in two parts, as who reads ahead would else have two of them in memory all the time.

        Raises:
            SampleError: ``overflow: error`` and the first sample is longer than ``seq_len``.
            CorruptSource: a file cannot be read as what it claims to be.
            StateError: the cursor lies outside its window.
        """
        assert max_samples >= 1
        with self._reading:
            window = self._load_window(cursor)
            if cursor.position > window.num_rows:
                raise StateError(
                    f"source '{self.name}': the state is at row {cursor.position} of a window of "
                    f"{window.num_rows} rows; it belongs to other data or another window_blocks"
                )
            part = max(_LEAST_PART, -(-window.num_rows // 2))
            parts, position, sub = self._collect(window, cursor, min(max_samples, part))
            if position < window.num_rows:
                return make_chunk(
                    parts,
                    cursor,
                    _moved(cursor, position, sub),
                    position + (1 if sub else 0),
                    ends_epoch=False,
                )
            following = window.next_start
            end = (
                Cursor(epoch=cursor.epoch + 1)
                if following is None
                else Cursor(
                    epoch=cursor.epoch, window=cursor.window + 1, file=following[0], block=following[1]
                )
            )
            return make_chunk(parts, cursor, end, window.num_rows, ends_epoch=following is None)

    def payload(self, pieces: np.ndarray) -> Payload:
        """Tokens of ``PIECE[p]`` that `read` has published, now or in another process.

        What is no longer in the buffer is derived again from its address, byte for byte the same. The arrays are
        views; do not change them.
        """
        order, bounds = _by_block(pieces)
        ordered, window = pieces.take(order), self._window
        first = ordered.take(bounds[:-1])
        addresses = zip(first["file"].tolist(), first["block"].tolist(), strict=True)
        current = [window.block(*address) if window else None for address in addresses]
        return self._reader.fetch(ordered, bounds, current, self._longest).placed(order)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: what identifies the rows of a block in their file: number, or offset of the line."""
        window = self._window
        current = window.block(file, block) if window else None
        return np.asarray(current.row_ids) if current else self._source.row_ids(file, block)

    def origins(self, file: int, block: int, rows: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Where rows of a block come from: the paths of their files, and ``int64[n]`` what identifies them there."""
        entries, ids = self._origins(file, block, rows)
        return [entry.path for entry in entries], ids

    def _origins(self, file: int, block: int, rows: np.ndarray) -> tuple[list[FileEntry], np.ndarray]:
        """As `origins`, the files themselves."""
        if self._shuffled is not None:
            return self._shuffled.origins(file, block, rows)
        return [self._source.files[file]] * len(rows), self.row_ids(file, block)[rows]

    def release(self, pieces: np.ndarray) -> None:
        """Say that these pieces will not be asked for again, so that their payload need not be kept."""
        self._reader.release(pieces)

    def evict(self, fraction: float = 1.0) -> None:
        """Let go of this fraction of the payload kept; of the window read last too if it is 1."""
        self._reader.buffer.evict(fraction)
        if fraction >= 1:
            self._window = None

    @property
    def buffered_bytes(self) -> int:
        """Host memory held by the payload kept and the window being read, those in both counted twice."""
        window = self._window
        return self._reader.buffer.num_bytes + (window.num_bytes if window else 0)

    def close(self) -> None:
        """Let go of memory and open files; the loader can still be used."""
        self.evict()
        self._source.close()

    def _load_window(self, cursor: Cursor) -> LoadedWindow:
        window = self._window
        if window is None or not window.starts_at(cursor):
            self._window = window = None  # before the next one takes its place in memory
            window = LoadedWindow(
                cursor,
                self._source,
                self._order,
                self._reader,
                self._policy,
                self._origins,
                self.failures,
            )
            self._window = window
            now_s = time.monotonic()
            if now_s - self._loaded_s > _SELDOM_S:  # what it took to read is of no use until it reads again
                pa.default_memory_pool().release_unused()
            self._loaded_s = now_s
        return window

    def _collect(
        self, window: LoadedWindow, cursor: Cursor, max_samples: int
    ) -> tuple[list[RunPart], int, int]:
        """Parts of runs, up to the first that gives a sample or much bad, and the (position, sub) after them."""
        parts: list[RunPart] = []
        num_bad = 0
        position, sub = cursor.position, cursor.sub
        while position < window.num_rows:
            run = window.run_at(position)
            first = run.first_sample(position, sub)
            last = min(first + max_samples, len(run.tokens))
            refused = self._first_refused(run, first, last)
            if refused == first:
                raise self._too_long(window, run, refused)
            last = last if refused is None else refused
            parts.append(RunPart(run=run, first=first, last=last))
            if last < len(run.tokens):
                return parts, int(run.position[last - 1]), int(run.sub[last - 1]) + 1
            position, sub = run.end, 0
            num_bad += len(run.bad)
            if last > first or num_bad >= _MOST_BAD_ROWS:  # what is ready is not held back until more is
                break
        return parts, position, sub

    def _first_refused(self, run: Run, first: int, last: int) -> int | None:
        if self._spec.overflow != "error":
            return None
        long = np.flatnonzero(run.tokens[first:last] > self._seq_len)
        return first + int(long[0]) if len(long) else None

    def _too_long(self, window: LoadedWindow, run: Run, sample: int) -> SampleError:
        piece = run.pieces[run.first_piece[sample]]
        [entry], [row_id] = self._origins(int(piece["file"]), int(piece["block"]), piece["row"][None])
        return SampleError(
            f"source '{self.name}': {entry.url}, row {row_id}: a sample of {run.tokens[sample]} tokens, over seq_len"
            f" {self._seq_len}; set overflow: split, truncate or drop"
        )


def open_loader(
    name: str,
    mixture: Mixture,
    *,
    tokenizer: Tokenizer | None = None,
    split: Split = "train",
    buffer_bytes: int = BUFFER_BYTES,
) -> SourceLoader:
    """The loader of one source of a mixture.

    Args:
        name: the source.
        mixture: the mixture.
        tokenizer: the mixture's, if it is loaded already; loaders may share it.
        split: which of the rows to read.
        buffer_bytes: bound on the payload kept.

    Raises:
        MixtureError, SourceNotFound, ColumnMissing, CorruptSource: as `open_source` and `SourceLoader` say.
    """
    spec = mixture.sources[name]
    if tokenizer is None and mixture.tokenizer:
        tokenizer = Tokenizer.from_file(mixture.tokenizer)
    return SourceLoader(
        open_source(name, spec),
        spec,
        name=name,
        seed=mixture.seed,
        seq_len=mixture.seq_len,
        labels=mixture.labels,
        tokenizer=tokenizer,
        eos=mixture.eos,
        chat_template=mixture.chat_template,
        shuffle=mixture.shuffle,
        window_blocks=mixture.window_blocks,
        held_out=mixture.held_out,
        split=split,
        buffer_bytes=buffer_bytes,
    )


def _moved(cursor: Cursor, position: int, sub: int) -> Cursor:
    return Cursor(
        epoch=cursor.epoch,
        window=cursor.window,
        file=cursor.file,
        block=cursor.block,
        position=position,
        sub=sub,
    )


def _by_block(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of ``PIECE[n]`` of one epoch, file and block: an order, and ``int64[groups + 1]`` bounds of each in it."""
    block = pieces["file"].astype(np.uint64) << np.uint64(32) | pieces["block"]
    epoch = pieces["epoch"]
    one_epoch = not len(epoch) or bool((epoch == epoch[0]).all())
    order = np.argsort(block, kind="stable") if one_epoch else np.lexsort((block, epoch))
    block = block[order]
    begins = block[1:] != block[:-1]
    if not one_epoch:
        epoch = epoch[order]
        begins |= epoch[1:] != epoch[:-1]
    first = np.append(0, np.flatnonzero(begins) + 1)[: len(pieces)]
    return order, np.append(first, len(pieces))
