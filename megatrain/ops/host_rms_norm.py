"""Calls the kernel of csrc/host_kernels/rms_norm.c: RMSNorm in fp32, one pass forward and one backward.

Other dtypes are computed in torch operations (normalization_reference.py). The kernel is as exact as these, but its
sums have another order. The order is the same for every row, and for every number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.extension import host_function
from megatrain.ops.normalization_reference import (
    reference_add_rms_norm,
    reference_rms_norm,
    reference_rms_norm_backward,
)

Run = Callable[[Any], None]
"""The compiled function, which gets a pointer to a `_RmsNorm`."""

_BLOCK_ROWS = 16
"""Rows whose gradients of the weight the kernel adds, as in csrc/host_kernels/rms_norm.c. torch adds the blocks."""


class _RmsNorm(ctypes.Structure):
    """The arguments of the kernel, as `RmsNorm` in csrc/host_kernels/rms_norm.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "weight", "grad")),
        *((name, ctypes.c_void_p) for name in ("rstd", "total", "out", "grad_weight")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "num_threads")),
        ("eps", ctypes.c_float),
    )


def rms_norm_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function that does what reference_rms_norm does, in one pass if it can; None if there is no kernel."""
    run = compiled_rms_norm()
    return None if run is None else partial(_rms_norm, run)


def add_rms_norm_kernel() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Return the function that does what reference_add_rms_norm does; None if there is no kernel."""
    run = compiled_rms_norm()
    return None if run is None else partial(_add_rms_norm, run)


def rms_norm_backward_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function that does what reference_rms_norm_backward does; None if there is no kernel."""
    run = compiled_rms_norm()
    return None if run is None else partial(_rms_norm_backward, run)


@cache
def compiled_rms_norm() -> Run | None:
    """Return the compiled function, once per process; None if there is none."""
    return host_function("megatrain._host_kernels", "megatrain_rms_norm", [ctypes.POINTER(_RmsNorm)])


def _rms_norm(run: Run, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _is_supported(x):
        return reference_rms_norm(x, weight, eps)
    out, rstd = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    _run(run, x, eps, (x, None, weight, None, rstd, None, out, None))
    return out, rstd


def _add_rms_norm(run: Run, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_supported(x):
        return reference_add_rms_norm(x, residual, weight, eps)
    out, total, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    _run(run, x, eps, (x, residual, weight, None, rstd, total, out, None))
    return out, total, rstd


def _rms_norm_backward(
    run: Run, grad_out: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    if not _is_supported(x):
        return reference_rms_norm_backward(grad_out, grad_sum, x, weight, rstd)
    grad_x = torch.empty_like(x)
    num_blocks = -(-rstd.numel() // _BLOCK_ROWS)
    grad_weight = x.new_empty((num_blocks, weight.numel()))
    _run(run, x, 0.0, (x, grad_sum, weight, grad_out, rstd, None, grad_x, grad_weight))
    return grad_x, grad_weight.sum(0)


def _is_supported(x: Tensor) -> bool:
    return bool(x.dtype == torch.float32 and x.numel() > 0)


def _run(run: Run, x: Tensor, eps: float, tensors: tuple[Tensor | None, ...]) -> None:
    """Call the kernel on all threads of torch. ctypes lets other Python threads run meanwhile."""
    call = _RmsNorm(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        x.numel() // x.shape[-1],
        x.shape[-1],
        torch.get_num_threads(),
        eps,
    )
    run(ctypes.byref(call))
