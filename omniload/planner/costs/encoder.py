"""FLOPs and parameters of an encoder of images or audio, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs import hf_config
from omniload.planner.costs.exact import weighted_sum
from omniload.planner.costs.flops import FLOPS_UNIT, full_pairs
from omniload.planner.costs.sizes import MOST, check_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A transformer encoder, by the names of Hugging Face's configurations.

    Counted as in `Decoder`, except that a row sees all rows of its piece: several images of one piece count as one
    image, which is too much, unless `block` bounds what a row sees. Left out besides: the convolution or matrix before
    the first layer and the projector after the last, a few percent.
    """

    hidden_size: int
    """Width of the residual stream, and of all heads together."""
    num_hidden_layers: int
    """Layers."""
    intermediate_size: int
    """Width inside the feed-forward part."""
    block: int | None = None
    """Rows that see each other in layers of blocks: a window of patches, the patches of an image of fixed size, the
    frames of half a minute."""
    num_block_layers: int = 0
    """Layers of blocks; in the others a row sees all rows of its piece."""
    gated: bool = False
    """Whether feed-forward parts have three matrices (SwiGLU) or two."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            PlanError: a size is no integer, or they do not go together.
        """
        check_sizes(self, "encoder", most=MOST)
        if self.num_block_layers > self.num_hidden_layers:
            raise PlanError(
                f"encoder: num_block_layers {self.num_block_layers} is more than num_hidden_layers"
                f" {self.num_hidden_layers}"
            )
        if self.num_block_layers and self.block is None:
            raise PlanError(f"encoder: num_block_layers {self.num_block_layers} needs a block")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """The encoder of a Hugging Face ``config.json``, or of any mapping with its names.

        Args:
            config: of a vision or audio model, or of a vision-language model with a ``vision_config``.

        Raises:
            PlanError: a size is missing or wrong.
        """
        return cls(**hf_config.encoder_sizes(config))

    @property
    def token_flops(self) -> int:
        """FLOPs of one row, without the pairs of attention."""
        return 2 * self.num_hidden_layers * self._layer

    @property
    def pair_flops(self) -> int:
        """FLOPs of one pair of rows in one layer."""
        return 4 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters of the layers; without biases."""
        return self.num_hidden_layers * (self._layer + 2 * self.hidden_size)

    def flops(self, length: np.ndarray) -> np.ndarray:
        """FLOPs of pieces.

        Args:
            length: integers ``[n]``, rows of each.

        Returns:
            ``int64[n]`` in units of `FLOPS_UNIT`, rounded up from the exact count.

        Raises:
            PlanError: one costs more than 64 bits hold.
        """
        length = length.astype(np.int64, copy=False)
        in_blocks = self.num_block_layers * self.pair_flops
        return weighted_sum(
            (self.token_flops, self.num_hidden_layers * self.pair_flops - in_blocks, in_blocks),
            (length, full_pairs(length), full_pairs(length, self.block)),
            FLOPS_UNIT,
            "encoder",
        )

    @property
    def _layer(self) -> int:
        """Parameters of the matrices of a layer."""
        matrices = 3 if self.gated else 2
        return self.hidden_size * (4 * self.hidden_size + matrices * self.intermediate_size)
