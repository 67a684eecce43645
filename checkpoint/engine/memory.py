"""Tensors as the bytes they consist of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in host memory in row-major order without gaps."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a flat tensor (see :func:`is_flat`) as uint8, shape ``[num_bytes]``; not a copy."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, and keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: npt.NDArray[Any] = flat.view(torch.uint8).numpy()
    return array


def as_tensor(memory: torch.Tensor, dtype: torch.dtype, lengths: tuple[int, ...]) -> torch.Tensor:
    """See uint8 memory of exactly the right size as a tensor; not a copy."""
    return memory.view(dtype).view(lengths)
