"""Copies within host memory. They bypass the processor's caches where csrc/host_copy was compiled.

Copying the tensors one by one with numpy takes up to 1.4 times as long (docs/benchmarks/checkpoint.md has both).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_MIN_STREAMED_BYTES = 256 << 10
"""A smaller copy fits in the caches, and the call through ctypes costs more than it saves."""

Copy = Callable[[int, int, int], None]
"""(target address, source address, bytes)."""


def copy_bytes(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy all bytes of `source` to `target`, which has the same size. Other Python threads can run meanwhile.

    Shapes: both one-dimensional and contiguous.
    """
    assert target.size == source.size
    stream = streamed_copy() if target.size >= _MIN_STREAMED_BYTES else None
    if stream is None:
        np.copyto(target, source)  # a memcpy of libc; torch's copy_ takes twice as long on small boxes
    else:
        stream(target.ctypes.data, source.ctypes.data, target.size)


@functools.cache
def streamed_copy() -> Copy | None:
    """Return the compiled copy, None where this installation has none."""
    found = importlib.util.find_spec("megatrain._host_copy")
    if found is None or found.origin is None:
        return None
    try:
        function = ctypes.CDLL(found.origin).megatrain_stream_copy
    except (OSError, AttributeError):
        return None  # compiled for another machine: the caller falls back to numpy, which is slower
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function
