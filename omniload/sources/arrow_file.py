"""Where the messages of an Arrow IPC file lie: what its footer says, or a pass over the headers of a stream.

Both forms are a row of *messages*: a prefix (``FFFFFFFF`` and the size of the header, early writers the size alone), a
header (a flatbuffer ``Message``) and a body. First the schema, then dictionaries and record batches. The *file* form
begins with ``ARROW1`` and ends with a footer that lists them; the *stream* form has to be followed from message to
message, of which only the headers are read. (Arrow columnar format, "Serialization and Interprocess Communication";
``Message.fbs`` and ``File.fbs`` number the fields.)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa

from omniload.errors import CorruptSource
from omniload.lazy import lazy
from omniload.sources.flatbuffer import FlatTable
from omniload.sources.protocol import FileEntry
from storage import Store

BLOCK_BYTES = 1 << 20
"""Record batches that start in the same run of so many bytes of a file are one block; part of the order of the rows."""
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
"""Kinds of messages."""
_MAGIC = b"ARROW1"
_FIRST_MESSAGE = 8  # the magic, padded
_FEATHER_1 = b"FEA1"
_CONTINUES = -1
_TAIL = struct.Struct("<i6s")  # size of the footer, magic
_FOOTER_SCHEMA, _FOOTER_DICTIONARIES, _FOOTER_BATCHES = 1, 2, 3
_VERSION_5 = 4
_PLACE = np.dtype(
    {"names": ["at", "header", "body"], "formats": ["<i8", "<i4", "<i8"], "offsets": [0, 8, 16]}
)
_EDGE_BYTES = 64 << 10  # read of an end of the file at first: mostly the whole schema, the whole footer
_AHEAD_BYTES = 16 << 10  # read at a message of a stream: its header, and what follows if the body is small


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message."""

    kind: int
    """What it holds."""
    at: int
    """First byte of its prefix, in what it was read from."""
    body: int
    """First byte of its body."""
    end: int
    """Byte after its body."""
    content: FlatTable
    """``Schema``, ``DictionaryBatch`` or ``RecordBatch``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Where batches and dictionaries lie."""

    starts: np.ndarray
    """``int64[batches]``: first byte of each record batch, ascending."""
    ends: np.ndarray
    """``int64[batches]``: byte after it; not above the next one's start."""
    blocks: np.ndarray
    """``int64[blocks + 1]``: bounds of each block in the batches."""
    dictionaries: tuple[tuple[int, int, int, bool], ...]
    """Start, end, id and whether it adds to the one before of that id; in order."""


class ArrowFile:
    """One file, of which nothing is read before it is needed.

    Args:
        store: where it lies.
        entry: which it is.
    """

    def __init__(self, store: Store, entry: FileEntry) -> None:
        self._store = store
        self._entry = entry
        self._ahead = (0, memoryview(b""))

    def read(self, start: int, end: int) -> memoryview:
        """Some bytes."""
        return self._store.read_ranges([(self._entry.path, start, end)])[0]

    def corrupt(self, at: int, reason: object) -> NoReturn:
        """Refuse the file.

        Raises:
            CorruptSource: always.
        """
        raise CorruptSource(
            f"{self._entry.url}: cannot be read as Arrow, at byte {at}: {' '.join(str(reason).split())}; copy or write"
            " the file again, or take it out of the source's path"
        )

    @lazy
    def is_stream(self) -> bool:
        """Whether there is no footer."""
        head = self._near(0, len(_MAGIC), _EDGE_BYTES)
        if bytes(head[: len(_FEATHER_1)]) == _FEATHER_1:
            self.corrupt(0, "Feather version 1; read it by pyarrow.feather and write version 2")
        return bytes(head) != _MAGIC

    @lazy
    def schema_bytes(self) -> bytes:
        """The message that every reader wants first."""
        at = 0 if self.is_stream else _FIRST_MESSAGE
        try:
            message = self._message(at, _EDGE_BYTES)
            if message is not None and message.kind == SCHEMA:
                return bytes(self._near(at, message.end - at, _EDGE_BYTES))
            reason = "no schema, so no Arrow IPC file or stream"
        except ValueError as error:
            reason = str(error)
        if self.is_stream:
            self.corrupt(at, reason)
        return self._schema_of_footer()

    @lazy
    def schema(self) -> pa.Schema:
        """The columns."""
        message = pa.py_buffer(self.schema_bytes)
        try:
            schema = pa.ipc.read_schema(message)
            twice = next((name for name, count in Counter(schema.names).items() if count > 1), None)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            self.corrupt(0, error)
        if twice is not None:
            self.corrupt(0, f"two columns '{twice}'")
        return schema

    @lazy
    def index(self) -> Index:
        """Where batches and dictionaries lie; reads the footer, or a header for each message of a stream."""
        return self._followed() if self.is_stream else self._listed()

    @lazy
    def _footer(self) -> tuple[int, memoryview]:
        """Where the footer begins, and its bytes."""
        size = self._entry.size
        room = size - _FIRST_MESSAGE - _TAIL.size
        tail = self.read(max(0, size - _EDGE_BYTES), size)
        num_bytes, magic = _TAIL.unpack(tail[-_TAIL.size :]) if room >= 0 else (0, b"")
        if magic != _MAGIC or not 0 < num_bytes <= room:
            self.corrupt(size, "no footer, so it was cut short")
        start = size - _TAIL.size - num_bytes
        footer = tail[-_TAIL.size - num_bytes : -_TAIL.size]
        return start, footer if len(footer) == num_bytes else self.read(start, size - _TAIL.size)

    def _schema_of_footer(self) -> bytes:
        """A schema message that holds the footer: the schema is part of that, and some writers put no other."""
        start, footer = self._footer
        try:
            schema = FlatTable.root(footer).table(_FOOTER_SCHEMA)
        except ValueError as error:
            self.corrupt(start, f"footer: {error}")
        if schema is None:
            self.corrupt(start, "footer: no schema")
        # By bytes: root; vtable (sizes of vtable and table, places of version, kind, content, no body); table.
        before = struct.pack("<I6H", 16, 12, 12, 4, 6, 8, 0)
        before += struct.pack("<ihBxI4x", 12, _VERSION_5, SCHEMA, 8 + schema.at)
        after = bytes(-len(footer) % 8)
        num_bytes = len(before) + len(footer) + len(after)
        return b"".join([struct.pack("<ii", _CONTINUES, num_bytes), before, footer, after])

    def _listed(self) -> Index:
        start, footer = self._footer
        try:
            root = FlatTable.root(footer)
            dictionaries = root.structs(_FOOTER_DICTIONARIES, _PLACE)
            batches = root.structs(_FOOTER_BATCHES, _PLACE)
        except ValueError as error:
            self.corrupt(start, f"footer: {error}")
        starts, ends = self._placed(batches, start)
        disorder = np.flatnonzero(ends[:-1] > starts[1:])
        if len(disorder):
            self.corrupt(int(starts[disorder[0]]), "the footer's record batches overlap")
        of_dictionaries = zip(*map(np.ndarray.tolist, self._placed(dictionaries, start)), strict=True)
        return _index(starts, ends, [(at, end, i, False) for i, (at, end) in enumerate(of_dictionaries)])

    def _placed(self, places: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of messages that the footer lists, which must lie before it."""
        starts, header, body = (places[name].astype(np.int64) for name in ("at", "header", "body"))
        # Each part is compared by itself: their sum may pass over 2**63.
        wrong = (
            (starts < _FIRST_MESSAGE)
            | (header < _FIRST_MESSAGE)
            | (body < 0)
            | (starts > limit)
            | (body > limit)
        )
        ends = np.where(wrong, 0, starts + header + body)
        wrong |= ends > limit
        if wrong.any():
            self.corrupt(limit, f"the footer puts message {int(np.argmax(wrong))} outside the file")
        if int((ends - starts).sum()) > limit:
            self.corrupt(limit, "the footer's messages are larger than the file")
        return starts, ends

    def _followed(self) -> Index:
        starts: list[int] = []
        ends: list[int] = []
        dictionaries = []
        at = len(self.schema_bytes)
        try:
            for message in self._messages(at):
                at, content = message.at, message.content
                if message.kind == RECORD_BATCH:
                    starts.append(at)
                    ends.append(message.end)
                elif message.kind == DICTIONARY_BATCH:
                    adds = bool(content.number(2, "<B"))
                    dictionaries.append((at, message.end, content.number(0, "<q"), adds))
                else:
                    raise ValueError(f"a message of kind {message.kind} where a record batch should be")
                at = message.end
        except ValueError as error:
            self.corrupt(at, error)
        self._ahead = (0, memoryview(b""))
        return _index(np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64), dictionaries)

    def _messages(self, at: int) -> Iterator[Message]:
        # A stream may end without its end mark: the format allows it.
        while at < self._entry.size and (message := self._message(at, _AHEAD_BYTES)) is not None:
            yield message
            at = message.end

    def _message(self, at: int, ahead: int) -> Message | None:
        """The message that begins here, if it does not mark the end.

        Raises:
            ValueError: there is none.
        """
        limit = self._entry.size
        header = header_bounds(self._near(at, 8, ahead), at, limit)
        if header is None:
            return None
        return parse_message(at, header[1], self._near(header[0], header[1] - header[0], ahead), limit)

    def _near(self, at: int, num_bytes: int, ahead: int) -> memoryview:
        """Bytes from ``at`` on, fewer at the end of the file; with them, what is likely to be wanted next is read."""
        end = min(at + num_bytes, self._entry.size)
        start, held = self._ahead
        if not (start <= at and end <= start + len(held)):
            start, held = at, self.read(at, min(max(at + ahead, end), self._entry.size))
            self._ahead = (start, held)
        return held[at - start : end - start]


def header_bounds(prefix: memoryview, at: int, limit: int) -> tuple[int, int] | None:
    """First byte of the header of a message, and byte after it; None for the mark that ends a stream.

    Args:
        prefix: the first 8 bytes of the message, or what there is of them.
        at: first byte of the message.
        limit: end of what it lies in.

    Raises:
        ValueError: it is no prefix, or the header reaches beyond the limit.
    """
    numbers = [number for (number,) in struct.iter_unpack("<i", prefix[: len(prefix) // 4 * 4])]
    skip = 1 if numbers[:1] == [_CONTINUES] else 0
    if len(numbers) <= skip:
        raise ValueError(f"a message cut short: {len(prefix)} bytes")
    num_bytes, begin = numbers[skip], at + 4 * (skip + 1)
    if not 0 <= num_bytes <= limit - begin:
        raise ValueError(f"a message with a header of {num_bytes} bytes, of which there are {limit - begin}")
    return (begin, begin + num_bytes) if num_bytes else None


def parse_message(at: int, body: int, header: memoryview, limit: int) -> Message:
    """Read the header of a message.

    Args:
        at: first byte of the message.
        body: byte after its header.
        header: its header.
        limit: end of what it lies in.

    Raises:
        ValueError: it is none, or the body reaches beyond the limit.
    """
    table = FlatTable.root(header)
    kind, content, num_bytes = table.number(1, "<B"), table.table(2), table.number(3, "<q")
    if content is None:
        raise ValueError("a message without content")
    if not 0 <= num_bytes <= limit - body:
        raise ValueError(f"a message with a body of {num_bytes} bytes, of which there are {limit - body}")
    return Message(kind=kind, at=at, body=body, end=body + num_bytes, content=content)


def _index(starts: np.ndarray, ends: np.ndarray, dictionaries: list[tuple[int, int, int, bool]]) -> Index:
    firsts = np.flatnonzero(np.diff(starts // BLOCK_BYTES, prepend=-1))
    return Index(
        starts=starts,
        ends=ends,
        blocks=np.append(firsts, len(starts)),
        dictionaries=tuple(dictionaries),
    )
