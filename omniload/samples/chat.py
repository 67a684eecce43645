"""Chat templates: messages become text, and the assistant's turns in it are what is trained on.

A turn is trained on from where the model takes over, which is where the generation prompt ends, up to and with the
token that ends the turn. A template that marks this with ``{% generation %}`` is taken by its word. For one that does
not, the chat is rendered up to before the turn, with the generation prompt, and up to after it: the turn is the
difference, without white space at its end, which follows the end-of-turn token where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import xxhash

from omniload.errors import MixtureError
from omniload.samples.chatml import CHAT_TEMPLATES
from omniload.samples.jinja_sandbox import Compiled, compiled, unmark
from omniload.samples.sample import BadSample, Text

_RULES = "turns-1"  # version of how the trained stretches are found; part of the fingerprint
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages of JSON types, each with a ``role``."""


class ChatTemplate:
    """Renders chats.

    Args:
        source: Jinja text.
        where: what to call it in messages.
        variables: special tokens, by the names that templates use.
        with_tools: Jinja text for chats with tools, if they have a template of their own.

    Raises:
        MixtureError: the text is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        where: str,
        variables: Mapping[str, str] | None = None,
        with_tools: str | None = None,
    ) -> None:
        self._where = where
        self._variables = dict(variables or {})
        sources = [source, source if with_tools is None else with_tools]
        self._compiled = [self._compile(one) for one in sources]  # for chats without tools, and with
        parts = json.dumps([_RULES, sources, self._variables], sort_keys=True)
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(parts.encode())
        """Hex digest of everything that the rendered text depends on besides the chat."""

    @classmethod
    def load(cls, name: str) -> ChatTemplate:
        """A built-in template, or one from a file.

        A ``tokenizer_config.json`` gives the special tokens too, and may keep its template in a
        ``chat_template.jinja`` beside it; a ``.jinja`` file takes special tokens from a ``tokenizer_config.json``
        beside it.

        Args:
            name: one of `CHAT_TEMPLATES`, or path of the file.

        Raises:
            MixtureError: the file is not what it should be, or lacks something that the template needs.
        """
        if name in CHAT_TEMPLATES:
            return cls(CHAT_TEMPLATES[name], where=f"chat_template '{name}'")
        path = Path(name)
        where = f"chat_template {path}"
        if path.suffix == ".json":
            return cls._of_config(path, where)
        source, beside = _read(path, where), path.with_name(_CONFIG)
        if beside.is_file():
            return cls(source, where=where, variables=_special_tokens(_read_config(beside, where)))
        template = cls(source, where=where)
        wanted = sorted(name for name in template._compiled[0].variables if name.endswith("_token"))
        if wanted:
            raise MixtureError(
                f"{where}: uses {wanted[0]}, which it does not say; put the model's {_CONFIG} beside it"
            )
        return template

    @classmethod
    def _of_config(cls, path: Path, where: str) -> ChatTemplate:
        config = _read_config(path, where)
        found = config.get("chat_template")
        if found is None and path.with_name(_TEMPLATE).is_file():
            found = _read(path.with_name(_TEMPLATE), where)
        if isinstance(found, list):  # of named templates, as older files have it
            found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        by_name = found if isinstance(found, dict) else {"default": found}
        source, with_tools = by_name.get("default"), by_name.get("tool_use")
        if not isinstance(source, str) or not isinstance(with_tools, str | None):
            raise MixtureError(
                f"{where}: has no chat_template, and there is no {_TEMPLATE} beside it; name the file that has it"
            )
        return cls(source, where=where, variables=_special_tokens(config), with_tools=with_tools)

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, first_trained: int = 0
    ) -> Text:
        """The text of a chat.

        Args:
            messages: the chat.
            tools: descriptions of the tools offered, as JSON schemas.
            first_trained: messages before this one are context only.

        Raises:
            BadSample: the template refuses the chat; nothing in it is to be trained on; or it is not to be found in
                the text.
            MixtureError: the template asks for the date of the day.
        """
        if not any(message["role"] == "assistant" for message in messages[first_trained:]):
            raise BadSample("no message by the assistant to train on")
        if self._compiled[bool(tools)].marks_generation:
            text, spans = self._marked(messages, tools)
            if first_trained:
                spans = spans[len(self._marked(messages[:first_trained], tools)[1]) :]
        else:
            text, spans = self._differences(messages, tools, first_trained)
        if not spans:
            raise BadSample("no text by the assistant to train on")
        return Text(text, tuple(spans), is_chat=True)

    def _marked(self, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        found = unmark(self._text(messages, tools))
        if found is None:
            raise BadSample(f"{self._where} tears the ends off its own {{% generation %}} blocks")
        return found

    def _differences(
        self, messages: Messages, tools: Sequence[Any] | None, first_trained: int
    ) -> tuple[str, list[tuple[int, int]]]:
        text = self._text(messages, tools)
        spans = []
        for i in range(first_trained, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            before = self._text(messages[:i], tools, add_generation_prompt=True)
            through = self._text(messages[: i + 1], tools)
            end = max(len(before), len(through.rstrip()))
            if not (through.startswith(before) and text.startswith(through[:end])):
                raise BadSample(
                    f"{self._where} writes message {i} otherwise when another follows, or not after its generation"
                    " prompt, so that what the model generates cannot be told; put {% generation %} around it"
                )
            if end > len(before):
                spans.append((len(before), end))
        return text, spans

    def _text(
        self, messages: Messages, tools: Sequence[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._compiled[bool(tools)].template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever an expression of the template raises on this chat
            reason = " ".join(str(error).split())
            if isinstance(error, jinja2.UndefinedError) and "strftime_now" in reason:
                raise MixtureError(
                    f"{self._where}: asks for the date of the day (strftime_now), on which the stream must not"
                    " depend; write a fixed date into it"
                ) from None
            raise BadSample(f"{self._where}: {reason}") from None

    def _compile(self, source: str) -> Compiled:
        try:
            return compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise MixtureError(
                f"{self._where}: not a Jinja template: line {error.lineno}: {error.message}"
            ) from None


def _read(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MixtureError(f"{where}: cannot be read: {error}") from error


def _read_config(path: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(_read(path, where))
    except ValueError as error:
        raise MixtureError(f"{where}: {path.name} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise MixtureError(f"{where}: {path.name} holds no JSON object")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, each a text or an object with the text as its ``content``."""
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
