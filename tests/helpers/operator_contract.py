"""The contract of every operator of megatrain.ops, for each implementation."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_roofline_trace import OWN_LAUNCHES
from tests.helpers.kernels import UNDER_TEST, num_launches, thread_orders, use_thread_order

Operator = Callable[..., Any]
_C = ctypes.CDLL(None, use_errno=True)
_LAUNCHES_OF_FEW_ROWS = {"megatrain::embedding_gradient_": 1}
"""For operators that launch fewer kernels for small inputs: the sum of up to 32 tokens has one part."""


def assert_contract(operator: Operator, *arguments: Any) -> None:
    """Check schema, fake, results that are completely written and reproducible, and inputs at other addresses."""
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    results = [_run_poisoned(operator, arguments, order) for order in thread_orders()]
    for one in results[0]:
        assert not one.float().isnan().any(), "an element was not written"
    for result in results[1:]:
        assert_identical(result, results[0])
    _assert_close(_run_poisoned(operator, arguments, 0, misaligned), results[0])
    if UNDER_TEST.kind == "emulated":
        _assert_close(_run_poisoned(operator, arguments, 0, before_a_guard), results[0])
        _assert_launches(operator, arguments)


def assert_refused(operator: Operator, arguments: Sequence[Any], message: str) -> None:
    """Check that the operator, and its fake, refuse `arguments` with one line that matches `message`."""
    with pytest.raises(RuntimeError, match=message) as caught:
        operator(*arguments)
    assert "\n" not in str(caught.value).split("\nException raised from")[0].strip()
    with pytest.raises(RuntimeError, match=message):
        operator(*(argument.to("meta") if isinstance(argument, Tensor) else argument for argument in arguments))


def assert_identical(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check equality bit by bit; NaN equals NaN."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        if one.dtype.itemsize == 1:  # torch has no other comparison for 8-bit floats.
            one, other = one.float(), other.float()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def misaligned(tensor: Tensor) -> Tensor:
    """Return the same values and strides at an address that is one element past a multiple of 16 bytes."""
    return _copied(tensor, 1)


def before_a_guard(tensor: Tensor) -> Tensor:
    """Return the same values and strides in CPU memory that ends at a protected page."""
    return _placed(tensor, _guarded(_extent(tensor), tensor.dtype), 0)


def with_gaps(tensor: Tensor) -> Tensor:
    """Return the same values with an element between each two of them, so no operator treats them as contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _copied(tensor: Tensor, offset: int) -> Tensor:
    buffer = torch.empty(_extent(tensor) + offset, dtype=tensor.dtype, device=tensor.device)
    return _placed(tensor, buffer, offset)


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last."""
    extent: int = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(extent, 0)


def _placed(tensor: Tensor, buffer: Tensor, offset: int) -> Tensor:
    copy = buffer.as_strided(tensor.shape, tensor.stride(), buffer.storage_offset() + offset)
    return copy.copy_(tensor.detach())


def _as_aligned(tensor: Tensor) -> Tensor:
    return _copied(tensor, int(tensor.data_ptr() % 16 != 0))


def _run_poisoned(
    operator: Operator, arguments: Sequence[Any], order: int, place: Callable[[Tensor], Tensor] = _as_aligned
) -> list[Tensor]:
    """Return results, and arguments that the operator writes to, where all fresh memory is filled with NaN."""
    copies = [place(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
    use_thread_order(order)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = operator(*copies)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        use_thread_order(0)
    written = [copy for copy, spec in zip(copies, operator._schema.arguments, strict=False) if _is_written(spec)]
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return [result for result in (*results, *written) if isinstance(result, Tensor)]


def _assert_launches(operator: Operator, arguments: Sequence[Any]) -> None:
    """Check that the operator launches as many kernels as the roofline counts (docs/benchmarks/gpu-roofline.md)."""
    before = num_launches()
    _run_poisoned(operator, arguments, 0)
    name = operator._schema.name
    most = OWN_LAUNCHES.get(name, 1)
    # without elements there is nothing to compute
    has_elements = all(x.numel() for x in arguments if isinstance(x, Tensor))
    least = _LAUNCHES_OF_FEW_ROWS.get(name, most) if has_elements else 0
    assert least <= num_launches() - before <= most, f"launches of {name}"


def _assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        if one.dtype.itemsize == 1:
            assert_identical([one], [other])
            continue
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-5 if one.dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _guarded(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return memory for `num_elements` on the CPU, directly before a page whose access kills the process. It is freed
    with its last view."""
    num_bytes = num_elements * dtype.itemsize
    num_mapped = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, num_mapped + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_mapped)
    if _C.mprotect(ctypes.c_void_p(flat.data_ptr() + num_mapped), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return flat[num_mapped - num_bytes :].view(dtype)
