"""``omniload ckpt``: list, inspect, verify, compare, print, convert and clean up checkpoints."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.tree import Tree

from checkpoint.cli_cat import cat
from checkpoint.cli_common import (
    EXIT_USER_ERROR,
    PathArgument,
    console,
    progress_bar,
    show,
    show_error,
    size_text,
    user_errors,
)
from checkpoint.cli_diff import diff
from checkpoint.cli_gc import gc
from checkpoint.cli_report import report
from checkpoint.errors import CheckpointError, NotACheckpoint
from checkpoint.format.index import TensorRow
from checkpoint.format.manifest import MANIFEST
from checkpoint.stored import StoredCheckpoint
from storage import Store
from storage.errors import BadRequest, StorageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="List, inspect, verify, compare, print, convert and clean up checkpoints.",
)

_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
}


class Target(StrEnum):
    """Formats to convert to."""

    HF = "hf"


class FloatType(StrEnum):
    """Floating-point types to convert to."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


@app.command("ls")
def list_checkpoints(
    root: Annotated[str, typer.Argument(help="Directory or URL that holds checkpoints.", show_default=False)],
) -> None:
    """List the committed checkpoints in a directory; ends with code 2 if one of them cannot be read."""
    with user_errors():
        store = Store(root)
        found = [store.sub(name) for name in store.list_dirs() if store.exists(f"{name}/{MANIFEST}")]
        if store.exists(MANIFEST):
            found.insert(0, store)
        if not found:
            raise NotACheckpoint(f"{store.url}: no committed checkpoint in it; check the path")
        table = Table("checkpoint", "step", "created", "ranks", "tensors", "size", box=None)
        unreadable = False
        for one in found:
            try:
                checkpoint = StoredCheckpoint.open(one)
            except (CheckpointError, StorageError) as error:
                unreadable = True
                show_error(error)
                continue
            manifest, tables = checkpoint.manifest, checkpoint.tables
            table.add_row(
                PurePosixPath(one.url).name,
                "-" if manifest.step is None else str(manifest.step),
                manifest.created,
                str(manifest.writer.get("world_size", "-")),
                str(len(tables.tensors)),
                size_text(sum(tensor.num_bytes for tensor in tables.tensors)),
            )
        if table.row_count:
            console().print(table)
        if unreadable:
            raise typer.Exit(EXIT_USER_ERROR)


@app.command()
def inspect(path: PathArgument) -> None:
    """Show what a checkpoint holds: tensors with shape, dtype, layout and size, objects, files."""
    with user_errors():
        checkpoint = StoredCheckpoint.open(Store(path))
        manifest, tables = checkpoint.manifest, checkpoint.tables
        out = console(soft_wrap=True)
        num_bytes = sum(tensor.num_bytes for tensor in tables.tensors)
        out.print(
            f"{checkpoint.store.url}\nstep {manifest.step}, created {manifest.created}, attempt {manifest.attempt}\n"
            f"written by {', '.join(f'{key} {value}' for key, value in manifest.writer.items())}\n"
            f"{len(tables.tensors)} tensors, {size_text(num_bytes)} in {len(tables.files)} files",
        )
        for name, value in manifest.user_metadata.items():
            out.print(f"{name}: {value}")
        for group in sorted({*(tensor.group for tensor in tables.tensors), *checkpoint.objects}):
            out.print(_group_tree(checkpoint, group))


@app.command()
def verify(path: PathArgument) -> None:
    """Check every byte of a checkpoint against its digests, and its tables against each other."""
    from checkpoint.verify import verify as verify_checkpoint

    with user_errors():
        checkpoint = StoredCheckpoint.open(Store(path))
        num_bytes = int(checkpoint.tables.boxes.stored_bytes.sum())
        with progress_bar("verifying", num_bytes) as advance:
            report = verify_checkpoint(checkpoint, advance)
        for problem in report.problems:
            show_error(problem)
        if report.problems:
            raise typer.Exit(EXIT_USER_ERROR)
        show(
            f"{checkpoint.store.url}: {report.num_tensors} tensors, {size_text(report.num_bytes)} in "
            f"{report.num_files} files verified"
        )


@app.command()
def convert(
    source: PathArgument,
    destination: Annotated[str, typer.Argument(help="New directory or URL.", show_default=False)],
    to: Annotated[Target, typer.Option(help="Format to write.")] = Target.HF,
    group: Annotated[str, typer.Option(help="State key of the model.")] = "model",
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file, e.g. 5GB or 500MiB.")] = "5GB",
    dtype: Annotated[
        FloatType | None,
        typer.Option(help="Convert floating-point tensors to this type.", show_default="as stored"),
    ] = None,
) -> None:
    """Write the model of a checkpoint in another format (Hugging Face safetensors), verifying what is read."""
    # torch is imported here so that the other commands start quickly.
    from checkpoint.convert import convert_to_hf

    assert to is Target.HF
    with user_errors():
        max_shard_bytes = _parse_size(max_shard_size)
        checkpoint = StoredCheckpoint.open(Store(source))
        target = Store(destination)
        total = sum(tensor.num_bytes for tensor in checkpoint.tables.tensors if tensor.group == group)
        with progress_bar("converting", total) as advance:
            report = convert_to_hf(
                checkpoint,
                target,
                group=group,
                max_shard_bytes=max_shard_bytes,
                dtype=None if dtype is None else dtype.value,
                progress=advance,
            )
        show(
            f"{target.url}: {report.num_tensors} tensors, {size_text(report.num_bytes)} in "
            f"{len(report.files)} files written"
        )


app.command()(diff)
app.command()(cat)
app.command()(gc)
app.command()(report)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS or not (num_bytes := int(float(match[1]) * _UNITS[match[2]])):
        raise BadRequest(f"--max-shard-size {text!r} is not a size; write for example 5GB, 500MB or 2GiB")
    return num_bytes


def _group_tree(checkpoint: StoredCheckpoint, group: str) -> Tree:
    """The tensors of one group as a tree of the dotted parts of their keys."""
    tables = checkpoint.tables
    members = [(index, tensor) for index, tensor in enumerate(tables.tensors) if tensor.group == group]
    num_bytes = sum(tensor.num_bytes for _, tensor in members)
    root = Tree(
        f"{group}  {len(members)} tensors, {size_text(num_bytes)}" if members else f"{group}  plain values"
    )
    branches: dict[str, Tree] = {"": root}
    for index, tensor in members:
        *parents, leaf = tensor.key.split(".")
        prefix = ""
        for part in parents:
            path = f"{prefix}.{part}" if prefix else part
            if path not in branches:
                branches[path] = branches[prefix].add(part)
            prefix = path
        branches[prefix].add(
            f"{leaf}  {tensor.dtype} {list(tensor.shape)}  {size_text(tensor.num_bytes)}  "
            f"{_layout(checkpoint, index, tensor)}"
        )
    return root


def _layout(checkpoint: StoredCheckpoint, tensor_id: int, tensor: TensorRow) -> str:
    offsets, _ = checkpoint.tables.boxes.corners_of(tensor_id, len(tensor.shape))
    if len(offsets) <= 1:
        return "whole" if len(offsets) else "no elements"
    grid = [len(set(column)) for column in offsets.T.tolist()]
    product = 1
    for cuts in grid:
        product *= cuts
    regular = product == len(offsets)
    return f"{'x'.join(map(str, grid))} boxes" if regular else f"{len(offsets)} boxes"
