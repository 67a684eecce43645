"""``omniload data replay``: the exact samples of a step, and where each came from."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.errors import PlaceError, StateError
from omniload.forecasting.dry_run import DryRun
from omniload.mixture import Mixture
from omniload.origins import origins
from omniload.planner import Plan, StreamState

_OF_LANES_BEGUN = {"lanes_yielded", "dp_size"}


def replay(
    mixture: Annotated[Path, typer.Argument(help="The mixture's YAML file.", metavar="MIXTURE")],
    state: Annotated[
        Path,
        typer.Option(help="The loader's state_dict as a JSON file, or the folder of a checkpoint with it."),
    ],
    step: Annotated[int, typer.Option(min=0, help="The step to replay, not before the state's.")],
    lane: Annotated[int | None, typer.Option(min=0, help="Only this lane.")] = None,
    key: Annotated[str, typer.Option(help="What the loader is called in a checkpoint.")] = "loader",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each sample.")] = False,
    overrides: Annotated[
        list[str],
        typer.Argument(help="Keys that replace the file's.", metavar="KEY=VALUE", show_default=False),
    ] = [],  # noqa: B006 - typer makes a new one
) -> None:
    """List the samples of a step from a saved state of the loader: file, row, tokens, pack and lane of each.

    Plans forward from the state on metadata alone. The lists of a run's own loader are the same.
    """
    spec = Mixture.load(mixture, overrides=[*overrides, "quarantine=null"])
    if lane is not None and lane >= spec.lanes:
        raise PlaceError(f"--lane: {lane} is not in 0..{spec.lanes - 1}, the lanes of {mixture}")
    stream = _stream(spec, _read(state, key))
    if step < stream.step:
        raise StateError(
            f"--step: {step} is before step {stream.step}, where {state} stands; give an earlier state"
        )
    with DryRun(spec, stream) as run:
        plan = next((plan for plan in run.plans() if plan.step == step), None)
        if plan is None:
            raise StateError(
                f"--step: the stream ends before step {run.state.step}, so there is no step {step}"
            )
        lanes = range(plan.num_lanes) if lane is None else [lane]
        tables = [(one, origins(plan, one, run.loaders)) for one in lanes]
    if as_json:
        _write_json(step, tables)
    else:
        _write_table(plan, tables)


def _read(path: Path, key: str) -> dict[str, Any]:
    """The state dict in a file or a checkpoint."""
    if path.is_dir():
        return _read_checkpoint(path, key)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StateError(f"--state: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StateError(f"--state: {path} is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise StateError(f"--state: {path} holds no loader state; write json.dump(loader.state_dict(), file)")
    return state


class _Holder:
    """Takes the state of a loader out of a checkpoint."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What was loaded."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it."""
        self.state = state_dict


def _read_checkpoint(path: Path, key: str) -> dict[str, Any]:
    # Found by name, as the command `ckpt` is: the loader does not know the package of checkpoints.
    checkpoint = importlib.import_module("checkpoint")
    errors = importlib.import_module("checkpoint.errors")
    holder = _Holder()
    try:
        checkpoint.load(path, {key: holder})
    except errors.CheckpointError as error:
        raise StateError(f"--state: {error}") from None
    return holder.state


def _stream(mixture: Mixture, state: dict[str, Any]) -> StreamState:
    """The stream before the step that the state stands in, if it is one of this mixture."""
    from omniload import DataLoader

    # A state taken inside a step says how many lanes a rank had seen of it: that is another question.
    whole = {name: value for name, value in state.items() if name not in _OF_LANES_BEGUN}
    with DataLoader(mixture) as loader:
        loader.load_state_dict(whole)
        return StreamState.from_json(loader.state_dict()["stream"], mixture.names)


def _write_json(step: int, tables: list[tuple[int, pa.Table]]) -> None:
    for lane, table in tables:
        for row in table.to_pylist():
            sys.stdout.write(json.dumps({"step": step, "lane": lane, **row}, ensure_ascii=False) + "\n")


def _write_table(plan: Plan, tables: list[tuple[int, pa.Table]]) -> None:
    shown = Table("lane", "pack", "source", "epoch", "file", "row", "tokens", title=f"step {plan.step}")
    for lane, table in tables:
        for row in table.to_pylist():
            shown.add_row(
                str(lane),
                str(row["pack"]),
                escape(row["source"]),
                str(row["epoch"]),
                escape(row["file"]),
                f"{row['row']:,}",
                f"{row['start']:,}–{row['end']:,}",
            )
    console = Console()
    console.print(shown)
    console.print(f"{sum(table.num_rows for _, table in tables):,} pieces; plan {plan.hash}")
