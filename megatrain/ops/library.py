"""Declares operators to torch, so that compiled kernels can be registered for them.

Schema, check, reference and fake are Python and need no compiler and no GPU. The reference is plain torch and runs on
every device without a kernel. If `megatrain._C` (csrc/operators) was built, it adds the kernels for CUDA. A kernel of
csrc/host_kernels replaces the reference for tensors on the CPU (docs/adr/0088-host-kernels.md).
Gradients are not declared here: public functions are torch.autograd.Functions that call one operator in forward and
another in backward. References with large temporaries work in blocks of *_BLOCK_ELEMENTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.ops.extension import HostFunction, load_extension

_LIBRARY = torch.library.Library("megatrain", "FRAGMENT")
_DECLARED: list[str] = []

LOSS_BLOCK_ELEMENTS = 1 << 20
"""Logits that the loss converts to a wider dtype at once: a few MB."""
OPTIMIZER_BLOCK_ELEMENTS_ON_CPU = 1 << 18
"""Elements of a shard that an optimizer updates at once.

The block and its temporaries stay in the CPU's cache, and the memory of the temporaries is reused.
"""
SQUARE_SUM_BLOCK_ELEMENTS_ON_CPU = 1 << 16
"""Elements of a flat tensor that are summed in fp64 at once: the fastest of the measured sizes."""


class HostImplementation(NamedTuple):
    """The kernel of an operator for tensors on the CPU. It has the bits of the reference, or bits that depend neither
    on an element's place nor on threads.

    find: returns the compiled function, or None if there is none. run: does what the reference does, given the compiled
    function before the operator's arguments. dtypes: the dtypes of the first argument for which the kernel is used.
    """

    find: Callable[[], HostFunction | None]
    run: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


def declare(
    schema: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    host: HostImplementation | None = None,
) -> Callable[..., Any]:
    """Define the operator `schema` and return the function that calls it.

    check: raises for arguments that the schema's types allow but the operation does not. It runs before reference and
    fake; kernels make the same checks, with messages that begin alike. fake: returns empty results. cuda: the
    implementation on CUDA by a torch function that CPUs lack; such an operator has no compiled kernel. host: replaces
    the reference for tensors on the CPU that have elements.
    """

    def checked_reference(*args: Any) -> Any:
        check(*args)
        first = args[0]
        if host is not None and first.device.type == "cpu" and first.dtype in host.dtypes and first.numel():
            function = host.find()
            if function is not None:
                return host.run(function, *args)
        return reference(*args)

    def checked_fake(*args: Any) -> Any:
        check(*args)
        return fake(*args)

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, checked_reference, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"megatrain::{name}", checked_fake, lib=_LIBRARY)
    _DECLARED.append(f"megatrain::{name}")
    load_extension()
    return getattr(torch.ops.megatrain, name).default


def declared_operators() -> tuple[str, ...]:
    """Return the qualified names of all operators in the modules that were imported so far."""
    return tuple(_DECLARED)


def require_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise RuntimeError unless `tensor` has `shape`."""
    if tuple(tensor.shape) != tuple(shape):
        raise RuntimeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def require_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise RuntimeError unless `tensor` has the device, dtype and shape of `other`."""
    require_same_kind(name, tensor, other_name, other)
    if tensor.shape != other.shape:
        raise RuntimeError(f"{name} must have the shape of {other_name}, {list(other.shape)}, got {list(tensor.shape)}")


def require_same_kind(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise RuntimeError unless `tensor` has the device and dtype of `other`."""
    require_same_device(name, tensor, other_name, other)
    require_dtype(name, tensor, other.dtype)


def require_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise RuntimeError unless both tensors are on the same device."""
    if tensor.device != other.device:
        raise RuntimeError(f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}")


def require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"{name} must be {_dtype_text(dtype)}, got {_dtype_text(tensor.dtype)}")


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless `tensor` is bf16, fp16, fp32 or fp64."""
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise RuntimeError(f"{name} must be bf16, fp16, fp32 or fp64, got {_dtype_text(tensor.dtype)}")


def require_contiguous(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous, got strides {list(tensor.stride())} for {list(tensor.shape)}")


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
