"""Reading a mixture: YAML files that include others, variables of the environment, overrides, relative paths.

A mixture is written in layers: the files it includes in order, the file itself, the overrides of the command line. A
layer is merged over those before it as a JSON merge patch (RFC 7386): mappings key by key, anything else as a whole,
and a null takes a key away again. In each layer ``${NAME}`` and ``${NAME:-default}`` stand for a variable of the
environment (``$${`` for a plain ``${``), and relative paths start from the folder of the file that names them, or, in
an override or a mapping, from the working directory. What comes out is plain: it depends on no file and no variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from omniload.errors import MixtureError
from omniload.samples.chatml import CHAT_TEMPLATES
from omniload.suggest import suggest

Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""``["sources.web.weight=0.3"]``, values in YAML, or ``{"sources.web.weight": 0.3}``."""

PATH_KEYS = frozenset({"quarantine", "tokenizer"})
"""Top-level keys that hold a path."""
SOURCE_PATH_KEYS = frozenset({"path"})
"""Keys of a source that hold a path, or a list of them."""

_VARIABLE = re.compile(r"\$?\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")


def read_layers(mixture: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The plain content of a mixture file or mapping, what it includes merged under it.

    Raises:
        MixtureError: a file that cannot be read, includes itself or is not YAML; a variable that is not set.
    """
    if isinstance(mixture, Mapping):
        return _layer(mixture, "mixture", Path(), ())
    return _read_file(Path(mixture), ())


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A layer over another, as a JSON merge patch; a null over nothing stays, for validation to judge."""
    merged = dict(base)
    for key, value in patch.items():
        under = merged.get(key)
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, Mapping) and isinstance(under, Mapping):
            merged[key] = merge(under, value)
        else:
            merged[key] = value
    return merged


def override(values: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Values with dotted overrides merged over them, one after the other.

    Raises:
        MixtureError: an override that is not ``key=value``, or leads through something that is not there.
    """
    merged = dict(values)
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    for key, value in pairs:
        where = f"override '{key}'"
        if not key:
            raise MixtureError(f"{where}: not of the form key=value")
        patch: Any = value
        for part in reversed(_parts(merged, key, where)):
            patch = {part: patch}
        merged = merge(merged, _layer(patch, where, Path(), ()))
    return merged


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue  # `<<` is resolved, and a key that is no scalar refused, by the parent
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise MixtureError(f"key '{key}' given twice, the second time in line {line}: remove one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        number = error.problem_mark.line if error.problem_mark else 0
        in_flow = "${" in "".join(text.splitlines()[number : number + 1])
        hint = "; inside {…} a value with ${…} needs quotes" if in_flow else ""
        raise MixtureError(f"{where}: not valid YAML in line {number + 1}: {error.problem}{hint}") from None
    except (yaml.YAMLError, MixtureError, ValueError) as error:  # ValueError: a date that does not exist
        raise MixtureError(f"{where}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise MixtureError(f"{where}: nested too deeply; see the README for an example") from None


def _read_file(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    by = f", included by {including[-1]}" if including else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MixtureError(f"{path}: no such mixture file{by}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise MixtureError(f"{path}: cannot be read{by}: {error}") from error
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise MixtureError(f"{path}: holds no mapping of keys; see the README for an example")
    return _layer(values, str(path), path.parent, (*including, path))


def _layer(values: Mapping[str, Any], where: str, base: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    """One layer made plain, over what it includes."""
    try:
        plain: dict[str, Any] = _expand(dict(values), where, "")
    except RecursionError:
        raise MixtureError(f"{where}: a mapping or list that holds itself; write it out") from None
    included = plain.pop("include", [])
    included = [included] if isinstance(included, str) else included
    if not isinstance(included, list | tuple) or not all(isinstance(name, str) for name in included):
        raise MixtureError(f"{where}: include: a file or a list of files is needed, got {included!r}")
    merged: dict[str, Any] = {}
    for name in included:
        path = base / _expand_user(name)
        if any(os.path.realpath(path) == os.path.realpath(other) for other in including):
            chain = " includes ".join(str(other) for other in (*including, path))
            raise MixtureError(f"{where}: include goes round in a circle: {chain}; remove one of them")
        merged = merge(merged, _read_file(path, including))
    return merge(merged, _resolve_paths(plain, base))


def _expand(value: Any, where: str, key: str) -> Any:
    """A value with the variables in its strings replaced."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match, where, key), value)
    if isinstance(value, Mapping):
        return {k: _expand(v, where, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_expand(item, where, f"{key}.{i}") for i, item in enumerate(value)]
    return value


def _variable(match: re.Match[str], where: str, key: str) -> str:
    if match[0].startswith("$$"):
        return match[0][1:]
    name, default = match[1], match[2]
    if name is None:
        raise MixtureError(
            f"{where}: {key}: a '${{' that is neither ${{NAME}} nor ${{NAME:-default}}; for a plain one write $${{"
        )
    value = os.environ.get(name)
    if default is not None:
        return value or default  # as in a shell, an empty variable takes the default too
    if value is None:
        raise MixtureError(
            f"{where}: {key}: the environment has no variable {name}; set it, or write ${{{name}:-default}}"
        )
    return value


def _resolve_paths(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the relative paths of a layer relative to its folder, not to the working directory."""

    def resolve(path: Any) -> Any:
        if isinstance(path, list | tuple):
            return [resolve(one) for one in path]
        if not isinstance(path, str) or "://" in path:
            return path
        return str(base / _expand_user(path))

    def level(members: dict[str, Any]) -> dict[str, Any]:
        resolved = dict(members)
        resolved |= _map(members, "sources", lambda spec: template(_each(spec, SOURCE_PATH_KEYS, resolve)))
        return resolved | _map(members, "groups", level)

    def template(values: dict[str, Any]) -> dict[str, Any]:
        built_in = values.get("chat_template") in tuple(CHAT_TEMPLATES)
        return values if built_in else _each(values, frozenset({"chat_template"}), resolve)

    return template(_each(level(values), PATH_KEYS, resolve))


def _map(values: Mapping[str, Any], key: str, function: Callable[[Any], Any]) -> dict[str, Any]:
    """The mapping under ``key`` with a function applied to its mappings; nothing if it is not one."""
    under = values.get(key)
    if not isinstance(under, Mapping):
        return {}
    return {key: {name: function(v) if isinstance(v, Mapping) else v for name, v in under.items()}}


def _each(values: Mapping[str, Any], keys: frozenset[str], function: Callable[[Any], Any]) -> dict[str, Any]:
    """The values, with a function applied to those of some keys."""
    return {key: function(value) if key in keys else value for key, value in values.items()}


def _expand_user(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib's raises if there is no such user


def _parse_override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise MixtureError(f"override '{text}': not of the form key=value")
    return key, _parse_yaml(value, f"override '{key}'")


def _parts(values: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A dotted key as the keys it goes through; a name that has dots itself is known by being there."""
    parts: list[str] = []
    under: Any = values
    rest = key
    while rest:
        if parts and not isinstance(under, Mapping):
            raise MixtureError(f"{where}: '{'.'.join(parts)}' is no mapping; replace it as a whole")
        names = [str(name) for name in under if rest == name or rest.startswith(f"{name}.")]
        part = max(names, key=len) if names else rest.partition(".")[0]
        if not names and part != rest and parts and parts[-1] in ("sources", "groups"):
            raise MixtureError(f"{where}: no '{part}' in '{'.'.join(parts)}'{suggest(part, list(under))}")
        parts.append(part)
        rest = rest[len(part) + 1 :]
        under = under.get(part, {})
    return parts
