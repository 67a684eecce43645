"""The base of what is read from a mixture file: values that do not change once they are validated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Refuses unknown keys and numbers that are none; its fields are described by the texts under them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
