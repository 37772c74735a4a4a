"""Calls the kernel of csrc/host_kernels/rotary.c: the rotation of queries and keys in fp32, in one pass.

Other dtypes are computed in torch operations (rotary_reference.py). The bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.extension import host_function
from megatrain.ops.rotary_reference import (
    new_heads,
    reference_rotate,
    reference_rotated_backward,
    reference_split_rotated,
)

Run = Callable[[Any], None]
"""The compiled function, which gets a pointer to a `_Rotation`."""

_MAX_KINDS = 3


class _Heads(ctypes.Structure):
    """Heads of one kind, as `Heads` in csrc/host_kernels/rotary.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        *((name, ctypes.c_int64 * 4) for name in ("source_strides", "target_strides")),
        *((name, ctypes.c_int64) for name in ("num_heads", "is_rotated")),
    )


class _Rotation(ctypes.Structure):
    """The arguments of the kernel, as `Rotation` in csrc/host_kernels/rotary.c."""

    _fields_ = (
        ("heads", _Heads * _MAX_KINDS),
        ("num_kinds", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num_positions", "num_samples", "num_groups", "num_units")),
        ("num_threads", ctypes.c_int64),
        ("sign", ctypes.c_float),
    )


def rotate_kernel() -> Callable[..., None] | None:
    """Return the function that does what reference_rotate does, in one pass if it can; None if there is no kernel."""
    run = compiled_rotation()
    return None if run is None else partial(_rotate, run)


def split_rotated_kernel() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Return the function that does what reference_split_rotated does; None if there is no kernel."""
    run = compiled_rotation()
    return None if run is None else partial(_split_rotated, run)


def rotated_backward_kernel() -> Callable[..., Tensor] | None:
    """Return the function that does what reference_rotated_backward does; None if there is no kernel."""
    run = compiled_rotation()
    return None if run is None else partial(_rotated_backward, run)


@cache
def compiled_rotation() -> Run | None:
    """Return the compiled function, once per process; None if there is none."""
    return host_function("megatrain._host_kernels", "megatrain_rotate", [ctypes.POINTER(_Rotation)])


def _rotate(run: Run, product: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not _is_supported(product):
        reference_rotate(product, cos, sin)
        return
    heads = product[..., :-1, :]
    _run(run, [(heads, heads)], cos, sin, 1.0)


def _split_rotated(run: Run, product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_supported(product):
        return reference_split_rotated(product, cos, sin)
    q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
    turned_q, turned_k, new_v = (new_heads(product, part.shape[3]) for part in (q, k, v))
    _run(run, [(q, turned_q), (k, turned_k), (v, new_v)], cos, sin, 1.0)
    return turned_q, turned_k, new_v


def _rotated_backward(run: Run, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not _is_supported(grad_q):
        return reference_rotated_backward(grad_q, grad_k, grad_v, cos, sin)
    grad = new_heads(grad_q, grad_q.shape[3] + 2)
    targets = grad.split((grad_q.shape[3], 1, 1), dim=3)
    _run(run, list(zip((grad_q, grad_k, grad_v), targets, strict=True)), cos, sin, -1.0)
    return grad


def _is_supported(x: Tensor) -> bool:
    return bool(x.dtype == torch.float32 and x.numel() > 0)


def _run(run: Run, parts: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, sign: float) -> None:
    """Rotate the first two parts and copy the third. Each is a source and its target.

    All threads of torch are used. ctypes lets other Python threads run meanwhile.
    """
    strides = ctypes.c_int64 * 4
    heads = [
        _Heads(
            source.data_ptr(),
            target.data_ptr(),
            strides(*source.stride()[:4]),
            strides(*target.stride()[:4]),
            source.shape[3],
            number < _MAX_KINDS - 1,
        )
        for number, (source, target) in enumerate(parts)
    ]
    num_positions, num_samples, num_groups, _, num_units = parts[0][0].shape
    call = _Rotation(
        (_Heads * _MAX_KINDS)(*heads),
        len(heads),
        cos.data_ptr(),
        sin.data_ptr(),
        *(num_positions, num_samples, num_groups, num_units, torch.get_num_threads()),
        sign,
    )
    run(ctypes.byref(call))
