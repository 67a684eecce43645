"""The members of a tar file, found by its headers alone, and the samples that webdataset makes of them.

Names of any length are understood as POSIX (pax) and GNU write them. Members that are no regular files (directories,
links, devices) are passed over, as webdataset does; sparse ones are refused.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from omniload.errors import CorruptSource

_UNIT = tarfile.BLOCKSIZE
_MAX_EXTENDED_BYTES = 1 << 20
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED_TYPES = (*_PAX_TYPES, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_REGULAR_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_USUAL_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE)
# Whatever size their headers have, as `tarfile` has it.
_EMPTY_TYPES = frozenset(tarfile.SUPPORTED_TYPES) - frozenset(tarfile.REGULAR_TYPES)

KEY = "__key__"
"""Name under which a row has the key of its sample."""

# Both of webdataset: how it splits a name into key and field, and the names that it leaves out.
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_LEFT_OUT = re.compile(r"__[^/]*__($|/)")


class Bytes(Protocol):
    """A tar file, or a part of one."""

    def at(self, offset: int, length: int) -> memoryview:
        """Bytes from an offset of the file on, fewer where it ends. Offsets are asked for in ascending order."""

    def reaches(self, end: int) -> bool:
        """Whether the file has as many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A regular file in a tar file."""

    start: int
    """Offset of the first of its headers."""
    name: str
    """Path in the archive."""
    data: int
    """Offset of its content."""
    size: int
    """Bytes of its content."""
    cut: bool = False
    """Whether the file ends before its content and what fills up its last 512 bytes do."""


@dataclass(kw_only=True, slots=True)
class TarSample:
    """Consecutive members that have one key."""

    key: str
    """Path of the members up to the first dot of the name."""
    start: int
    """Offset of the first header of its first member."""
    end: int = 0
    """Offset after the content of its last member, also if the file ends before."""
    fields: dict[str, Member] = field(default_factory=dict)
    """Its members by what follows the first dot, in lower case."""
    problem: str | None = None
    """Why it is no row."""

    def add(self, name: str, member: Member) -> None:
        """Add a field, whose name must be new."""
        if name in self.fields:
            self.problem = f"two members of the name {member.name!r}"
        elif name == KEY:
            self.problem = f"a member of the name {member.name!r}, which is that of the key"
        self.fields[name] = member


def tar_samples(file: Bytes, start: int, end: int, url: str) -> Iterator[TarSample]:
    """The samples of a tar file, read no further than asked for.

    Args:
        file: its bytes.
        start: offset of the first header of a sample.
        end: where to stop; the samples up to there must be whole.
        url: of the file, for messages.

    Raises:
        CorruptSource: something that is no header stands where one must be.
    """
    sample: TarSample | None = None
    for member in tar_members(file, start, end, url):
        match = None if _LEFT_OUT.match(member.name) else _KEY_AND_FIELD.match(member.name)
        if match is None and not member.cut:
            continue
        # What is cut off and has no key may be a part of the sample before it.
        key = match[1] if match is not None else sample.key if sample is not None else ""
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = TarSample(key=key, start=member.start)
        sample.end = member.data + member.size
        if match is not None:
            sample.add(match[2].lower(), member)
        if member.cut:
            sample.problem = f"the file ends inside {member.name!r}, as if cut off; copy it again"
    if sample is not None:
        yield sample


class _CutOff(Exception):
    """The file ends inside a header."""


def tar_members(file: Bytes, start: int, end: int, url: str) -> Iterator[Member]:
    """The regular files of a tar file from ``start`` to ``end``, or to the mark that ends it; see `tar_samples`.

    Where the file ends inside a header, the last one is called so.
    """
    try:
        yield from _whole_members(file, start, end, url)
    except _CutOff as error:
        at = error.args[0]
        yield Member(start=at, name="a header", data=at, size=_UNIT, cut=True)


def _whole_members(file: Bytes, start: int, end: int, url: str) -> Iterator[Member]:
    at = first = start
    name: str | None = None  # as extended headers before the member's own have it
    size: int | None = None
    while at < end:
        header = _header(file, at, url)
        if header is None:
            return
        content = at + _UNIT
        if header.type in _EXTENDED_TYPES:
            data = _extended(file, content, header.size, at, url)
            if header.type in _PAX_TYPES:
                records = _pax_records(data, at, url)
                name = records.get("path", name)
                size = _pax_size(records, at, url) if "size" in records else size
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                name = _text(data.partition(b"\0")[0])
            at = content + _padded(header.size)
            continue
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse(at, url)
        size = header.size if size is None else size
        stored = 0 if header.type in _EMPTY_TYPES else size
        if header.type in _REGULAR_TYPES:
            cut = not file.reaches(content + _padded(stored))
            yield Member(start=first, name=name or header.name, data=content, size=stored, cut=cut)
            if cut:
                return
            if content + stored > end:
                raise _corrupt(url, at, "has a member that its index knows nothing of", "remove the index")
        at = first = content + _padded(stored)
        name = size = None


class _Header(NamedTuple):
    type: bytes
    name: str
    size: int


def _header(file: Bytes, at: int, url: str) -> _Header | None:
    """The header at an offset; None at the end of the archive."""
    data = bytes(file.at(at, _UNIT))
    if not any(data):
        return None
    if len(data) < _UNIT:
        raise _CutOff(at)
    header = _usual_header(data)
    if header is None:
        try:
            info = tarfile.TarInfo.frombuf(data, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _corrupt(url, at, f"has no tar header ({error})") from error
        header = _Header(info.type, info.name, info.size)
    if header.size < 0:
        raise _corrupt(url, at, f"has a header with the size {header.size}")
    return header


def _usual_header(data: bytes) -> _Header | None:
    """A header of the form that nearly all have, for a quarter of the time; None: let `tarfile` decide."""
    checksum = data[148:156]
    try:
        size = int(data[124:136].partition(b"\0")[0], 8)
        stated = int(checksum.partition(b"\0")[0], 8)
    except ValueError:
        return None
    if stated != sum(data) - sum(checksum) + 8 * ord(" "):
        return None
    kind = data[156:157]
    name = _text(data[:100].partition(b"\0")[0])
    prefix = data[345:500].partition(b"\0")[0]
    if kind not in _USUAL_TYPES or name.endswith("/"):
        return None
    return _Header(kind, f"{_text(prefix)}/{name}" if prefix else name, size)


def _extended(file: Bytes, content: int, size: int, at: int, url: str) -> bytes:
    if size > _MAX_EXTENDED_BYTES:
        raise _corrupt(url, at, f"has an extended header of {size} bytes")
    data = bytes(file.at(content, size))
    if len(data) < size:
        raise _CutOff(at)
    return data


def _pax_records(data: bytes, at: int, url: str) -> dict[str, str]:
    r"""Records ``length key=value\n`` of an extended header; POSIX.1-2001, pax, "pax Extended Header"."""
    records: dict[str, str] = {}
    begin = 0
    while begin < len(data) and data[begin]:
        digits, _, _ = data[begin : begin + 20].partition(b" ")
        end = begin + int(digits) if digits.isdigit() else 0
        key, separator, value = data[begin + len(digits) + 1 : end - 1].partition(b"=")
        if not (begin < end <= len(data) and separator and data[end - 1 : end] == b"\n"):
            raise _corrupt(url, at, "has a damaged extended header")
        if key.startswith(b"GNU.sparse."):
            raise _sparse(at, url)
        records[_text(key)] = _text(value)
        begin = end
    return records


def _pax_size(records: dict[str, str], at: int, url: str) -> int:
    if not records["size"].isdecimal() or len(records["size"]) > 20:
        raise _corrupt(url, at, f"has an extended header with the size {records['size'][:40]!r}")
    return int(records["size"])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


def _sparse(at: int, url: str) -> CorruptSource:
    return _corrupt(url, at, "has a sparse member, which is not supported", "pack it without --sparse")


def _corrupt(url: str, at: int, what: str, remedy: str = "copy or pack it again") -> CorruptSource:
    return CorruptSource(f"{url}: {what} at byte {at}; {remedy}")
