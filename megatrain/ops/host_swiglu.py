"""Calls the kernel of csrc/host_kernels/swiglu.c: the gradient of SwiGLU in fp32 without a bias, in one pass.

The kernel is as exact as torch's operations (activation_reference.py), but differs in the last bits: its exponential
function is another one.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, host_function, host_kernel


class _Swiglu(ctypes.Structure):
    """The arguments of the kernel, as `Swiglu` in csrc/host_kernels/swiglu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "num_threads")),
    )


@cache
def swiglu_backward_kernel() -> HostFunction | None:
    """Return compiled_swiglu_backward(), once per process; None if there is none, or if the processor lacks fused
    multiply-add instructions.

    Without them the kernel takes thousands of times as long as torch's operations.
    """
    return compiled_swiglu_backward() if _has_fused_instructions() else None


def compiled_swiglu_backward() -> HostFunction | None:
    """Return the compiled function, whatever the processor is; None if there is none."""
    return host_kernel("swiglu_backward", _Swiglu)


def _has_fused_instructions() -> bool:
    ask = host_function("megatrain._host_kernels", "megatrain_has_fused_instructions", [ctypes.POINTER(ctypes.c_int64)])
    found = ctypes.c_int64(0)
    if ask is not None:
        ask(ctypes.byref(found))
    return bool(found.value)


def host_swiglu_backward(differentiate: HostFunction, grad_out: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, as reference_swiglu_backward."""
    grad_x = torch.empty_like(x)
    columns = x.shape[-1]
    call = _Swiglu(
        *(tensor.data_ptr() for tensor in (x, grad_out, grad_x)),
        grad_out.numel() // columns,
        columns,
        torch.get_num_threads(),
    )
    differentiate(ctypes.byref(call))  # ctypes lets other Python threads run meanwhile
    return grad_x
