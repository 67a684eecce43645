"""The JSON Schema of the mixture file, for editors that complete and check it while it is written."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from omniload.mixture import Mixture, SourceSpec

_VARIABLE = {"type": "string", "pattern": r"\$\{"}


class Group(BaseModel):
    """Sources that share a weight."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    weight: float = Field(ge=0)
    """Share of the group, relative to the sources and groups beside it."""
    temperature: float | None = Field(default=None, gt=0)
    """Each weight w in the group counts as w^(1/temperature)."""
    sources: dict[str, SourceSpec] = Field(default_factory=dict)
    """Its sources by name; a name is given once in the whole mixture."""
    groups: dict[str, Group] = Field(default_factory=dict)
    """Groups in it by name."""


class MixtureFile(Mixture):
    """A mixture as it is written. Only a schema: reading makes a `Mixture` of it."""

    model_config = ConfigDict(title="omniload mixture")

    sources: dict[str, SourceSpec] = Field(default_factory=dict)
    """The datasets by name; all, or those that are in no group."""
    groups: dict[str, Group] = Field(default_factory=dict)
    """Sources that share a weight, by name of the group."""
    temperature: float | None = Field(default=None, gt=0)
    """Each weight w of ``sources`` and ``groups`` counts as w^(1/temperature)."""
    include: str | list[str] = Field(default_factory=list)
    """Mixture files, relative to this one, over which this one is merged key by key; later ones win."""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a mixture file, before includes and variables are resolved."""
    schema = MixtureFile.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    # Shorthands: one name for a list of them, a transform by its name alone.
    of_source: dict[str, Any] = definitions["SourceSpec"]["properties"]
    for key in ("path", "read_columns"):
        of_source[key] = {"anyOf": [{"type": "string"}, of_source[key]]}
    definitions["TransformSpec"] = {"anyOf": [{"type": "string"}, definitions["TransformSpec"]]}
    # What is required may be in an included file, or come as an override.
    for level in (schema, *definitions.values()):
        level.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_with_variables(schema)}


def _with_variables(schema: Any) -> Any:
    """Allow ``${NAME}`` wherever something else than text is asked for, and null for a source, which takes it away."""
    if isinstance(schema, list):
        return [_with_variables(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("integer", "number", "boolean") or "enum" in schema:
        return {"anyOf": [schema, _VARIABLE]}
    members = schema.get("additionalProperties")
    if isinstance(members, dict) and "$ref" in members:
        schema = {**schema, "additionalProperties": {"anyOf": [members, {"type": "null"}]}}
    return {key: _with_variables(value) for key, value in schema.items()}
