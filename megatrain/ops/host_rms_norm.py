"""Calls the kernel of csrc/host_kernels/rms_norm.c: RMSNorm in fp32, one pass forward and one backward.

The kernel is as exact as torch's operations (normalization_reference.py), but its sums have another order. The order is
the same for every row, and for every number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, host_kernel

_BLOCK_ROWS = 16
"""The kernel sums the weight's gradient over blocks of this many rows (BLOCK_ROWS in csrc/host_kernels/rms_norm.c), and
torch adds these sums."""


class _RmsNormCall(ctypes.Structure):
    """The arguments of the kernel, as `RmsNorm` in csrc/host_kernels/rms_norm.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "weight", "grad")),
        *((name, ctypes.c_void_p) for name in ("rstd", "total", "out", "grad_weight")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "num_threads")),
        ("eps", ctypes.c_float),
    )


@cache
def compiled_rms_norm() -> HostFunction | None:
    """Return the compiled function, once per process; None if there is none."""
    return host_kernel("rms_norm", _RmsNormCall)


def host_rms_norm(norm: HostFunction, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and one number per row, as reference_rms_norm."""
    out, rstd = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    _run(norm, x, eps, (x, None, weight, None, rstd, None, out, None))
    return out, rstd


def host_add_rms_norm(
    norm: HostFunction, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of the sum, the sum, and one number per row, as reference_add_rms_norm."""
    out, total, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    _run(norm, x, eps, (x, residual, weight, None, rstd, total, out, None))
    return out, total, rstd


def host_rms_norm_backward(
    norm: HostFunction, grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, as reference_rms_norm_backward."""
    grad_x = torch.empty_like(x)
    num_blocks = -(-rstd.numel() // _BLOCK_ROWS)
    grad_weight = x.new_empty((num_blocks, weight.numel()))
    _run(norm, x, 0.0, (x, grad_sum, weight, grad_out, rstd, None, grad_x, grad_weight))
    return grad_x, grad_weight.sum(0)


def _run(norm: HostFunction, x: Tensor, eps: float, tensors: tuple[Tensor | None, ...]) -> None:
    """Call the kernel on all threads of torch. ctypes lets other Python threads run meanwhile."""
    call = _RmsNormCall(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        x.numel() // x.shape[-1],
        x.shape[-1],
        torch.get_num_threads(),
        eps,
    )
    norm(ctypes.byref(call))
