"""Calls the kernel of csrc/host_kernels/rotary.c: the rotation of queries and keys in fp32, in one pass.

The bits are those of torch's operations (rotary_reference.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, host_kernel
from megatrain.ops.rotary_reference import new_heads

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


@cache
def compiled_rotation() -> HostFunction | None:
    """Return the compiled function, once per process; None if there is none."""
    return host_kernel("rotate", _Rotation)


def host_rotate(rotate: HostFunction, product: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate in place, as reference_rotate."""
    heads = product[..., :-1, :]
    _run(rotate, [(heads, heads)], cos, sin, 1.0)


def host_split_rotated(
    rotate: HostFunction, product: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new queries, keys and values, as reference_split_rotated."""
    q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
    turned_q, turned_k, new_v = (new_heads(product, part.shape[3]) for part in (q, k, v))
    _run(rotate, [(q, turned_q), (k, turned_k), (v, new_v)], cos, sin, 1.0)
    return turned_q, turned_k, new_v


def host_rotated_backward(
    rotate: HostFunction, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient of the product, as reference_rotated_backward."""
    grad = new_heads(grad_q, grad_q.shape[3] + 2)
    targets = grad.split((grad_q.shape[3], 1, 1), dim=3)
    _run(rotate, list(zip((grad_q, grad_k, grad_v), targets, strict=True)), cos, sin, -1.0)
    return grad


def _run(rotate: HostFunction, parts: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, sign: float) -> None:
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
    rotate(ctypes.byref(call))
