"""The mixture: what is loaded, in which proportions, and how a step is shaped. Validated once, frozen after.

A mixture is a YAML file, a mapping, or a `Mixture`. Everything the stream depends on is in here, or in the
data and the tokenizer it points to; nothing about ranks, threads or machines is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from omniload.errors import MixtureError
from omniload.frozen import Frozen
from omniload.given import DatasetKey
from omniload.mixture_file import Overrides, override, read_layers
from omniload.mixture_groups import FILE_KEYS, flatten
from omniload.mixture_problem import first_problem
from omniload.runtime.options import Execution, RayOptions
from omniload.samples.builtin import TRANSFORMS
from omniload.samples.chatml import CHAT_TEMPLATES
from omniload.schedule import Stage, check_order, check_reached, position_of, weights_in
from omniload.suggest import nearest_divisors, suggest
from omniload.weights import WEIGHT_UNIT, integer_cap

SMALLEST_SHARE = 1e-8
"""Smallest weight beside the largest: when it comes to mixing, weights are integers of 32 bits."""


def _existing_template(value: str | None) -> str | None:
    if value is not None and value not in CHAT_TEMPLATES and not Path(value).is_file():
        raise ValueError(
            f"no file {value}, and built in is only {', '.join(CHAT_TEMPLATES)}; correct the path or the name"
        )
    return value


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class TransformSpec(Frozen):
    """A function of one row, called before tokenisation."""

    call: str
    """``package.module:function``, or a built-in: `filter`, `rename`, `image_patches`. Takes a row as a dict, returns
    None, a dict or a list of dicts. A class is made once with the arguments, and what it makes is called."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"call": value} if isinstance(value, str) else value

    @field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        module, _, function = value.partition(":")
        if value not in TRANSFORMS and not (module and function):
            raise ValueError(
                f"'{value}' is neither of the form package.module:function nor built in"
                f"{suggest(value, list(TRANSFORMS))}"
            )
        return value


class ColumnMap(Frozen):
    """What a source calls the columns, keys and roles that samples are made from."""

    input_ids: str = "input_ids"
    """Token ids."""
    labels: str = "labels"
    """Of ready-made tokens: the same ids, or -100 for those that are not trained on."""
    messages: str = "messages"
    """A chat."""
    tools: str = "tools"
    """The tools offered in it."""
    prompt: str = "prompt"
    """What is not trained on before the completion: text or messages."""
    completion: str = "completion"
    """What is trained on after the prompt."""
    text: str = "text"
    """Text."""
    role: str = "role"
    """Key of a message: who speaks."""
    content: str = "content"
    """Key of a message: what is said."""
    roles: dict[str, str] = Field(default_factory=dict)
    """By the name of a role in the data: what the chat template calls it, like ``{human: user, gpt: assistant}``."""

    @property
    def renamed(self) -> frozenset[str]:
        """Which of the columns have another name than usual; the sample is in one of them."""
        names = ("input_ids", "messages", "prompt", "completion", "text")
        return frozenset(name for name in names if getattr(self, name) != name)


class RowRange(Frozen):
    """Consecutive rows of a source."""

    start: int = Field(default=0, ge=0)
    """First row, from 0."""
    stop: int | None = Field(default=None, ge=1)
    """Row after the last; None: to the end."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop: {self.stop} is not after start: {self.start}; no row is between them")
        return self


class SourceSpec(Frozen):
    """One dataset and its part in the mixture."""

    path: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """File, glob, braces or folder, local or an fsspec URL, or a list of them; relative to the mixture file."""
    dataset: DatasetKey = None
    """In place of ``path``: ``package.module:function`` that makes a torch dataset; in Python also the dataset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function that ``dataset`` names."""
    weight: float = Field(ge=0)
    """Share of the stream, relative to the other sources'; see ``unit``."""
    max_fraction: float = Field(default=1.0, gt=0, le=1)
    """Most of all tokens emitted that may be this source's; what it may not give, the others do in proportion."""
    format: str | None = None
    """Format of the files, by its name; by default from their extension."""
    column: str | None = None
    """Column of the sample; by default the first of `input_ids`, `messages`, `prompt` with `completion`, `text`."""
    columns: ColumnMap = ColumnMap()
    """What the columns are called where they have other names; for ShareGPT ``{messages: conversations, role: from,
    content: value, roles: {human: user, gpt: assistant}}``."""
    chat_template: str | None = None
    """In place of the mixture's."""
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a sample longer than ``seq_len``."""
    repeat: int = Field(default=1, ge=1)
    """Passes over the source before ``on_exhausted`` applies."""
    on_exhausted: Literal["stop", "drop_source", "repeat"] = "stop"
    """After the last pass: end the stream, go on without the source, or go round again for ever."""
    on_unreachable: Literal["stop", "drop_source"] = "stop"
    """Where the source cannot be read any more, after all retries: end with the error, or go on without the source."""
    transforms: tuple[TransformSpec, ...] = ()
    """Functions applied to each row in order."""
    read_columns: Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)] = Field(
        default=None, min_length=1
    )
    """The only columns to read; by default those that a sample is made from, and all if there are ``transforms``."""
    rows: RowRange = RowRange()
    """The only rows to read, counted over all files in the order of their paths."""
    max_failures: int | None = Field(default=None, ge=0)
    """Rows that may be quarantined; one more ends the stream with an error."""
    max_failure_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Fraction of the rows consumed that may be quarantined, judged at every bad row from the 100th row on."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of the filesystem that reads ``path``; not part of the stream's identity."""

    @field_validator("chat_template")
    @classmethod
    def _template_exists(cls, value: str | None) -> str | None:
        return _existing_template(value)

    @model_validator(mode="after")
    def _path_or_dataset(self) -> Self:
        if bool(self.path) == (self.dataset is not None):
            raise ValueError("either path: or dataset: says where the rows are; give one of them")
        if self.dataset is None:
            if self.args:
                raise ValueError("args: are of a dataset: and here is a path; remove them")
            return self
        if isinstance(self.dataset, str):
            module, _, function = self.dataset.partition(":")
            if not (module and function):
                raise ValueError(f"dataset: '{self.dataset}' is not of the form package.module:function")
        elif self.args:
            raise ValueError("args: are of a function, and here is a dataset that is made; remove them")
        if self.format is not None or self.storage_options:
            key = "storage_options" if self.format is None else "format"
            raise ValueError(f"{key}: is of files, and here is a dataset; remove it")
        return self

    @model_validator(mode="after")
    def _one_way_to_name_the_column(self) -> Self:
        if self.column is not None and self.columns.renamed:
            name = min(self.columns.renamed)
            raise ValueError(f"column: and columns.{name} both name the column of the sample; remove one")
        return self


ROWS_OF_ANY_LENGTH = ("none", "workload")
"""Ways of packing whose rows are as long as the longest of their lane; those of the others have ``seq_len`` tokens."""


class Caps(Frozen):
    """Hard bounds on what a lane holds; by default there are none but those of its shape."""

    tokens: int | None = Field(default=None, ge=1, lt=2**62)
    """Tokens. With ``packing: workload`` lanes are of any length up to it; by default half as much again as the
    average."""
    patches: int | None = Field(default=None, ge=1, lt=2**62)
    """Rows for the image encoder."""
    frames: int | None = Field(default=None, ge=1, lt=2**62)
    """Rows for the audio encoder."""
    cost: int | None = Field(default=None, ge=1, lt=2**62)
    """Cost of all modules together, in the unit of the cost model."""


class Delay(Frozen):
    """Outliers wait until there is one for every lane."""

    thresholds: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Tokens from which on a document is an outlier, of each level, ascending."""
    max_steps: int = Field(default=16, ge=1, lt=2**16)
    """Steps that one waits at most."""

    @field_validator("thresholds")
    @classmethod
    def _ascend(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if list(values) != sorted(set(values)):
            raise ValueError(f"{list(values)} do not ascend: reorder them")
        return values


class Mixture(Frozen):
    """What is loaded, in which proportions, and how a step is shaped."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every shuffle and every per-sample generator."""
    steps: int | None = Field(default=None, ge=1)
    """Length of the run; without it the loader goes on until a source says stop."""
    seq_len: int = Field(ge=2, lt=2**31)
    """Tokens per pack."""
    packing: Literal["best_fit", "first_fit", "concatenate", "workload", "none"] = "best_fit"
    """``best_fit``, ``first_fit``: several documents in a pack of ``seq_len`` tokens; ``concatenate``: the same, end to
    end in the order drawn and cut where a pack is full; ``workload``: lanes of equal cost and unequal length, one row
    each; ``none``: one document a row, padded to its lane's longest."""
    packs: int | None = Field(default=None, ge=1)
    """Packs per step, over the whole job; with ``packing: none``, samples; with ``packing: workload``, how many times
    ``seq_len`` tokens."""
    lane_tokens: int | None = Field(default=None, ge=1)
    """With ``packing: none``, instead of ``packs``: tokens of a lane, padding included, that samples have to fit in."""
    lanes: int = Field(default=1, ge=1)
    """Microbatch slots per step, ``packs / lanes`` packs in each; the data-parallel size must divide it."""
    balance: Literal["lpt", "kk", "bucketed", "hybrid", "two_level", "none"] = "lpt"
    """How packs are given to lanes, see `omniload.planner.balancing`."""
    cost: str | dict[str, Any] = "attention"
    """What a pack costs: ``attention``, ``tokens``, ``package.module:function``, or the shape of the model, see
    `omniload.planner.costs`."""
    caps: Caps = Caps()
    """Hard bounds per lane."""
    delay: Delay | None = None
    """Whether outliers wait for each other."""
    strategy: str | None = None
    """In place of these keys: ``package.module:function`` that plans a step on a `DGraph`."""
    tokenizer: str | None = None
    """``tokenizer.json`` of the `tokenizers` library; needed by every source that is not pre-tokenised."""
    eos: StrictStr | StrictInt | None = None
    """Token appended to every sample made from text: its name in the tokenizer, or its id. A chat that its template
    ends with it gets no second one."""
    chat_template: str = "chatml"
    """How messages become text: the built-in ``chatml``, a Jinja file, or a ``tokenizer_config.json``."""
    labels: Literal["shifted", "hf"] = "shifted"
    """``shifted``: lanes carry ``targets``; ``hf``: unshifted ``labels``, as models that shift want them."""
    shuffle: Literal["none", "window", "global"] = "window"
    """Order of the rows: as stored; permuted in windows of permuted blocks of permuted files; or permuted over all
    files, of formats whose rows can be read one by one."""
    window_blocks: int = Field(default=4, ge=1)
    """Blocks (row groups, byte ranges) per shuffle window."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of every source's rows kept out of training, for evaluation."""
    unit: Literal["tokens", "samples"] = "tokens"
    """What the weights are shares of."""
    quarantine: str | None = None
    """Local file that bad rows are appended to, one JSON object a line; by default they are only counted."""
    execution: Execution = "auto"
    """Where sources are read and steps planned: in threads of each rank (``inline``), or once for all ranks in actors
    (``ray``); ``auto`` takes Ray where the job has several processes."""
    ray: RayOptions = RayOptions()
    """How Ray hosts the actors."""
    sources: dict[str, SourceSpec] = Field(min_length=1, max_length=2**16)
    """The datasets by name."""
    schedule: tuple[Stage, ...] = ()
    """Changes of the weights along the run, see `omniload.schedule`."""

    @field_validator("schedule")
    @classmethod
    def _stages_ascend(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        check_order(stages)
        return stages

    @field_validator("chat_template")
    @classmethod
    def _template_exists(cls, value: str) -> str | None:
        return _existing_template(value)

    @field_validator("tokenizer", mode="after")
    @classmethod
    def _tokenizer_exists(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"no file {value}: train one with the tokenizers library or correct the path")
        return value

    @field_validator("quarantine")
    @classmethod
    def _quarantine_is_local(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError(f"{value} cannot be appended to; give the path of a local file")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eos is not None and self.tokenizer is None:
            raise ValueError(
                "eos: nothing is tokenised without 'tokenizer', and input_ids are taken as they are; remove it"
            )
        self._check_size()
        if self.packs and self.packs % self.lanes:
            near = ", ".join(map(str, nearest_divisors(self.packs, self.lanes, count=4)))
            raise ValueError(
                f"lanes: {self.lanes} does not divide packs: {self.packs}; nearest values that do: {near}"
            )
        self._check_caps()
        for stage in self.schedule:
            self._check_stage(stage)
        if (
            not self.schedule
            or self.schedule[0].position > 0
            or any(s.weights is None for s in self.schedule)
        ):
            self.check_weights(self._own_weights, "sources")
        passes = {
            name: None if spec.on_exhausted == "repeat" else spec.repeat - (spec.on_exhausted == "stop")
            for name, spec in self.sources.items()
        }
        check_reached(self.schedule, self._own_weights, passes)
        return self

    def _check_size(self) -> None:
        """One of packs and lane_tokens says how large a step is."""
        if self.lane_tokens is None:
            if self.packs is None:
                raise ValueError("'packs' is missing; add it")
        elif self.packing != "none":
            raise ValueError(
                "lane_tokens: a budget of padded tokens; packs are full: remove it, or set packing: none"
            )
        elif self.packs is not None:
            raise ValueError("lane_tokens: says how large a step is, and so does packs; remove one of them")
        elif self.lane_tokens < self.seq_len:
            raise ValueError(
                f"lane_tokens: {self.lane_tokens} has no room for a sample of seq_len {self.seq_len}; raise it"
            )

    def _check_caps(self) -> None:
        """The caps have room for what a lane always holds."""
        if self.packing == "workload":
            for name in ("frames", "cost"):
                if getattr(self.caps, name) is not None:
                    raise ValueError(
                        f"caps.{name}: packing: workload makes lanes of equal cost, bounded in tokens and patches;"
                        " remove it"
                    )
        if self.packs is None or self.caps.tokens is None or self.packing == "none":
            return
        of_lane = self.packs // self.lanes * self.seq_len
        if self.caps.tokens < of_lane:
            raise ValueError(
                f"caps.tokens: {self.caps.tokens} a lane, but {self.packs // self.lanes} times seq_len {self.seq_len}"
                f" is {of_lane}; raise it, or lower packs"
            )

    def _check_stage(self, stage: Stage) -> None:
        if stage.weights is None:
            return
        where = f"schedule, {stage}"
        for name in stage.weights:
            if name not in self.sources:
                raise ValueError(f"{where}: no source '{name}'{suggest(name, list(self.sources))}")
        for name in self.sources:
            if name not in stage.weights:
                raise ValueError(f"{where}: no weight for source '{name}'; add it (0 leaves it out)")
        self.check_weights(stage.weights, where)

    def check_weights(self, weights: Mapping[str, float], where: str) -> None:
        """Weights of all sources make a stream.

        Args:
            weights: of every source, by name.
            where: what says them, for the message.

        Raises:
            ValueError: all are 0, one is too small beside the largest, or ``max_fraction`` leaves no full stream.
        """
        self.check_caps(weights, where)
        largest = max(weights.values())
        for name, weight in weights.items():
            if 0 < weight < largest * SMALLEST_SHARE:
                raise ValueError(
                    f"{where}: the weight of '{name}', {weight:g}, is below {SMALLEST_SHARE:g} of the largest;"
                    " raise it, or set it to 0"
                )

    def check_caps(self, weights: Mapping[str, float], where: str) -> None:
        """The sources that have a weight can make up the whole stream.

        Args:
            weights: of every source, by name.
            where: what says them, for the message.

        Raises:
            ValueError: there is none, or ``max_fraction`` leaves no full stream.
        """
        if not any(weights.values()):
            raise ValueError(f"{where}: every weight is 0; give at least one source a positive weight")
        caps = [self.sources[name].max_fraction for name, weight in weights.items() if weight]
        if sum(map(integer_cap, caps)) < WEIGHT_UNIT:
            raise ValueError(
                f"{where}: by max_fraction the sources that have a weight give at most {sum(caps):g} of the tokens;"
                " raise one, or give another source a weight"
            )

    @classmethod
    def load(
        cls,
        mixture: Mixture | Mapping[str, Any] | str | Path,
        *,
        overrides: Overrides = (),
        **keys: Any,
    ) -> Mixture:
        """Read and validate a mixture.

        Args:
            mixture: a YAML file, a mapping of the same shape, or a mixture.
            overrides: dotted keys that replace the file's, as ``["sources.web.weight=0.3"]``, values in YAML, or
                as a mapping.
            keys: top-level keys that replace both; None means "as there".

        Raises:
            MixtureError: one line naming the file, the key and the remedy.
        """
        if isinstance(mixture, Mixture):
            where, values = "mixture", mixture.model_dump()
        else:
            where, values = (
                ("mixture" if isinstance(mixture, Mapping) else str(mixture)),
                read_layers(mixture),
            )
        values = override(values, overrides)
        values = override(values, {key: value for key, value in keys.items() if value is not None})
        try:
            return cls.model_validate(flatten(values, where))
        except ValidationError as error:
            raise MixtureError(f"{where}: {first_problem(error, cls, FILE_KEYS)}") from None

    @property
    def lane_budget(self) -> int:
        """``lane_tokens`` of a mixture that has it instead of ``packs``."""
        assert self.lane_tokens is not None, "a mixture has one of the two"
        return self.lane_tokens

    @property
    def names(self) -> list[str]:
        """Names of the sources, sorted: the numbering of sources does not depend on the order in the file."""
        return sorted(self.sources)

    @property
    def _own_weights(self) -> dict[str, float]:
        return {name: spec.weight for name, spec in self.sources.items()}

    def weights_at(self, step: int, *, tokens: int = 0, epochs: Sequence[int] = ()) -> list[float]:
        """Declared weights in force at a step, in the order of `names`; not normalised.

        Args:
            step: the step.
            tokens: that entered the stream before it; counts if the schedule goes by tokens.
            epochs: complete passes over each source before it, in the order of `names`; if it goes by epochs.
        """
        own = self._own_weights
        at = position_of(
            self.schedule, own, step=step, tokens=tokens, epochs=dict(zip(self.names, epochs, strict=False))
        )
        weights = weights_in(self.schedule, own, at)
        return [weights[name] for name in self.names]
