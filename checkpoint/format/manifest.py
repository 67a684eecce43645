"""``manifest.json``: constant in size, created last; its existence is the commit.

The document ends with its own digest. It is the xxh3-64 of the file's bytes with the 16 digits of the digest
replaced by zeros, so that a reader in any language can check it without re-encoding JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from checkpoint.errors import CorruptCheckpoint, FormatError, NotACheckpoint, StateError, UnsupportedVersion
from checkpoint.format.digest import digest_hex
from checkpoint.format.objects import decode_objects, encode_objects
from storage import Store
from storage.errors import NotFound

FORMAT_NAME: Final = "omniload.checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
METADATA_FILES: Final = (
    "files.parquet",
    "objects.json",
    "rank_objects.parquet",
    "shards.parquet",
    "stored.parquet",
    "tensors.parquet",
)

_MAX_MANIFEST_BYTES: Final = 1 << 20
_MAX_USER_METADATA_BYTES: Final = _MAX_MANIFEST_BYTES - (64 << 10)  # the rest takes a few KiB
_MAX_METADATA_BYTES: Final = 8 << 30
_ZERO: Final = "0" * 16
_TAIL: Final = re.compile(rb'"digest":"([0-9a-f]{16})"\}\n?\Z')
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataFile:
    """A metadata file as the manifest vouches for it.

    Attributes:
        num_bytes: Size of the file.
        xxh3: xxh3-64 of the file, 16 hex digits.
        footer_bytes: Size of the footer, if a part of the file may be read and verified by itself.
        footer_xxh3: xxh3-64 of the footer, 16 hex digits.
    """

    num_bytes: int
    xxh3: str
    footer_bytes: int | None = None
    footer_xxh3: str | None = None

    @classmethod
    def of(cls, data: bytes, footer: bytes | None = None) -> MetadataFile:
        """Vouch for a file, and for its footer if there is one."""
        return cls(
            num_bytes=len(data),
            xxh3=digest_hex(data),
            footer_bytes=None if footer is None else len(footer),
            footer_xxh3=None if footer is None else digest_hex(footer),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The committed state of a checkpoint directory.

    Attributes:
        attempt: 32 hex digits; everything else of the checkpoint lies under ``data/<attempt>/``.
        run_id: 32 hex digits naming the job that wrote it.
        step: Step number, if the writer gave one.
        created: UTC time of the commit, ISO 8601. For people; nothing depends on clocks.
        writer: Framework, version, world size. For people; never needed to read.
        files: Metadata files by name.
        replaces: Attempt that was committed here before and was replaced, if any.
        user_metadata: What the caller added.
    """

    attempt: str
    run_id: str
    step: int | None
    created: str
    writer: Mapping[str, object]
    files: Mapping[str, MetadataFile]
    replaces: str | None = None
    user_metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def data_dir(self) -> str:
        """Directory of everything but the manifest, relative to the checkpoint."""
        return f"data/{self.attempt}"


def stored_metadata(user_metadata: Mapping[str, object]) -> dict[str, object]:
    """A copy of user metadata, as a reader will find it.

    Raises:
        StateError: It is no dict, holds something that cannot be stored, or would make the manifest too large.
    """
    if not isinstance(user_metadata, Mapping):
        raise StateError(f"user_metadata is {user_metadata!r:.60}: give a dict")
    data = encode_objects(dict(user_metadata), "user_metadata")
    num_bytes = len(json.dumps(json.loads(data), separators=(",", ":")))
    if num_bytes > _MAX_USER_METADATA_BYTES:
        raise StateError(
            f"user_metadata is too large: {num_bytes} bytes, allowed are {_MAX_USER_METADATA_BYTES}; "
            "put it into the state"
        )
    return dict(decode_objects(data, "user_metadata"))


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``.

    Raises:
        StateError: The user metadata holds something that cannot be stored, or makes the manifest too large.
    """
    document = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "attempt": manifest.attempt,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "created": manifest.created,
        "writer": dict(manifest.writer),
        "files": {
            name: {
                "bytes": file.num_bytes,
                "xxh3": file.xxh3,
                **(
                    {}
                    if file.footer_bytes is None
                    else {"footer_bytes": file.footer_bytes, "footer_xxh3": file.footer_xxh3}
                ),
            }
            for name, file in manifest.files.items()
        },
        "replaces": manifest.replaces,
        "user_metadata": json.loads(encode_objects(dict(manifest.user_metadata), "user_metadata")),
        "digest": _ZERO,
    }
    data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    if len(data) > _MAX_MANIFEST_BYTES:
        raise ValueError(
            f"user_metadata is too large: the manifest must stay below {_MAX_MANIFEST_BYTES} bytes"
        )
    return data.replace(_tail(_ZERO), _tail(digest_hex(data)))


def _tail(digest: str) -> bytes:
    return f'"digest":"{digest}"}}\n'.encode()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Check and decode ``manifest.json``.

    Raises:
        UnsupportedVersion: Of another version of the format.
        CorruptCheckpoint: The digest does not match.
        FormatError: Anything else that is wrong with it.
    """
    document = decode_objects(data, where)
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        raise FormatError(f"{where}: not a manifest of {FORMAT_NAME!r}")
    version = document.get("version")
    if version != VERSION:
        raise UnsupportedVersion(
            f"{where}: format version {version!r}, but this release reads version {VERSION}; "
            "use a newer release to read it"
        )
    tail = _TAIL.search(data)
    if tail is None:
        raise FormatError(f"{where}: does not end with its digest")
    start, end = tail.span(1)
    if digest_hex(data[:start] + _ZERO.encode() + data[end:]) != tail[1].decode():
        raise CorruptCheckpoint(
            f"{where}: digest does not match its bytes; the file was changed after the commit"
        )
    try:
        return _decode(document)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: malformed ({type(error).__name__}: {error})") from None


def _decode(document: dict[str, Any]) -> Manifest:
    for name in ("attempt", "run_id"):
        if not _ATTEMPT.fullmatch(document[name]):
            raise ValueError(f"{name} is not 32 hex digits")
    if document["replaces"] is not None and not _ATTEMPT.fullmatch(document["replaces"]):
        raise ValueError("replaces is not 32 hex digits")
    step = document["step"]
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step {step!r} is not a whole number")
    files = {}
    for name in METADATA_FILES:
        num_bytes, digest = document["files"][name]["bytes"], document["files"][name]["xxh3"]
        if type(num_bytes) is not int or not 0 <= num_bytes <= _MAX_METADATA_BYTES:
            raise ValueError(f"size of {name} is {num_bytes!r}, allowed are 0 to {_MAX_METADATA_BYTES} bytes")
        if not isinstance(digest, str):
            raise TypeError(f"digest of {name} is not a string")
        footer = [document["files"][name].get(one) for one in ("footer_bytes", "footer_xxh3")]
        if footer != [None, None] and not (
            type(footer[0]) is int and 0 <= footer[0] <= num_bytes and isinstance(footer[1], str)
        ):
            raise ValueError(f"footer of {name} is {footer[0]!r} bytes with digest {footer[1]!r}")
        files[name] = MetadataFile(
            num_bytes=num_bytes, xxh3=digest, footer_bytes=footer[0], footer_xxh3=footer[1]
        )
    return Manifest(
        attempt=document["attempt"],
        run_id=document["run_id"],
        step=step,
        created=str(document["created"]),
        writer=dict(document["writer"]),
        files=files,
        replaces=document["replaces"],
        user_metadata=dict(document["user_metadata"]),
    )


def read_manifest(store: Store) -> tuple[Manifest, bytes]:
    """Read and check the manifest of the checkpoint at ``store``.

    Returns:
        The manifest and the bytes it was read from.

    Raises:
        NotACheckpoint: There is none.
        FormatError, CorruptCheckpoint: See :func:`decode_manifest`.
    """
    where = f"{store.url}/{MANIFEST}"
    try:
        num_bytes = store.stat(MANIFEST).size
        if num_bytes > _MAX_MANIFEST_BYTES:
            raise FormatError(f"{where}: {num_bytes} bytes, allowed are {_MAX_MANIFEST_BYTES}")
        data = store.read(MANIFEST)
    except NotFound:
        raise NotACheckpoint(
            f"{store.url}: no {MANIFEST}, so this is not a (committed) checkpoint; "
            "check the path, or list what there is with `omniload ckpt ls`"
        ) from None
    return decode_manifest(data, where), data


def read_metadata(store: Store, manifest: Manifest, name: str) -> bytes:
    """Read one metadata file and check its size and digest.

    Args:
        store: The checkpoint directory.
        manifest: Its manifest.
        name: One of :data:`METADATA_FILES`.

    Raises:
        CorruptCheckpoint: Missing, or not as long as, or not the bytes that, the manifest says.
    """
    path = f"{manifest.data_dir}/{name}"
    where = f"{store.url}/{path}"
    expected = manifest.files[name]
    check_size(store, path, expected.num_bytes)
    try:
        data = store.read(path)
    except NotFound:
        raise CorruptCheckpoint(f"{where}: missing, but named by the manifest") from None
    if len(data) != expected.num_bytes or digest_hex(data) != expected.xxh3:
        raise CorruptCheckpoint(
            f"{where}: digest does not match the manifest; the file was changed after the commit"
        )
    return data


def check_size(store: Store, path: str, num_bytes: int) -> None:
    """Check that a metadata file is as large as the manifest says, before anything of it is read.

    Raises:
        CorruptCheckpoint: It is missing, or has another size.
    """
    try:
        found = store.stat(path).size
    except NotFound:
        raise CorruptCheckpoint(f"{store.url}/{path}: missing, but named by the manifest") from None
    if found != num_bytes:
        raise CorruptCheckpoint(f"{store.url}/{path}: {found} bytes, the manifest says {num_bytes}")
