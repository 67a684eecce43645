"""``omniload ckpt diff``: whether two checkpoints hold the same state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from checkpoint.cli_common import show, size_text, user_errors
from checkpoint.cli_compare import Comparison, Finding, Kind, compare
from checkpoint.stored import StoredCheckpoint
from storage import Store

EXIT_DIFFERENT: Final = 1

_NUM_SHOWN: Final = 10


def diff(
    a: Annotated[str, typer.Argument(help="Directory or URL of a checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Directory or URL of another.", show_default=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with all keys that differ.")
    ] = False,
) -> None:
    """Compare the state in two checkpoints bit for bit, whatever their layouts.

    Exit code 0 if they are equal, 1 if they differ, 2 if they could not be compared.
    """
    with user_errors():
        left, right = (StoredCheckpoint.open(Store(one)) for one in (a, b))
        found = compare(left, right)
    show(
        json.dumps(_document(found, left, right), indent=2)
        if as_json
        else "\n".join(_lines(found, left, right))
    )
    if not found.equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _document(found: Comparison, a: StoredCheckpoint, b: StoredCheckpoint) -> dict[str, Any]:
    findings = {
        kind.name.lower(): [one.key for one in found.findings[kind]]
        for kind in (Kind.ONLY_IN_A, Kind.ONLY_IN_B, Kind.OTHER_VALUES)
    }
    forms = [(one.key, one.forms) for one in found.findings[Kind.OTHER_FORM]]
    return {
        "equal": found.equal,
        "a": a.store.url,
        "b": b.store.url,
        "counts": {kind.name.lower(): len(found.findings[kind]) for kind in Kind},
        **findings,
        "other_form": {key: {"a": both[0], "b": both[1]} for key, both in forms if both},
        "rank_local_compared": found.num_ranks is None,
        "num_bytes_read": found.num_bytes_read,
    }


def _lines(found: Comparison, a: StoredCheckpoint, b: StoredCheckpoint) -> Iterator[str]:
    for name, checkpoint in (("A", a), ("B", b)):
        yield f"{name}  {checkpoint.store.url}  step {checkpoint.manifest.step}"
    for kind in Kind:
        findings = found.findings[kind]
        if kind is Kind.EQUAL:
            yield f"{kind}: {len(findings)}, {size_text(found.num_bytes_read)} read to tell"
        elif findings:
            yield f"{kind}: {len(findings)}"
            yield from (f"  {_line(one)}" for one in findings[:_NUM_SHOWN])
            if len(findings) > _NUM_SHOWN:
                yield f"  and {len(findings) - _NUM_SHOWN} more"
    if found.num_ranks is not None:
        yield f"rank-local values not compared: written by {found.num_ranks[0]} and {found.num_ranks[1]} ranks"


def _line(finding: Finding) -> str:
    if finding.forms is None:
        return finding.key
    return f"{finding.key}  {finding.forms[0]} in A, {finding.forms[1]} in B"
