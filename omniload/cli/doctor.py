"""``omniload doctor``: what is installed, and what stands in the way."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.kernels import KERNELS

PACKAGES = ("checkpoint", "omniload", "storage", "training")
"""Our top-level import packages, whose names a user's own modules could take."""
DEPENDENCIES = ("fsspec", "numpy", "obstore", "pyarrow", "ray", "s3fs", "safetensors", "tokenizers", "torch")
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


# What `python script.py` in the working directory would import; a folder without __init__ counts too.
_PROBE = """
import importlib.util, json, sys
def place(spec):
    return spec and (spec.origin or list(spec.submodule_search_locations)[0])
print(json.dumps({name: place(importlib.util.find_spec(name)) for name in sys.argv[1:]}))
"""


def shadowed(directory: Path) -> list[Finding]:
    """Our packages as Python finds them from ``directory``, each a problem if it is somebody else's module.

    Args:
        directory: where a user's script would run; it precedes the installed packages on ``sys.path``.
    """
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, *PACKAGES],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ours = Path(__file__).resolve().parents[2]
    findings = []
    for name, origin in json.loads(probe.stdout).items():
        found = Path(origin).resolve() if origin else None
        ok = found is not None and ours in found.parents
        remedy = f"a script in {directory} would import {found} instead: rename it"
        findings.append(Finding(name, str(found.parent) if found and ok else remedy, ok))
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
    built = KERNELS is not None
    text = "compiled" if built else "not compiled, slower: install a C compiler, then omniload again"
    findings = [Finding("kernels", text, True), Finding("cores", str(os.cpu_count()), True)]
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
