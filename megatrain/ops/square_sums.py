"""The sum of all squares of a flat tensor, in fp64. A gradient norm is computed from such sums.

Squares are added in fp64 for every dtype of the tensor, so that the sum stays precise with many elements and with large
ones. NaN and infinity propagate to the sum. The order of additions depends only on the length.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, host_kernel
from megatrain.ops.library import (
    SQUARE_SUM_BLOCK_ELEMENTS_ON_CPU,
    HostImplementation,
    declare,
    require_contiguous,
    require_floating,
)

_BLOCK_ELEMENTS = 1 << 16
"""Elements of a partial sum of the kernel, as in csrc/host_kernels/square_sum.c."""


class _SquareSum(ctypes.Structure):
    """The arguments of the kernel, as `SquareSum` in csrc/host_kernels/square_sum.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "block_sums", "sum")),
        *((name, ctypes.c_int64) for name in ("num_elements", "num_threads")),
    )


def square_sum(flat: Tensor) -> Tensor:
    """Return the sum of the squares of `flat`, one fp64 number on its device. Shapes: flat [N], result []."""
    return _square_sum_op(flat)


def _check(flat: Tensor) -> None:
    require_floating("flat", flat)
    if flat.dim() != 1:
        raise RuntimeError(f"flat must have one dim, got {list(flat.shape)}")
    require_contiguous("flat", flat)


def reference_square_sum(flat: Tensor) -> Tensor:
    """Return the same sum in plain torch, for any floating-point `flat` of one dim."""
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square_()
    total = torch.zeros((), dtype=torch.float64)
    for block in flat.split(SQUARE_SUM_BLOCK_ELEMENTS_ON_CPU):
        wide = block.double()
        total += torch.dot(wide, wide)
    return total


@cache
def compiled_square_sum() -> HostFunction | None:
    """Return the compiled function of csrc/host_kernels/square_sum.c, once per process; None if there is none."""
    return host_kernel("square_sum", _SquareSum)


def _host_square_sum(add_up: HostFunction, flat: Tensor) -> Tensor:
    total = torch.empty((), dtype=torch.float64)
    block_sums = torch.empty(-(-flat.numel() // _BLOCK_ELEMENTS), dtype=torch.float64)
    pointers = (flat.data_ptr(), block_sums.data_ptr(), total.data_ptr())
    add_up(ctypes.byref(_SquareSum(*pointers, flat.numel(), torch.get_num_threads())))
    return total


_square_sum_op = declare(
    "square_sum(Tensor flat) -> Tensor",
    check=_check,
    reference=reference_square_sum,
    host=HostImplementation(compiled_square_sum, _host_square_sum),
    fake=lambda flat: flat.new_empty((), dtype=torch.float64),
)
