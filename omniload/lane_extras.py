"""Extra arrays of a lane: those of its samples, laid end to end in the order of its pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from omniload.errors import MixtureError
from omniload.mixture import Mixture
from omniload.recycler import Recycler
from omniload.samples.extras import Arrays, ExtraArray
from omniload.samples.transforms import Transform

_RECYCLED_BYTES = 1 << 20


class LaneExtras:
    """Joins the extra arrays that the transforms of a mixture declare.

    Args:
        mixture: the mixture.
        recycler: where the memory of large arrays comes from.

    Raises:
        MixtureError: two sources declare an array of the same name with other shapes or dtypes.
    """

    def __init__(self, mixture: Mixture, recycler: Recycler) -> None:
        self._recycler = recycler
        self._of_source = [
            _declared(name, [Transform(name, spec) for spec in mixture.sources[name].transforms])
            for name in mixture.names
        ]
        self._declared: dict[str, ExtraArray] = {}
        for source, arrays in zip(mixture.names, self._of_source, strict=True):
            for name, array in arrays.items():
                first = self._declared.setdefault(name, array)
                if (first.dtype, first.row_shape) != (array.dtype, array.row_shape):
                    raise MixtureError(
                        f"source '{source}': '{name}' has rows of {array.dtype}{list(array.row_shape)}, those of"
                        f" another {first.dtype}{list(first.row_shape)}; give their transforms the same arguments"
                    )

    def join(self, sources: np.ndarray, arrays: Sequence[Arrays]) -> dict[str, np.ndarray]:
        """The arrays of a lane by name; every array that the mixture declares is there, maybe with no rows.

        Args:
            sources: ``int[p]`` index of the source of each piece of the lane.
            arrays: what is kept of each piece's sample; empty if none has any.
        """
        return {name: self._joined(name, sources, arrays) for name in self._declared}

    def _joined(self, name: str, sources: np.ndarray, arrays: Sequence[Arrays]) -> np.ndarray:
        kept = [(i, of_piece[name]) for i, of_piece in enumerate(arrays) if name in of_piece]
        declared = self._declared[name]
        out = self._empty((sum(len(one) for _, one in kept), *declared.row_shape), declared.dtype)
        at = 0
        for i, one in kept:
            self._of_source[sources[i]][name].write(out[at : at + len(one)], one)
            at += len(one)
        return out

    def _empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        size = math.prod(shape)
        if size * np.dtype(dtype).itemsize < _RECYCLED_BYTES:
            return np.empty(shape, dtype)
        # Hardly two lanes are equally long; rounded up to powers of two, one can use the memory of another.
        return self._recycler.empty(1 << (size - 1).bit_length(), dtype)[:size].reshape(shape)


def _declared(source: str, transforms: Sequence[Transform]) -> dict[str, ExtraArray]:
    arrays: dict[str, ExtraArray] = {}
    for transform in transforms:
        for name, array in (transform.extras.arrays if transform.extras else {}).items():
            if name in arrays:
                raise MixtureError(f"source '{source}': two of its transforms add '{name}'; remove one")
            arrays[name] = array
    return arrays
