"""Plain text, plain or compressed: a row is a line, as in the ``text`` builder of Hugging Face datasets.

Unlike there a blank line is no row, and a carriage return by itself ends no line. Paragraphs or whole files as rows
are left to formats that say where a document ends.
"""

from __future__ import annotations

from omniload.sources.lines import LineSource
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, Row


class TextSource(LineSource):
    """Lines of text as rows ``{"text": line}``; a line that is not UTF-8 is a `BadRow`.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        super().__init__(name, listing, _parse)


def _parse(line: memoryview) -> Row | BadRow:
    try:
        return {"text": str(line, "utf-8")}
    except UnicodeDecodeError as error:
        return BadRow(reason=f"not UTF-8: {error}")
