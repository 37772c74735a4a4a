"""Memory that ends at a protected page: a kernel that runs on the CPU dies if it reads beyond."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_C = ctypes.CDLL(None, use_errno=True)


def guarded(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return memory for `num_elements` on the CPU, directly before such a page. It is freed with its last view."""
    num_bytes = num_elements * dtype.itemsize
    num_mapped = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, num_mapped + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_mapped)
    if _C.mprotect(ctypes.c_void_p(flat.data_ptr() + num_mapped), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return flat[num_mapped - num_bytes :].view(dtype)
