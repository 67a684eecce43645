"""Tensors as the bytes they consist of."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in host memory in row-major order without gaps."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a flat tensor (see :func:`is_flat`) as uint8, shape ``[num_bytes]``; not a copy."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, and keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: npt.NDArray[Any] = flat.view(torch.uint8).numpy()
    return array


def copy_into(memory: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy a tensor's elements, in row-major order, into host memory.

    Args:
        memory: uint8, exactly as many bytes as the tensor.
        tensor: On any device, any strides.
        non_blocking: Only begin a copy from another device; the caller synchronises before using the memory.
    """
    if is_flat(tensor):
        # By this thread alone: PyTorch's copy spreads every tensor over its OpenMP threads and waits for all of
        # them, which takes several times as long while training keeps the cores busy.
        np.copyto(memory.numpy(), flat_bytes(tensor))
    else:
        memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=non_blocking)


def fault_in(memory: torch.Tensor) -> None:
    """Have the system back fresh host memory with pages now; its contents are undefined afterwards.

    A copy into memory without pages asks for them one by one, which takes several times as long as the copy.

    Args:
        memory: uint8, flat.
    """
    begin = memory.data_ptr() + -memory.data_ptr() % mmap.PAGESIZE
    num_bytes = (memory.data_ptr() + memory.numel() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if num_bytes > 0 and (advise is None or advise(begin, num_bytes, _POPULATE_WRITE)):
        flat_bytes(memory)[:: mmap.PAGESIZE] = 0


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    """``madvise(address, length, advice)`` of Linux; that of the standard library is for its own maps."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
