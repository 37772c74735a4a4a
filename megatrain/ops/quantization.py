"""Tensors in 8-bit floating point: scaled values with one scale for the tensor, for each row or for each column.

A scale maps the largest magnitude to the largest number of the format. If the scale comes from earlier steps, larger
values are clamped to that number. Values that are not finite become NaN, because clamping would hide them.
Source: FP8 formats for deep learning (arXiv:2209.05433).
Shapes: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.ops.library import declare, require_contiguous, require_dtype, require_same_device

E4M3 = torch.float8_e4m3fn
"""More precision, less range: for activations and weights."""
E5M2 = torch.float8_e5m2
"""More range, less precision: for gradients."""

_TILE = 128
_MAX_ROWS = 65535 * _TILE  # a CUDA grid has at most 65535 blocks along y, one per tile
_LARGEST_SCALE = 2.0**126  # the largest power of two with an inverse that is a normal fp32 number


def _check_format(x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RuntimeError(f"x must be bf16, fp16 or fp32, got {str(x.dtype).removeprefix('torch.')}")
    require_contiguous("x", x)
    if dtype not in (E4M3, E5M2):
        raise RuntimeError(f"dtype must be float8_e4m3fn or float8_e5m2, got {str(dtype).removeprefix('torch.')}")


def _check_matrix(x: Tensor, dtype: torch.dtype) -> None:
    _check_format(x, dtype)
    if x.dim() != 2:
        raise RuntimeError(f"x must be [rows, columns], got {list(x.shape)}")
    if x.shape[0] > _MAX_ROWS:
        raise RuntimeError(f"x must have at most {_MAX_ROWS} rows, got {list(x.shape)}")


def _check_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, has_plain: bool, has_transposed: bool) -> None:
    _check_matrix(x, dtype)
    require_same_device("scale", scale, "x", x)
    require_dtype("scale", scale, torch.float32)
    if scale.numel() < 1:
        raise RuntimeError("scale must have a number")


def scale_for(largest: Tensor, largest_of_format: Tensor | float) -> Tensor:
    """Return the scale that maps the magnitude `largest` to the format's largest number: 1 for zero, never infinity."""
    return torch.where(largest == 0.0, 1.0, (largest_of_format / largest).clamp(max=_LARGEST_SCALE))


def _quantized(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).where(scaled.isfinite(), torch.nan).to(dtype)


def _largest(x: Tensor, dim: int) -> Tensor:
    return x.abs().amax(dim, keepdim=True).float() if x.shape[dim] else x.new_zeros(()).float()


def _reference_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = scale_for(_largest(x.flatten(), 0).reshape(()), torch.finfo(dtype).max)
    return torch.stack([scale, 1.0 / scale])


def _reference_quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, has_plain: bool, has_transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q = _quantized(x.float() * scale.flatten()[0], dtype)
    q_t = q.t().clone(memory_format=torch.contiguous_format) if has_transposed else q.new_empty((0, 0))
    q = q if has_plain else q.new_empty((0, 0))
    rows = [_largest(part, 0) for part in x.split(_TILE)]
    largest = [_largest(tile, 1).reshape(()) for row in rows for tile in row.split(_TILE, dim=1)] if x.numel() else []
    return q, q_t, torch.stack(largest) if largest else x.new_empty(_num_tiles(x), dtype=torch.float32)


def _reference_quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = scale_for(_largest(x, 1), torch.finfo(dtype).max).expand(x.shape[0], 1)
    return _quantized(x.float() * scale, dtype), 1.0 / scale


def _reference_quantize_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _reference_quantize_rows(x.t().contiguous(), dtype)


def _num_tiles(x: Tensor) -> int:
    return -(-x.shape[0] // _TILE) * -(-x.shape[1] // _TILE)


fp8_scale = declare(
    "fp8_scale(Tensor x, ScalarType dtype) -> Tensor scale",
    check=_check_format,
    reference=_reference_scale,
    fake=lambda x, dtype: x.new_empty(2, dtype=torch.float32),
)
"""Return [scale, 1 / scale] for the largest magnitude of x. Shapes: result [2] fp32."""

fp8_quantize = declare(
    "fp8_quantize(Tensor x, Tensor scale, ScalarType dtype, bool has_plain, bool has_transposed) "
    "-> (Tensor q, Tensor q_t, Tensor largest)",
    check=_check_quantize,
    reference=_reference_quantize,
    fake=lambda x, scale, dtype, has_plain, has_transposed: (
        x.new_empty(x.shape if has_plain else (0, 0), dtype=dtype),
        x.new_empty((x.shape[1], x.shape[0]) if has_transposed else (0, 0), dtype=dtype),
        x.new_empty(_num_tiles(x), dtype=torch.float32),
    ),
)
"""Return x * scale[0] in `dtype`, its transpose, and the largest magnitude of each tile of x, in one pass over x.

Shapes: x and q [R, C]; q_t [C, R]; q or q_t is [0, 0] if it is not requested; largest [tiles of 128 x 128] fp32.
"""

fp8_quantize_rows = declare(
    "fp8_quantize_rows(Tensor x, ScalarType dtype) -> (Tensor q, Tensor inverse)",
    check=_check_matrix,
    reference=_reference_quantize_rows,
    fake=lambda x, dtype: (torch.empty_like(x, dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)),
)
"""Return x in `dtype` with a scale for each row, and the inverse scales. Shapes: q [R, C]; inverse [R, 1]."""

fp8_quantize_columns = declare(
    "fp8_quantize_columns(Tensor x, ScalarType dtype) -> (Tensor q_t, Tensor inverse)",
    check=_check_matrix,
    reference=_reference_quantize_columns,
    fake=lambda x, dtype: (
        x.new_empty((x.shape[1], x.shape[0]), dtype=dtype),
        x.new_empty((x.shape[1], 1), dtype=torch.float32),
    ),
)
"""Return x transposed, in `dtype`, with a scale for each column of x, and the inverse scales.

Shapes: q_t [C, R]; inverse [C, 1].
"""
