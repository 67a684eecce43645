"""JSON lines, plain or compressed: a row is a line that holds an object."""

from __future__ import annotations

import json
from typing import Any

from omniload.sources.lines import LineSource
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, Row


class JsonlSource(LineSource):
    """JSON lines; a line that is not a JSON object is a `BadRow`.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        super().__init__(name, listing, parse_object)


def parse_object(line: memoryview) -> Row | BadRow:
    """The JSON object of a line."""
    try:
        row: Any = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        return BadRow(reason=f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(reason=f"a JSON {type(row).__name__}, not an object")
    return row
