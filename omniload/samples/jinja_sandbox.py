"""The environment that chat templates of the Hugging Face kind run in: sandboxed, and a function of its inputs only.

Templates are code of others. They run in Jinja's immutable sandbox, with the helpers that `transformers` promises them
(``raise_exception``, ``tojson`` without HTML escapes, loop controls, ``{% generation %}``). Left out is
``strftime_now``: the stream must not depend on the day. Templates that ask whether it is defined have a date of their
own for this case.

What a ``{% generation %}`` block prints is put between `START` and `END`, two of Unicode's noncharacters, which are
reserved for such use; so it is found again whatever macros and filters it passes through.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

START, END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{START}{END}])")


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the block's output between marks; what it sets stays inside, as in a macro."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (START, END))
        return [start.set_lineno(line), nodes.Scope(body).set_lineno(line), end.set_lineno(line)]


class Compiled(NamedTuple):
    """A chat template, ready to render; threads may share it."""

    template: Template
    """Of the sandbox."""
    marks_generation: bool
    """Whether it has a ``{% generation %}`` block."""
    variables: frozenset[str]
    """What it expects to be given."""


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> Compiled:
    """Compile a chat template.

    Raises:
        jinja2.TemplateSyntaxError: it is not one.
    """
    made = _environment()
    tree = made.parse(source)
    return Compiled(
        template=made.from_string(source),
        marks_generation=any(data.data == START for data in tree.find_all(nodes.TemplateData)),
        variables=frozenset(meta.find_undeclared_variables(tree)),
    )


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made


def is_marked(text: str) -> bool:
    """Whether a text has a character that is reserved for marks."""
    return START in text or END in text


def unmark(marked: str) -> tuple[str, list[tuple[int, int]]] | None:
    """Text without marks, and the bounds, in characters, of what lay between them; None if they are not in pairs."""
    parts = _MARKS.split(marked)
    marks = parts[1::2]
    if marks != [START, END] * (len(marks) // 2):
        return None
    spans, at = [], 0
    for i, part in enumerate(parts[::2]):
        if i % 2 and part:
            spans.append((at, at + len(part)))
        at += len(part)
    return "".join(parts[::2]), spans


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
