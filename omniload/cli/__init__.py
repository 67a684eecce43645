"""The ``omniload`` command.

``ckpt`` and ``demo`` belong to the packages above and beside this one; they are found by name and imported only when
asked for, which also keeps ``omniload --help`` quick.
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from omniload.cli import data, doctor, top
from omniload.errors import OmniloadError
from storage import BadRequest, StorageError

_ELSEWHERE = {
    "ckpt": (
        "checkpoint.cli:app",
        "List, inspect, verify, compare, print, convert and clean up checkpoints.",
    ),
    "demo": (
        "training.demo.cli:app",
        "Load, train, break, resume elsewhere, prove, export: the whole job on real data.",
    ),
}


class _Elsewhere(TyperCommand):
    """A command of another package, imported when it is used and not when it is listed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, _, attribute = _ELSEWHERE[str(self.name)][0].partition(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        return command.make_context(info_name, args, parent, **extra)


class _Group(TyperGroup):
    """Adds the commands of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_ELSEWHERE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _ELSEWHERE:
            return _Elsewhere(cmd_name, help=_ELSEWHERE[cmd_name][1])
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Group,
    help="Data loading and checkpoint storage for foundation-model training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data.app, name="data", help="Check and look at mixtures.")
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)


def main() -> None:
    """Run the command; what the user can mend ends in one line on stderr and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and text may have what a terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (OmniloadError, StorageError, BadRequest) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise SystemExit(2) from None
