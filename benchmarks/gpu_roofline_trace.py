"""Counts the kernels of a run on the meta device: launches, bytes and FLOPs of each operator, by a dispatch mode.

An operator reads and writes each of its arguments and results once: the bytes are those of the storage ranges, and one
range counts once for several arguments. Dims of stride 0 count as one element. Matrix products and attention have
FLOPs, 2*m*n*k for each product; all other operators count as bytes only. An operator whose results only share the
memory of its arguments launches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.telemetry.flops import attended_pairs

Unit = Literal["memory", "bf16", "FP8", "NVLink"]
"""What carries out a kernel's work besides memory: the matrix units for one dtype, or the link of an exchange."""

_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty"))
_OVERWRITING = frozenset({"aten::copy_", "aten::zero_", "aten::fill_"})
"""Operators that write to their first argument without reading it."""
_INNER: Mapping[str, tuple[str, int]] = {
    "aten::mm": ("self", -1),
    "aten::bmm": ("self", -1),
    "aten::addmm": ("mat1", -1),
    "aten::addmm_": ("mat1", -1),
    "aten::_scaled_mm": ("self", -1),
    "megatrain::add_product_": ("grad", 0),
}
"""The argument and its dim over which a matrix product sums."""
_SDPA = "aten::_scaled_dot_product"
_FORWARD = frozenset(
    {
        f"{_SDPA}_cudnn_attention",
        f"{_SDPA}_efficient_attention",
        f"{_SDPA}_flash_attention",
        f"{_SDPA}_flash_attention_for_cpu",
        "aten::_flash_attention_forward",
    }
)
_BACKWARD = frozenset(
    {
        f"{_SDPA}_cudnn_attention_backward",
        f"{_SDPA}_efficient_attention_backward",
        f"{_SDPA}_flash_attention_backward",
        f"{_SDPA}_flash_attention_for_cpu_backward",
        "aten::_flash_attention_backward",
    }
)
_ATTENTION = {
    **dict.fromkeys(_FORWARD, ("attention forward", 2, 2)),
    **dict.fromkeys(_BACKWARD, ("attention backward", 5, 4)),
}
"""Name, products that are computed, and products of the model: backward computes the scores again."""
OWN_LAUNCHES: Mapping[str, int] = {
    "megatrain::rms_norm_backward": 2,  # the column sum of the weight's gradient is a launch of its own
    "megatrain::layer_norm_backward": 3,
    "megatrain::bias_backward": 2,
    "megatrain::bias_dropout_backward": 2,
    "megatrain::bias_gelu_backward": 2,
    "megatrain::bias_swiglu_backward": 2,
    "megatrain::fp8_scale": 2,
    "megatrain::fp8_quantize_columns": 3,
    "megatrain::embedding_gradient_": 2,  # two sums
    "megatrain::lamb_direction_": 2,
    "megatrain::square_sum": 2,
    "megatrain::add_product_": 0,  # a product of torch
}
"""How many kernels of csrc/kernels an operator launches, if not one. The tests of the operators count them in the
emulation of CUDA."""
_LIBRARY_LAUNCHES: Mapping[str, int] = {
    "megatrain::add_product_": 1,
    "megatrain::embedding_gradient_": 2,  # a conversion, and a sort, which is counted as one
    "aten::select_backward": 2,  # zeros, and a copy into them
    **dict.fromkeys(_BACKWARD, 3),  # the row sums of gradient * output, the gradients, and dq in the result's dtype
}
"""Launches of kernels of torch and of the libraries behind attention, where it is not one operator, one kernel."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of an operator. model_flops: without products that are computed again."""

    name: str
    launches: int
    num_bytes: int
    flops: int = 0
    model_flops: int = 0
    unit: Unit = "memory"


Kernels = Counter[Kernel]
"""How often each kernel ran, in the order of the first calls."""


class KernelTrace(TorchDispatchMode):
    """Counts the kernels that would run inside the context on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Kernels = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; a mode that has to be skipped costs the import of torch._dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = _kernel(_call(func, args, kwargs or {}, result))
        if kernel is not None:
            self.kernels[kernel] += 1
        return result


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator. read: tensors of arguments. made: results with memory of their own. changed: arguments
    that the call writes to."""

    name: str
    arguments: Mapping[str, Any]
    read: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    changed: tuple[Tensor, ...]


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> _Call:
    schema = func._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    is_fresh = schema.name in _OVERWRITING or given.get("is_fresh") is True
    read: list[Tensor] = []
    changed: list[Tensor] = []
    known: set[int] = set()
    for argument in schema.arguments:
        tensors = _tensors(given.get(argument.name))
        known |= {_storage(x) for x in tensors}
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            changed += tensors
        if not is_written or not (is_fresh or argument.kwarg_only):  # a written keyword is the memory of a result
            read += tensors
    made = [x for x in _tensors(result) if _storage(x) not in known]
    return _Call(schema.name, given, tuple(read), tuple(made), tuple(changed))


def _kernel(call: _Call) -> Kernel | None:
    if call.name in _ALLOCATIONS or not (call.made or call.changed):
        return None
    count_bytes = _BYTES.get(call.name, _range_bytes)
    launches = OWN_LAUNCHES.get(call.name, 0) + _LIBRARY_LAUNCHES.get(call.name, 0) or 1
    short = call.name.partition("::")[2]
    if call.name in _INNER:
        name, dim = _INNER[call.name]
        factor, product = call.arguments[name], (call.changed or call.made)[0]
        inner = factor.shape[dim]
        *_, rows, columns = product.shape
        flops = 2 * product.numel() * inner
        unit = _matrix_unit(factor)
        return Kernel(f"{short} {rows} x {inner} x {columns}", launches, count_bytes(call), flops, flops, unit)
    if call.name in _ATTENTION:
        name, num_computed, num_of_model = _ATTENTION[call.name]
        flops = 2 * _multiplications(call)
        unit = _matrix_unit(call.arguments["query"])
        return Kernel(name, launches, count_bytes(call), num_computed * flops, num_of_model * flops, unit)
    return Kernel(short, launches, count_bytes(call))


def _multiplications(call: _Call) -> int:
    """Return the multiplications of one of attention's products: those of pairs that causality and window allow."""
    query = call.arguments["query"]
    seq_len = query.shape[-3 if call.name.startswith("aten::_flash_attention") else -2]
    before = call.arguments.get("window_size_left")
    is_causal = call.arguments.get("is_causal", False)
    pairs = attended_pairs(seq_len, 0 if before is None else before + 1) if is_causal else seq_len**2
    return int(query.numel() // seq_len * pairs)


def _matrix_unit(factor: Tensor) -> Unit:
    if factor.dtype == torch.bfloat16:
        return "bf16"
    if factor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return "FP8"
    raise ValueError(f"a product of {factor.dtype} has no peak here; trace a model in bf16 or FP8")


def _range_bytes(call: _Call) -> int:
    return sum(sum({_range(x): _nbytes(x) for x in xs}.values()) for xs in (call.read, (*call.made, *call.changed)))


def _look_up_bytes(call: _Call) -> int:
    """Return the bytes of the rows that are taken, not of the table."""
    return _nbytes(call.arguments["tokens"]) + 2 * _nbytes(call.made[0])


def _row_sum_bytes(call: _Call) -> int:
    """Return the bytes of the rows that are summed, and of reading and writing as many rows of the table."""
    table, grad = call.arguments["grad_weight"], call.arguments["grad"]
    return _nbytes(call.arguments["tokens"]) + _nbytes(grad) + 2 * grad.numel() * table.element_size()


def _select_backward_bytes(call: _Call) -> int:
    """Return the bytes of zeros, and of a copy into them."""
    return sum(map(_nbytes, call.made)) + 2 * sum(map(_nbytes, call.read))


_BYTES: Mapping[str, Callable[[_Call], int]] = {
    "megatrain::embedding": _look_up_bytes,
    "megatrain::embedding_gradient_": _row_sum_bytes,
    "aten::select_backward": _select_backward_bytes,
}
"""Operators that do not read and write each of their tensors once."""


def _tensors(value: object) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _range(x: Tensor) -> tuple[object, ...]:
    return _storage(x), x.storage_offset(), *x.shape, *x.stride()


def _nbytes(x: Tensor) -> int:
    return x.element_size() * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
