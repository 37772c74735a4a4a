"""Calls the kernels of csrc/host_kernels: the elementwise part of AdamW and LAMB on the CPU, in one pass.

Nothing here is needed: without the compiled library, the same operators run in torch operations
(optimizer_reference.py), with the same bits and more passes over memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, host_kernel
from megatrain.ops.optimizer_reference import reference_adamw, reference_lamb_direction, run_square_sums

_NUM_COMPARED = 4133
_COMPARED_BORDER = 1021
"""The number of elements on which a kernel is compared with torch, and the border of their runs. Neither is a multiple
of a vector's length, because torch's loops may round the remainder in another way."""


class _Step(ctypes.Structure):
    """The arguments of the kernel, as `Step` in csrc/host_kernels/optimizer_step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "master", "exp_avg", "exp_avg_sq", "published")),
        *((name, ctypes.c_void_p) for name in ("run_borders", "is_decayed")),
        *((name, ctypes.c_int64) for name in ("num_runs", "num_elements")),
        *((name, ctypes.c_int32) for name in ("is_double", "has_bf16_grad", "is_lamb", "num_threads")),
        *((name, ctypes.c_double) for name in ("gradient_scale", "new_share", "beta2", "new_square_share")),
        *((name, ctypes.c_double) for name in ("root_correction", "eps", "decay", "correction")),
    )


@cache
def step_kernel() -> HostFunction | None:
    """Return compiled_step(), once per process; None if there is none, or if its bits are not those of torch.

    Whether torch rounds a product before it adds it depends on how torch was built, and on the processor.
    """
    update = compiled_step()
    return update if update is not None and _has_bits_of_torch(update) else None


def compiled_step() -> HostFunction | None:
    """Return the compiled function, whatever its bits are; None if there is none."""
    return host_kernel("optimizer_step", _Step)


def host_adamw(
    update: HostFunction,
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    published: Tensor | None,
    run_borders: Tensor,
    is_decayed: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    gradient_scale: float,
) -> None:
    """Update the weights, as reference_adamw."""
    _run(
        update,
        (grad, master, exp_avg, exp_avg_sq, published, run_borders, is_decayed),
        (beta1, beta2, eps, bias_correction2, gradient_scale),
        is_lamb=False,
        has_decay=weight_decay != 0.0,
        decay=1.0 - lr * weight_decay,
        correction=-lr / bias_correction1,
    )


def host_lamb_direction(
    update: HostFunction,
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    run_borders: Tensor,
    is_decayed: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    gradient_scale: float,
) -> Tensor:
    """Return the sums of squares of each run's weights and direction, as reference_lamb_direction."""
    _run(
        update,
        (grad, master, exp_avg, exp_avg_sq, None, run_borders, is_decayed),
        (beta1, beta2, eps, bias_correction2, gradient_scale),
        is_lamb=True,
        has_decay=weight_decay != 0.0,
        decay=weight_decay,
        correction=bias_correction1,
    )
    return run_square_sums(master, grad, run_borders)


def _run(
    update: HostFunction,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[float, float, float, float, float],
    *,
    is_lamb: bool,
    has_decay: bool,
    decay: float,
    correction: float,
) -> None:
    """Call the kernel on all threads of torch. ctypes lets other Python threads run meanwhile."""
    grad, master, *_, is_decayed = tensors
    assert grad is not None
    assert master is not None
    assert is_decayed is not None
    beta1, beta2, eps, bias_correction2, gradient_scale = scalars
    # the same expressions as in the reference; the kernel rounds them to the type of master, as torch does
    step = _Step(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        is_decayed.numel() if has_decay else 0,
        master.numel(),
        master.dtype == torch.float64,
        grad.dtype == torch.bfloat16,
        is_lamb,
        torch.get_num_threads(),
        *(gradient_scale, 1.0 - beta1, beta2, 1.0 - beta2, math.sqrt(bias_correction2), eps, decay, correction),
    )
    update(ctypes.byref(step))


def _has_bits_of_torch(update: HostFunction) -> bool:
    wide, narrow = torch.float32, torch.bfloat16
    return all(
        _is_same(partial(kernel, update), reference, grad_dtype, dtype, lr)
        for kernel, reference, grad_dtype, dtype, lr in (
            (host_adamw, reference_adamw, wide, wide, [0.01]),
            (host_adamw, reference_adamw, narrow, wide, [0.01]),
            (host_adamw, reference_adamw, torch.float64, torch.float64, [0.01]),
            (host_lamb_direction, reference_lamb_direction, wide, wide, []),
            (host_lamb_direction, reference_lamb_direction, torch.float64, torch.float64, []),
        )
    )


def _is_same(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    grad_dtype: torch.dtype,
    dtype: torch.dtype,
    lr: list[float],
) -> bool:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(4, _NUM_COMPARED, dtype=dtype, generator=generator)
    state[3].square_()
    borders, decays = torch.tensor([0, _COMPARED_BORDER, _NUM_COMPARED]), torch.tensor([True, False])
    of_sides = []
    for update in (kernel, reference):
        grad, flat = state[0].to(grad_dtype, copy=True), state[1:].clone()
        published = [None] if lr else []  # rounding to bf16 has no alternatives
        update(grad, *flat, *published, borders, decays, *lr, 0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 0.7)
        of_sides.append((grad, flat))
    (grad, flat), (expected_grad, expected_flat) = of_sides
    is_same: bool = torch.equal(grad, expected_grad) and torch.equal(flat, expected_flat)
    return is_same
