"""Checkpoints made to harm who reads them: refused within bounded memory and time, and nothing of them is executed."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from checkpoint.boxes import Box
from checkpoint.format.digest import digest64, digest_hex
from checkpoint.format.manifest import read_manifest
from checkpoint.format.tables import SCHEMAS
from storage import Store
from tests.checkpoint.forging import (
    Row,
    Struct,
    change_footer,
    change_page,
    columns_of,
    forge_file,
    forge_rows,
)
from tests.checkpoint.simulation import OPTIONS, random_bits, save_simulated

_MAX_BYTES = 1 << 30  # that reading a hostile checkpoint of a few hundred kilobytes may take, at the peak
_MAX_SECONDS = 20

# One process loads what reading needs, and forks a child with limits of its own for each checkpoint.
_PROGRAM = """
import json, os, resource, sys, traceback
from checkpoint.boxes import Box
from checkpoint.cli_read import read_in_parts
from checkpoint.errors import CheckpointError
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store

paths, max_bytes, max_seconds = json.loads(sys.argv[1])

def read(path):
    checkpoint = StoredCheckpoint.open(Store(path))
    problems = verify(checkpoint).problems
    checkpoint.rank_objects(0)
    if problems:
        raise CheckpointError(problems[0])
    for tensor_id, tensor in enumerate(checkpoint.tables.tensors):
        for _ in read_in_parts(checkpoint, tensor_id, Box.whole(tensor.shape)):
            pass

def watch(event, arguments):
    forbidden = ("pickle.find_class", "marshal.loads", "os.system", "os.exec", "os.posix_spawn", "os.fork")
    if event in (*forbidden, "subprocess.Popen", "ctypes.dlopen") or event == "exec" or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        os.write(2, f"{event}{arguments}".encode())
        os._exit(9)

def child(path, write):
    try:
        read(paths[0])  # imports what is imported late
        (pages,) = [int(line.split()[0]) for line in open("/proc/self/statm")]
        limit = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
        sys.addaudithook(watch)
        try:
            read(path)
            answer = ["accepted", ""]
        except CheckpointError as error:
            answer = [type(error).__name__, str(error)[:5000]]
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

answers = {}
for path in paths:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(path, theirs)
    os.close(theirs)
    _, status = os.waitpid(pid, 0)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    answers[path] = json.loads(text) if text else ["died", str(os.waitstatus_to_exitcode(status))]
print(json.dumps(answers))
"""


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/tmp/a-checkpoint-was-executed", "w")


def table_of(saved: Path, name: str) -> bytes:
    return (saved / read_manifest(Store(saved))[0].data_dir / name).read_bytes()


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", store_schema=False, row_group_size=1 << 30, **options)
    return sink.getvalue()


def repeated(name: str, column: str, length: int, num_rows: int) -> bytes:
    """A table whose strings in one column are all the same long one, which is stored once."""
    columns: dict[str, Any] = {
        field.name: pa.nulls(num_rows, field.type).fill_null(0)
        if pa.types.is_integer(field.type)
        else pa.array([[]] * num_rows, field.type)
        if pa.types.is_list(field.type)
        else pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), ["x"])
        for field in SCHEMAS[name]
    }
    indices = pa.array([0] * num_rows, pa.int32())
    columns[column] = pa.DictionaryArray.from_arrays(indices, ["x" * length])
    return written(pa.table(columns))


def set_in_pages(path: str, header: int, field: int, value: int) -> Callable[[bytes], bytes]:
    """The headers of both pages of a column, or that of its dictionary, claim another number."""

    def change(page: Struct) -> None:
        if header == 0:
            page[field] = (5, value)
        else:
            page[header][1][field] = (5, value)

    return lambda data: change_page(data, path, change, dictionary=header == 7)


def set_rows(num_rows: int) -> Callable[[bytes], bytes]:
    """Everything but the pages claims another number of rows."""

    def change(footer: Struct) -> None:
        footer[3] = (6, num_rows)
        footer[4][1][1][0][3] = (6, num_rows)
        for column in columns_of(footer):
            column[5] = (6, num_rows)

    return lambda data: change_footer(data, change)


def set_values(path: str, num_values: int) -> Callable[[bytes], bytes]:
    """Page and footer agree about an absurd number of values."""

    def change(footer: Struct) -> None:
        for column in columns_of(footer):
            if b".".join(column[3][1][1]).decode() == path:
                column[5] = (6, num_values)

    return lambda data: change_footer(set_in_pages(path, 5, 1, num_values)(data), change)


def pages(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of a table that was written in one row group."""

    def forge(saved: Path) -> None:
        table = pq.read_table(io.BytesIO(table_of(saved, name)))
        forge_file(saved, name, change(written(table)))

    return forge


def rows(name: str, change: Callable[[list[Row]], None]) -> Callable[[Path], None]:
    return lambda saved: forge_rows(saved, name, change)


def set_row(column: str, value: Any) -> Callable[[list[Row]], None]:
    return lambda found: found[0].update({column: value})


def no_text(name: str, column: str) -> Callable[[Path], None]:
    """Put bytes that are no UTF-8 in a column of strings."""

    def forge(saved: Path) -> None:
        table = pq.read_table(io.BytesIO(table_of(saved, name)))
        size = table.num_rows
        offsets = pa.array([2 * index for index in range(size + 1)], pa.int32()).buffers()[1]
        wrong = pa.StringArray.from_buffers(size, offsets, pa.py_buffer(b"\xc3\x28" * size))
        index = table.schema.get_field_index(column)
        forge_file(saved, name, written(table.set_column(index, column, wrong)))

    return forge


def pickled(saved: Path) -> None:
    """A column that claims to be of an extension type of Python, which old releases of Arrow unpickled."""
    table = pq.read_table(io.BytesIO(table_of(saved, "tensors.parquet")))
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Evil()),
    }
    fields = [field.with_metadata(metadata) if field.name == "key" else field for field in table.schema]
    sink = io.BytesIO()
    pq.write_table(table.cast(pa.schema(fields)), sink)
    forge_file(saved, "tensors.parquet", sink.getvalue())


def manifest(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the text of the manifest and mend its digest."""

    def forge(saved: Path) -> None:
        path = saved / "manifest.json"
        data = re.sub(rb'"[0-9a-f]{16}"}\n$', b'"' + b"0" * 16 + b'"}\n', change(path.read_bytes()))
        path.write_bytes(data.replace(b"0" * 16 + b'"}\n', digest_hex(data).encode() + b'"}\n'))

    return forge


def objects(text: bytes) -> Callable[[Path], None]:
    return lambda saved: forge_file(saved, "objects.json", text)


def strewn(saved: Path) -> None:
    """The bars of a tensor lie anywhere in it: over each other, with gaps, and with corners that do not cancel."""
    keys = {row["tensor_id"]: row["key"] for row in read_rows(saved, "tensors.parquet")}
    dice = random.Random(3)

    def change(found: list[Row]) -> None:
        for row in found:
            if keys[row["tensor_id"]] == "bars":
                sides = zip(BARS.shape, row["lengths"], strict=True)
                row["offsets"] = [dice.randrange(size - length + 1) for size, length in sides]

    forge_rows(saved, "shards.parquet", change)


def read_rows(saved: Path, name: str) -> list[Row]:
    return pq.read_table(io.BytesIO(table_of(saved, name))).to_pylist()


def zstd_bomb(saved: Path) -> None:
    """A compressed piece of which a gigabyte of zeros would come."""
    directory = saved / read_manifest(Store(saved))[0].data_dir
    (row,) = [row for row in read_rows(saved, "stored.parquet") if row["codec"] == "zstd"]
    (size,) = row["piece_bytes"]
    compressor = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    frame = b"".join([*(compressor.compress(bytes(1 << 24)) for _ in range(64)), compressor.flush()])
    assert len(frame) <= size
    bomb = frame.ljust(size, b"\0")
    with (directory / read_rows(saved, "files.parquet")[row["file_id"]]["path"]).open("r+b") as file:
        file.seek(row["byte_offset"])
        file.write(bomb)

    def change(found: list[Row]) -> None:
        next(one for one in found if one["codec"] == "zstd")["xxh3"] = [digest64(bomb)]

    forge_rows(saved, "stored.parquet", change)


def swapped(saved: Path) -> None:
    """One bar twice and another not at all."""

    def change(found: list[Row]) -> None:
        bars = [row for row in found if len(row["offsets"]) == 3]
        bars[1]["offsets"] = bars[0]["offsets"]

    forge_rows(saved, "shards.parquet", change)


BARS = torch.zeros(64, 64, 16)
BILLION = 10**9
MOST = (1 << 31) - 1
LENGTHS = "lengths.list.element"
DIGESTS = "xxh3.list.element"

HOSTILE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "path of another directory": (
        rows("files.parquet", set_row("path", "../../../../etc/passwd")),
        "FormatError",
        "may not leave the directory",
    ),
    "absolute path": (rows("files.parquet", set_row("path", "/etc/passwd")), "FormatError", "may not leave"),
    "attempt in another directory": (
        manifest(lambda data: re.sub(rb'"attempt":"[0-9a-f]{32}"', b'"attempt":"../../../../../etc"', data)),
        "FormatError",
        "attempt is not 32 hex digits",
    ),
    "shape beyond all memory": (
        rows("tensors.parquet", set_row("shape", [1 << 40, 1 << 40])),
        "FormatError",
        "do not add up",
    ),
    "shape of negative length": (
        rows("tensors.parquet", set_row("shape", [-4])),
        "FormatError",
        "impossible",
    ),
    "shape of many dimensions": (
        rows("tensors.parquet", set_row("shape", [1] * 100_000)),
        "FormatError",
        "impossible shape",
    ),
    "box beyond all memory": (
        rows("shards.parquet", set_row("lengths", [1 << 62])),
        "FormatError",
        "do not add up",
    ),
    "a box twice": (swapped, "CheckpointError", "model/bars: overlap"),
    "boxes strewn over each other": (
        strewn,
        "CheckpointError",
        "model/bars: (overlap|gap|layout too irregular)",
    ),
    "a billion rows in the footer": (
        pages("files.parquet", set_rows(BILLION)),
        "FormatError",
        f"{BILLION} rows, allowed are",
    ),
    "a hundred million rows in the footer": (
        pages("files.parquet", set_rows(10**8)),
        "FormatError",
        "100000000 values, its pages have 1",
    ),
    "a billion rows in a page": (
        pages("files.parquet", set_in_pages("num_bytes", 5, 1, BILLION)),
        "FormatError",
        f"its pages have {BILLION}",
    ),
    "a row of two billion lengths": (
        pages("shards.parquet", set_values(LENGTHS, MOST)),
        "FormatError",
        "more than any honest table",
    ),
    "a row of two billion digests, told by the page only": (
        pages("stored.parquet", set_in_pages(DIGESTS, 5, 1, MOST)),
        "FormatError",
        f"its pages have {MOST}",
    ),
    "a dictionary of two billion strings": (
        pages("stored.parquet", set_in_pages("codec", 7, 1, MOST)),
        "FormatError",
        "more than any honest table",
    ),
    "a page that decompresses to two gigabytes": (
        pages("stored.parquet", set_in_pages("codec", 0, 2, MOST)),
        "FormatError",
        "more than any honest table",
    ),
    "a page of negative size": (
        pages("stored.parquet", set_in_pages("codec", 0, 3, -5)),
        "FormatError",
        "a page of -5 bytes",
    ),
    "an encoding that repeats strings for nothing": (
        lambda saved: forge_file(
            saved,
            "rank_objects.parquet",
            written(
                pa.table({"rank": [0] * 9, "key": ["k" * 9] * 9, "value": ["{}"] * 9}),
                use_dictionary=False,
                column_encoding={"key": "DELTA_BYTE_ARRAY"},
            ),
        ),
        "FormatError",
        "in encoding 7",
    ),
    "a megabyte two million times in a dictionary": (
        lambda saved: forge_file(
            saved, "stored.parquet", repeated("stored.parquet", "codec", 1 << 20, 2_000_000)
        ),
        "FormatError",
        "more than any honest table",
    ),
    "a megabyte two million times for one rank": (
        lambda saved: forge_file(
            saved, "rank_objects.parquet", repeated("rank_objects.parquet", "value", 1 << 20, 2_000_000)
        ),
        "FormatError",
        "more than any honest table",
    ),
    "three hundred megabytes of one byte": (
        lambda saved: forge_file(
            saved,
            "rank_objects.parquet",
            written(
                pa.table({"rank": [0], "key": ["k"], "value": ["0" * (300 << 20)]}), use_dictionary=False
            ),
        ),
        "FormatError",
        "more than any honest table",
    ),
    "a compressed piece of a gigabyte of zeros": (
        zstd_bomb,
        "FormatError",
        f"model/noise.*claims to hold {1 << 30} bytes, not 80000",
    ),
    "not Parquet": (
        lambda saved: forge_file(saved, "files.parquet", b"PAR1" * 5),
        "FormatError",
        "not a readable",
    ),
    "an empty table file": (
        lambda saved: forge_file(saved, "files.parquet", b""),
        "FormatError",
        "not a readable",
    ),
    "a key that is no UTF-8": (no_text("tensors.parquet", "key"), "FormatError", "not a readable"),
    "a path that is no UTF-8": (no_text("files.parquet", "path"), "FormatError", "not a readable"),
    "plain values that are no UTF-8": (objects(b'{"model": "\xc3\x28"}'), "FormatError", "not valid JSON"),
    "a manifest that is no UTF-8": (
        manifest(lambda data: data.replace(b"omniload.checkpoint", b"omniload.check\xc3\x28")),
        "FormatError",
        "not valid JSON",
    ),
    "plain values nested a million deep": (objects(b"[" * 1_000_000), "FormatError", "not valid JSON"),
    "tags nested a million deep": (objects(b'{"$tuple":[' * 1_000_000), "FormatError", "not valid JSON"),
    "a number of a million digits": (
        objects(b'{"a":' + b"9" * 1_000_000 + b"}"),
        "FormatError",
        "not valid JSON",
    ),
    "a tag of code": (objects(b'{"model": {"$pickle": "gASVJAAAAAAAAAA="}}'), "FormatError", "unknown tag"),
    "a column of pickles": (pickled, "accepted|FormatError", ""),
    "plain values of a pickle": (
        objects(
            json.dumps({"model": {"$bytes": "gASVHAAAAAAAAACMAm9zlIwGc3lzdGVtlJOUjAJsc5SFlFKULg=="}}).encode()
        ),
        "accepted",
        "",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What reading each of the hostile checkpoints came to, by its name."""
    root = tmp_path_factory.mktemp("hostile")
    good = root / "good"
    bars = [Box((x, y, 0), (1, 1, 16)) for x in range(64) for y in range(64)]
    layouts = {"a": [[Box((0,), (4,))]], "bars": [bars], "noise": [[Box((0,), (20_000,))]]}
    tensors = {"a": torch.zeros(4), "bars": BARS, "noise": random_bits((20_000,), torch.float32, 1)}
    options = replace(OPTIONS, compression={"model/noise": "zstd"})
    save_simulated(Store(good), 1, tensors, layouts, options=options)
    paths = [str(good)]
    for index, (forge, _, _) in enumerate(HOSTILE.values()):
        paths.append(str(root / f"{index}"))
        shutil.copytree(good, paths[-1])
        forge(Path(paths[-1]))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([paths, _MAX_BYTES, _MAX_SECONDS])],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[paths[0]] == ["accepted", ""], (found[paths[0]], done.stderr)
    return {name: tuple(found[path]) for name, path in zip(HOSTILE, paths[1:], strict=True)}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, answers: dict[str, tuple[str, str]]) -> None:
    """Refused with one clear line, or harmless; within the limits of memory and time; nothing executed or written."""
    _, kind, words = HOSTILE[name]
    outcome, message = answers[name]
    assert re.fullmatch(kind, outcome), (outcome, message)
    assert re.search(words, message), message
    assert "\n" not in message
    assert len(message) < 2000
    assert not Path("/tmp/a-checkpoint-was-executed").exists()
