"""Calls the kernel of csrc/host_kernels/swiglu.c: the gradient of SwiGLU in fp32 without a bias, in one pass.

Other dtypes, a bias, and forward are computed in torch operations (activation_reference.py). The kernel is as exact as
these, but differs in the last bits: its exponential function is another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.activation_reference import reference_swiglu_backward
from megatrain.ops.extension import host_function

Run = Callable[[Any], None]
"""The compiled function, which gets a pointer to a `_Swiglu`."""


_Flag = ctypes.POINTER(ctypes.c_int64)


class _Swiglu(ctypes.Structure):
    """The arguments of the kernel, as `Swiglu` in csrc/host_kernels/swiglu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "num_threads")),
    )


def swiglu_backward_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the function that does what reference_swiglu_backward does, in one pass; None if there is no kernel."""
    run = compiled_swiglu_backward()
    return None if run is None else partial(_swiglu_backward, run)


@cache
def compiled_swiglu_backward() -> Run | None:
    """Return the compiled function, once per process; None if there is none, or the processor lacks fused instructions.

    Without them the kernel takes thousands of times as long as torch's operations.
    """
    has_fused = host_function("megatrain._host_kernels", "megatrain_has_fused_instructions", [_Flag])
    found = ctypes.c_int64(0)
    if has_fused is not None:
        has_fused(ctypes.byref(found))
    if not found.value:
        return None
    return host_function("megatrain._host_kernels", "megatrain_swiglu_backward", [ctypes.POINTER(_Swiglu)])


def _swiglu_backward(run: Run, grad_out: Tensor, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return reference_swiglu_backward(grad_out, x)
    grad_x = torch.empty_like(x)
    columns = x.shape[-1]
    call = _Swiglu(
        *(tensor.data_ptr() for tensor in (x, grad_out, grad_x)),
        grad_out.numel() // max(columns, 1),
        columns,
        torch.get_num_threads(),
    )
    run(ctypes.byref(call))  # other Python threads run meanwhile
    return grad_x
