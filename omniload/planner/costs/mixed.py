"""What a model of several modules spends on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs.decoder import Decoder
from omniload.planner.costs.encoder import Encoder
from omniload.planner.costs.protocol import MODULES, fingerprint_of
from omniload.suggest import suggest


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedCost:
    """FLOPs of a decoder by tokens, of an image encoder by patches, of an audio encoder by frames.

    All in units of `FLOPS_UNIT`, so that costs of modules can be added up.
    """

    name: ClassVar[str] = "flops"
    backbone: Decoder
    """Sees the tokens, among them the places of images and audio."""
    image: Encoder | None = None
    """Sees the patches."""
    audio: Encoder | None = None
    """Sees the frames."""

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """From the configuration of each module, by its name.

        Args:
            config: ``backbone``, and ``image`` and ``audio`` where there are such encoders; each as a Hugging Face
                ``config.json`` has it.

        Raises:
            PlanError: a module is missing, unknown or wrong.
        """
        unknown = [str(key) for key in config if key not in MODULES]
        if unknown:
            raise PlanError(f"cost: unknown module '{unknown[0]}'{suggest(unknown[0], MODULES)}")
        if "backbone" not in config:
            raise PlanError("cost: 'backbone' is missing; give the decoder's sizes")
        encoders = {name: Encoder.from_mapping(config[name]) for name in MODULES[1:] if name in config}
        return cls(backbone=Decoder.from_mapping(config["backbone"]), **encoders)

    @property
    def modules(self) -> tuple[str, ...]:
        """The backbone and the encoders there are."""
        return tuple(name for name in MODULES if getattr(self, name) is not None)

    @property
    def fingerprint(self) -> str:
        """Equal for models of equal costs."""
        return fingerprint_of("MixedCost", self)

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """``int64[modules, n]`` in units of `FLOPS_UNIT`, exact for pieces below 2³¹ of anything.

        Raises:
            PlanError: a piece costs more than 64 bits hold.
        """
        rows = [self.backbone.flops(length)]
        if self.image is not None:
            rows.append(self.image.flops(patches))
        if self.audio is not None:
            rows.append(self.audio.flops(frames))
        return np.stack(rows)
