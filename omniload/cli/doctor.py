"""``omniload doctor``: what is installed, and what stands in the way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = ("checkpoint", "omniload", "storage", "training")
"""Our top-level import packages, whose names a user's own modules could take."""
DEPENDENCIES = ("fsspec", "numpy", "pyarrow", "ray", "s3fs", "safetensors", "tokenizers", "torch")
MIN_SHM_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    """What was looked at."""
    found: str
    """What was found; with the remedy, if it is a problem."""
    ok: bool
    """Whether it is as it should be."""


def shadowed(directory: Path) -> list[Finding]:
    """Our packages as Python finds them from ``directory``, each a problem if it is somebody else's module.

    Args:
        directory: where a user's script would run; it precedes the installed packages on ``sys.path``.
    """
    ours = Path(__file__).resolve().parents[2]
    findings = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        installed = Path(spec.origin).resolve() if spec and spec.origin else None
        local = [
            path for path in (directory / f"{name}.py", directory / name / "__init__.py") if path.exists()
        ]
        foreign = [path for path in local if ours not in path.resolve().parents]
        if installed is None or ours not in installed.parents:
            findings.append(Finding(name, f"shadowed by {installed}: rename that module", False))
        elif foreign:
            findings.append(
                Finding(name, f"a script in {directory} would import {foreign[0]} instead: rename it", False)
            )
        else:
            findings.append(Finding(name, str(installed.parent), True))
    return findings


def _versions() -> list[Finding]:
    findings = [Finding("python", platform.python_version(), True)]
    for name in DEPENDENCIES:
        try:
            findings.append(Finding(name, importlib.metadata.version(name), True))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, f"not installed: pip install {name}", False))
    return findings


def _machine() -> list[Finding]:
    findings = [Finding("cores", str(os.cpu_count()), True)]
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        enough = free >= MIN_SHM_BYTES
        text = f"{free / 2**30:.1f} GiB free"
        findings.append(
            Finding(
                "/dev/shm", text if enough else f"{text}: too small; in a container pass --shm-size", enough
            )
        )
    return findings


def doctor() -> None:
    """Report versions, shadowed package names and the machine; exit code 1 if something stands in the way."""
    findings = [*_versions(), *shadowed(Path.cwd()), *_machine()]
    table = Table("", "what", "found")
    for finding in findings:
        table.add_row(
            "[green]ok[/]" if finding.ok else "[red]problem[/]", escape(finding.what), escape(finding.found)
        )
    Console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
