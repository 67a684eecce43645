"""The configuration of a run: one YAML file, dotted overrides, validated once, frozen after."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.errors import ConfigError


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Frozen):
    """Sizes of the decoder; the names mean what they mean in Hugging Face's ``LlamaConfig``."""

    vocab_size: int = Field(ge=2)
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: int = Field(ge=2)
    """Width of the residual stream."""
    intermediate_size: int = Field(ge=1)
    """Width inside the gated feed-forward part."""
    num_layers: int = Field(ge=1)
    """Decoder layers."""
    num_heads: int = Field(ge=1)
    """Query heads; ``hidden_size / num_heads`` is the even width of a head."""
    num_kv_heads: int = Field(ge=1)
    """Key and value heads; divides ``num_heads``."""
    max_position_embeddings: int = Field(default=2048, ge=1)
    """Longest sequence; at least the mixture's ``seq_len``."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position embedding."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square before its root is taken."""
    tie_embeddings: bool = False
    """Use the embedding as output matrix too."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not an even multiple of num_heads {self.num_heads}: "
                "make it a multiple of twice the heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}: "
                "let query heads share key/value heads evenly"
            )
        return self


class OptimizerConfig(_Frozen):
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate at the end of the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a part of ``lr``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""


class ParallelConfig(_Frozen):
    """Sizes of the mesh; its data-parallel axis takes whatever ranks remain."""

    tp: int = Field(default=1, ge=1)
    """Ranks that share each layer (tensor parallelism); divides the number of ranks."""


class FaultConfig(_Frozen):
    """Faults made on purpose, so that tests can show a proof of correctness failing. All off by default."""

    kill_after_step: int | None = Field(default=None, ge=0)
    """Every rank kills itself with SIGKILL when it has logged this step (counted from 0)."""
    drop_optimizer: bool = False
    """Forget the restored optimizer state."""
    skip_lane: tuple[int, int] | None = None
    """``[step, lane]``: leave this microbatch out of training and out of the log."""
    repeat_sample: int | None = Field(default=None, ge=1)
    """In this step, train on the first lane of the step before once more, in place of the step's own."""


class TrainConfig(_Frozen):
    """A run."""

    out: Path
    """Folder of everything the run writes."""
    mixture: Path
    """The mixture file of `omniload.DataLoader`."""
    execution: Literal["auto", "inline", "ray"] | None = None
    """Overrides where the mixture's sources are read; see there."""
    steps: int = Field(ge=1)
    """Steps of the whole run, resumed parts included; the learning-rate schedule spans them."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights; the order of the data has its own, in the mixture."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of weights, activations, gradients and optimizer state."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between asynchronous checkpoints; by default only the end of the run is saved."""
    keep_last: int | None = Field(default=None, ge=1)
    """Checkpoints kept; by default all."""
    resume: str = "auto"
    """``auto``: the newest checkpoint under ``out``, if any; ``none``: start afresh; else the path of a
    checkpoint or of a folder of checkpoints."""
    log_every: int = Field(default=1, ge=1)
    """Steps between two lines on the terminal; the files have every step."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for another rank, in seconds."""
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    faults: FaultConfig = FaultConfig()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a configuration file and apply ``key=value`` overrides.

        Args:
            path: YAML file with the keys of this class.
            overrides: ``dotted.key=value`` with the value in YAML, for instance ``optimizer.lr=3e-4``.

        Raises:
            ConfigError: one line naming the file, the key and the remedy.
        """
        values = _read_yaml(Path(path))
        for override in overrides:
            _apply(values, override)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{path}: {_first_problem(error)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no mapping of keys; see training/configs for an example")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{override}' is not of the form key=value")
    *groups, leaf = key.split(".")
    for group in groups:
        inner = values.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{override}': '{group}' is a value, not a group of keys")
        values = inner
    try:
        values[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override '{override}': the value is not valid YAML") from None


def _first_problem(error: ValidationError) -> str:
    """The first problem pydantic found, as one line: key, what is wrong, remedy."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_suggest(problem['loc'])}"
    if problem["type"] == "missing":
        return f"'{key}' is missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _suggest(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = TrainConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are: {', '.join(known)}"
