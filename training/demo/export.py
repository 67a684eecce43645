"""Exports a checkpoint for Hugging Face and compares the files with the state the trainer had in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors import deserialize

from training.demo.errors import LogError, RunError

_TIMEOUT_S = 120.0
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest:
    """What identifies a tensor bit for bit."""

    dtype: str
    """torch's name of the type."""
    shape: tuple[int, ...]
    """Its shape."""
    xxh3_128: str
    """Digest of its contiguous little-endian bytes, in hexadecimal."""


def convert(checkpoint: Path, directory: Path) -> None:
    """Runs `omniload ckpt convert` on a checkpoint.

    Raises:
        RunError: The command failed or took longer than two minutes.
    """
    command = [sys.executable, "-m", "omniload", "ckpt", "convert", str(checkpoint), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"{checkpoint}: conversion took longer than {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise RunError(f"{checkpoint}: conversion exited with code {done.returncode}: {done.stderr.strip()}")


def exported_tensors(directory: Path) -> dict[str, TensorDigest]:
    """Opens every safetensors file of an export and digests what is in it.

    Raises:
        LogError: There is no safetensors file, or two files hold the same tensor.
    """
    tensors: dict[str, TensorDigest] = {}
    for path in sorted(directory.glob("*.safetensors")):
        # safetensors has no stubs for its compiled part
        for name, entry in deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            if name in tensors:
                raise LogError(f"{path}: holds {name}, which another file of the export holds too")
            tensors[name] = TensorDigest(
                dtype=_DTYPES.get(entry["dtype"], entry["dtype"]),
                shape=tuple(entry["shape"]),
                xxh3_128=xxhash.xxh3_128_hexdigest(entry["data"]),
            )
    if not tensors:
        raise LogError(f"{directory}: no safetensors file in the export")
    return tensors


def final_tensors(run: Path) -> dict[str, TensorDigest]:
    """Reads the digests that the trainer took of its full tensors at the end of a run.

    Raises:
        LogError: The run left none.
    """
    path = run / "final_state.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["tensors"]
        return {
            name: TensorDigest(dtype=row["dtype"], shape=tuple(row["shape"]), xxh3_128=row["xxh3_128"])
            for name, row in rows.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{path}: not the trainer's record of its final state ({error!r})") from error


def export_problems(memory: Mapping[str, TensorDigest], exported: Mapping[str, TensorDigest]) -> list[str]:
    """Names every tensor that is missing, unexpected or not bit for bit the same."""
    problems = []
    for name in sorted(memory.keys() | exported.keys()):
        if name not in exported:
            problems.append(f"{name} is missing in the export")
        elif name not in memory:
            problems.append(f"{name} is in the export but not in memory")
        elif memory[name] != exported[name]:
            problems.append(f"{name} differs from memory")
    return problems
