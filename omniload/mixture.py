"""The mixture: what is loaded, in which proportions, and how a step is shaped. Validated once, frozen after.

A mixture is a YAML file, a mapping, or a `Mixture`. Everything the stream depends on is in here, or in the
data and the tokenizer it points to; nothing about ranks, threads or machines is.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from omniload.errors import MixtureError

SMALLEST_SHARE = 1e-8
"""Smallest weight beside the largest: when it comes to mixing, weights are integers of 32 bits."""


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class TransformSpec(_Frozen):
    """A function of one row, called before tokenisation."""

    call: str
    """``package.module:function``; takes a row as a dict, returns None, a dict or a list of dicts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed with every call."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"call": value} if isinstance(value, str) else value

    @field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        module, _, function = value.partition(":")
        if not module or not function:
            raise ValueError(f"'{value}' is not of the form package.module:function")
        return value


class SourceSpec(_Frozen):
    """One dataset and its part in the mixture."""

    path: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(min_length=1)
    """Path, glob or fsspec URL of the files, or a list of them; relative to the mixture file."""
    weight: float = Field(ge=0)
    """Share of the stream in tokens, relative to the other sources'."""
    format: Literal["parquet", "jsonl"] | None = None
    """Format of the files; by default from their extension."""
    column: str | None = None
    """Column of the sample; by default whichever of `input_ids`, `messages`, `text` is there."""
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a sample longer than ``seq_len``."""
    repeat: int = Field(default=1, ge=1)
    """Passes over the source before ``on_exhausted`` applies."""
    on_exhausted: Literal["stop", "drop_source", "repeat"] = "stop"
    """After the last pass: end the stream, go on without the source, or go round again for ever."""
    transforms: tuple[TransformSpec, ...] = ()
    """Functions applied to each row in order."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the filesystem that reads ``path``; not part of the stream's identity."""


class Stage(_Frozen):
    """From ``step`` on, these weights hold."""

    step: int = Field(ge=0)
    """First step of the stage."""
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weight in tokens of every source; without it, the sources' own weights hold."""


class Mixture(_Frozen):
    """What is loaded, in which proportions, and how a step is shaped."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every shuffle and every per-sample generator."""
    steps: int | None = Field(default=None, ge=1)
    """Length of the run; without it the loader goes on until a source says stop."""
    seq_len: int = Field(ge=2, lt=2**31)
    """Tokens per pack."""
    packs: int = Field(ge=1)
    """Packs per step, over the whole job."""
    lanes: int = Field(default=1, ge=1)
    """Microbatch slots per step, ``packs / lanes`` packs in each; the data-parallel size must divide it."""
    tokenizer: str | None = None
    """``tokenizer.json`` of the `tokenizers` library; needed by every source that is not pre-tokenised."""
    eos: StrictStr | StrictInt | None = None
    """Token appended to every sample made from text: its name in the tokenizer, or its id."""
    labels: Literal["shifted", "hf"] = "shifted"
    """``shifted``: lanes carry ``targets``; ``hf``: unshifted ``labels``, as models that shift want them."""
    shuffle: Literal["none", "window"] = "window"
    """Order of the rows: as stored, or permuted in windows of permuted blocks of permuted files."""
    window_blocks: int = Field(default=4, ge=1)
    """Blocks (row groups, byte ranges) per shuffle window."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of every source's rows kept out of training, for evaluation."""
    sources: dict[str, SourceSpec] = Field(min_length=1, max_length=2**16)
    """The datasets by name."""
    schedule: tuple[Stage, ...] = ()
    """Changes of the weights by step."""

    @field_validator("schedule")
    @classmethod
    def _stages_ascend(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        for before, after in itertools.pairwise(stages):
            if after.step <= before.step:
                raise ValueError(
                    f"stages must ascend, but step {after.step} follows step {before.step}: reorder them"
                )
        return stages

    @field_validator("tokenizer", mode="after")
    @classmethod
    def _tokenizer_exists(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"no file {value}: train one with the tokenizers library or correct the path")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eos is not None and self.tokenizer is None:
            raise ValueError(
                "eos: nothing is tokenised without 'tokenizer', and input_ids are taken as they are; remove it"
            )
        if self.packs % self.lanes:
            near = _nearest(self.lanes, [n for n in range(1, self.packs + 1) if self.packs % n == 0])
            raise ValueError(
                f"lanes: {self.lanes} does not divide packs: {self.packs}; nearest values that do: {near}"
            )
        for stage in self.schedule:
            self._check_stage(stage)
        if not self.schedule or self.schedule[0].step > 0 or any(s.weights is None for s in self.schedule):
            self._check_positive({name: spec.weight for name, spec in self.sources.items()}, "sources")
        return self

    def _check_stage(self, stage: Stage) -> None:
        if stage.weights is None:
            return
        where = f"schedule, stage at step {stage.step}"
        for name in stage.weights:
            if name not in self.sources:
                raise ValueError(f"{where}: no source '{name}'{_suggest(name, list(self.sources))}")
        for name in self.sources:
            if name not in stage.weights:
                raise ValueError(f"{where}: no weight for source '{name}'; add it (0 leaves it out)")
        self._check_positive(stage.weights, where)

    @staticmethod
    def _check_positive(weights: Mapping[str, float], where: str) -> None:
        largest = max(weights.values())
        if largest == 0:
            raise ValueError(f"{where}: every weight is 0; give at least one source a positive weight")
        for name, weight in weights.items():
            if 0 < weight < largest * SMALLEST_SHARE:
                raise ValueError(
                    f"{where}: the weight of '{name}', {weight:g}, is below {SMALLEST_SHARE:g} of the largest;"
                    " raise it, or set it to 0"
                )

    @classmethod
    def load(cls, mixture: Mixture | Mapping[str, Any] | str | Path, **overrides: Any) -> Mixture:
        """Read and validate a mixture.

        Args:
            mixture: a YAML file, a mapping of the same shape, or a mixture.
            overrides: top-level keys that replace the file's; None means "as in the file".

        Raises:
            MixtureError: one line naming the file, the key and the remedy.
        """
        overrides = {key: value for key, value in overrides.items() if value is not None}
        if isinstance(mixture, Mixture):
            values: dict[str, Any] = mixture.model_dump()
            where, base = "mixture", Path()
        elif isinstance(mixture, Mapping):
            values, where, base = dict(mixture), "mixture", Path()
        else:
            path = Path(mixture)
            values, where, base = _read_yaml(path), str(path), path.parent
        try:
            return cls.model_validate(_resolve_paths({**values, **overrides}, base))
        except ValidationError as error:
            raise MixtureError(f"{where}: {_first_problem(error, cls)}") from None

    @property
    def names(self) -> list[str]:
        """Names of the sources, sorted: the numbering of sources does not depend on the order in the file."""
        return sorted(self.sources)

    def weights_at(self, step: int) -> list[float]:
        """Declared weights in force at ``step``, in the order of `names`; not normalised."""
        own: Mapping[str, float] = {name: spec.weight for name, spec in self.sources.items()}
        weights = own
        for stage in self.schedule:
            if stage.step <= step:
                weights = own if stage.weights is None else stage.weights
        return [weights[name] for name in self.names]


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


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MixtureError(f"{path}: no such mixture file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MixtureError(f"{path}: cannot be read: {error}") from error
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise MixtureError(f"{path}: not valid YAML in line {line}: {error.problem}") from None
    except (yaml.YAMLError, MixtureError) as error:
        raise MixtureError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise MixtureError(f"{path}: holds no mapping of keys; see the README for an example")
    return values


def _resolve_paths(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the relative paths of a mixture file relative to the file, not to the working directory."""

    def resolve(path: object) -> object:
        if not isinstance(path, str) or "://" in path:
            return path
        return str(base / os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises if there is no such user

    resolved = dict(values)
    resolved["tokenizer"] = resolve(values.get("tokenizer"))
    sources = values.get("sources")
    if isinstance(sources, Mapping):
        resolved["sources"] = {
            name: {
                **spec,
                "path": [resolve(p) for p in spec["path"]]
                if isinstance(spec["path"], list | tuple)
                else resolve(spec["path"]),
            }
            if isinstance(spec, Mapping) and "path" in spec
            else spec
            for name, spec in sources.items()
        }
    return resolved


def _nearest(value: int, allowed: list[int], count: int = 4) -> str:
    ranked = sorted(allowed, key=lambda other: (abs(other - value), other))[:count]
    return ", ".join(str(other) for other in sorted(ranked))


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are: {', '.join(known)}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Keys that are allowed beside the last element of ``location``."""
    inner: dict[str, type[BaseModel]] = {
        "sources": SourceSpec,
        "schedule": Stage,
        "transforms": TransformSpec,
    }
    for part in location[:-1]:
        if isinstance(part, str) and part in inner:
            model = inner[part]
    return list(model.model_fields)


def _first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem pydantic found, as one line: key, what is wrong, remedy."""
    # A misspelt key is also a missing one: the misspelling is what the user can act on.
    problem = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    location = tuple(part for part in problem["loc"] if part not in ("function-before", "str", "int"))
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_suggest(str(location[-1]), _fields_at(model, location))}"
    if problem["type"] == "missing":
        return f"'{key}' is missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"
