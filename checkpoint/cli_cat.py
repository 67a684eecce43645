"""``omniload ckpt cat``: one tensor or plain value of a checkpoint."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Final

import typer

from checkpoint.boxes import Box
from checkpoint.cli_common import PathArgument, show, size_text, user_errors
from checkpoint.errors import MismatchError
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.objects import encode_objects
from checkpoint.stored import StoredCheckpoint
from storage import Store
from storage.errors import BadRequest

_INDEX: Final = re.compile(r"\s*(-?\d{1,18})\s*")
_RANGE: Final = re.compile(r"\s*(-?\d{1,18})?\s*:\s*(-?\d{1,18})?\s*")

_MISSING: Final = object()

# Looking for names alike takes time that grows with their number.
_MAX_NAMES: Final = 10_000


def cat(
    path: PathArgument,
    key: Annotated[
        str, typer.Argument(help="Tensor or plain value, as group/key; or a group.", show_default=False)
    ],
    part: Annotated[
        str | None,
        typer.Option(
            "--slice", help="Part of a tensor, as in Python without steps: 0:4,-1,:", show_default="all of it"
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the bytes to stdout: row-major, little-endian; or JSON.")
    ] = False,
) -> None:
    """Print one tensor (shape, dtype, statistics, first values) or plain value (as JSON), verifying what is read.

    Only the 4 MiB pieces that hold the slice are read, and the headers of the files that they are in.
    """
    with user_errors():
        checkpoint = StoredCheckpoint.open(Store(path))
        group, _, name = key.partition("/")
        tensor_id = checkpoint.tensor_ids.get((group, name))
        if tensor_id is None:
            value = _find_value(checkpoint, group, name)
            if value is _MISSING:
                raise MismatchError(f"{checkpoint.store.url}: {_unknown(checkpoint, key)}")
            if part is not None:
                raise BadRequest(f"--slice: {key} is not a tensor; leave it out")
            encoded = encode_objects(value, key)
            show(encoded.decode() if raw else json.dumps(json.loads(encoded), indent=2, ensure_ascii=False))
            return
        row = checkpoint.tables.tensors[tensor_id]
        box, shape = Box.whole(row.shape), row.shape
        if part is not None:
            box, shape = parse_slice(part, row.shape)
        checkpoint.tables.check_tiling(tensor_id)
        if raw:
            _write_raw(checkpoint, tensor_id, box)
            return
        num_bytes = box.num_elements * DTYPES[row.dtype].itemsize
        of = "" if part is None else f" of {list(row.shape)}"
        lines = [key, f"{row.dtype} {list(shape)}{of}, {size_text(num_bytes)}"]
        show("\n".join([*lines, *_statistics(checkpoint, tensor_id, box)]))


def parse_slice(text: str, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The part of a tensor that a slice in Python's syntax, without steps, means.

    Args:
        text: Indices and ranges, separated by commas; dimensions that are left out are whole.
        shape: Of the tensor.

    Returns:
        The part, whose box may be empty, and its shape without the dimensions that have an index.

    Raises:
        BadRequest: Malformed, too many dimensions, or an index out of range.
    """
    items = text.split(",")
    if len(items) > len(shape):
        raise BadRequest(f"--slice {text!r} has {len(items)} dimensions, the tensor has shape {list(shape)}")
    offsets, lengths, kept = [], [], []
    for dim, length in enumerate(shape):
        item = items[dim] if dim < len(items) else ":"
        if (index := _INDEX.fullmatch(item)) is not None:
            at = int(index[1])
            if not -length <= at < length:
                raise BadRequest(f"--slice {text!r}: no index {at} in dimension {dim} of shape {list(shape)}")
            offsets.append(at % length)
            lengths.append(1)
        elif (ends := _RANGE.fullmatch(item)) is not None:
            wanted = slice(*(None if end is None else int(end) for end in ends.groups()))
            start, stop, _ = wanted.indices(length)
            offsets.append(start)
            lengths.append(max(0, stop - start))
            kept.append(lengths[-1])
        else:
            raise BadRequest(f"--slice {text!r}: {item!r} is no index or range; write for example 0:4,-1,:")
    return Box(tuple(offsets), tuple(lengths)), tuple(kept)


def _find_value(checkpoint: StoredCheckpoint, group: str, name: str) -> Any:
    """A plain value by its path of dict keys and list positions joined by dots; ``_MISSING`` if there is none."""
    tree = checkpoint.objects.get(group, _MISSING)
    if not name:
        return tree
    # State given as a dict lies below "value" beside a word on its kind: either path leads there.
    inner = tree.get("value") if isinstance(tree, Mapping) else None
    return next(chain(_matches(inner, name), _matches(tree, name)), _MISSING)


def _matches(tree: Any, path: str) -> Iterator[Any]:
    items: Iterator[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = iter(tree.items())
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return
    for key, value in items:
        if path == str(key):
            yield value
        elif path.startswith(f"{key}."):  # keys may have dots of their own
            yield from _matches(value, path.removeprefix(f"{key}."))


def _unknown(checkpoint: StoredCheckpoint, key: str) -> str:
    names = [*("/".join(one) for one in checkpoint.tensor_ids), *checkpoint.objects]
    close = difflib.get_close_matches(key, names[:_MAX_NAMES], n=3)
    meant = f"did you mean {', '.join(close)}?" if close else "`omniload ckpt inspect` lists what there is"
    return f"holds no tensor or plain value {key!r}; {meant}"


def _write_raw(checkpoint: StoredCheckpoint, tensor_id: int, box: Box) -> None:
    from checkpoint.cli_read import read_in_parts  # imports torch

    for data in read_in_parts(checkpoint, tensor_id, box):
        sys.stdout.buffer.write(data.data)
    sys.stdout.buffer.flush()


def _statistics(checkpoint: StoredCheckpoint, tensor_id: int, box: Box) -> Iterator[str]:
    from checkpoint.cli_read import read_in_parts  # imports torch
    from checkpoint.cli_statistics import Statistics, as_numbers

    dtype = checkpoint.tables.tensors[tensor_id].dtype
    statistics = Statistics()
    for data in read_in_parts(checkpoint, tensor_id, box):
        statistics.add(as_numbers(data, dtype))
    yield from statistics.lines()
