"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split convention of the Llama family.

Shapes: S sequence, B micro-batch, G key-value heads (groups), R queries of a group, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.ops.host_rotary import compiled_rotation, host_rotate, host_rotated_backward, host_split_rotated
from megatrain.ops.library import (
    HostImplementation,
    declare,
    require_contiguous,
    require_dtype,
    require_floating,
    require_same_device,
    require_same_kind,
    require_shape,
)
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.rotary_reference import (
    new_heads,
    reference_rotate,
    reference_rotated_backward,
    reference_split_rotated,
)


def inverse_frequencies(num_units: int, theta: float) -> Tensor:
    """Return the angle that each position adds to each pair of units, in fp64 on the CPU (models are built on meta).

    Shapes: result [num_units / 2].
    """
    return theta ** (-torch.arange(0, num_units, 2, dtype=torch.float64, device="cpu") / num_units)


def rotary_table(
    seq_len: int, frequency: Tensor, device: torch.device, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, times `factor`, computed in fp64 on the CPU and rounded once.

    On the meta device nothing is computed.

    Shapes: each [S, 1, 1, D / 2].
    """
    if device.type == "meta":
        frequency = frequency.to(device)
    position = torch.arange(seq_len, dtype=torch.float64, device=frequency.device)
    angle = torch.outer(position, frequency)[:, None, None, :]
    return (angle.cos() * factor).to(device, dtype), (angle.sin() * factor).to(device, dtype)


def split_partly_rotated(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the product of a QKV projection into queries, keys and values; rotate the first units of queries and keys.

    A pair consists of two rotated units: (x[d], x[d + U/2]) for cos and sin [S, 1, 1, U / 2]. Queries and keys are
    copies, because only some of their units change.
    Shapes: as in split_rotated_().
    """
    num_rotated = 2 * cos.shape[-1]
    turned_q, turned_k, _ = split_rotated_(product[..., :num_rotated].contiguous(), cos, sin)
    q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
    q = torch.cat([turned_q, q[..., num_rotated:]], dim=-1)
    return q, torch.cat([turned_k, k[..., num_rotated:]], dim=-1), v


def split_rotated_(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the product of a QKV projection into queries, keys and values; rotate queries and keys, maybe in place.

    Each pair (x[d], x[d + D/2]) is rotated by its position's angle, in cos's dtype, and rounded once. If the queries of
    all groups are evenly spaced in the product (one query per key, or one group), all results are views of it, rotated
    in place. Otherwise attention, which needs one stride over all heads, would have to copy the queries, so one pass
    writes all three to new tensors. Saves no activation for backward, which rotates by the negative angles.
    Shapes: product [S, B, G, R + 2, D], for each group its R queries, its key, its value; cos and sin [S, 1, 1, D / 2];
    results [S, B, G, R, D] and twice [S, B, G, 1, D].
    """
    return _SplitRotated.apply(product, cos, sin)


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.cos, ctx.sin = cos, sin  # shared constants of the model, not activations
        queries = product.shape[3] - 2
        if product.shape[2] > 1 and queries > 1:
            return _split_rotated_op(product.contiguous(), cos, sin)
        product = product.contiguous()
        _rotate_op(product, cos, sin)
        # mark_dirty is only for outputs; the new version makes a backward that saved the old product an error
        torch.autograd.graph.increment_version(product)
        return product.split((queries, 1, 1), dim=3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        packed = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        return _rotated_backward_op(*packed, ctx.cos, ctx.sin), None, None


def _check_product(product: Tensor, cos: Tensor, sin: Tensor) -> None:
    require_floating("product", product)
    if product.dim() != 5 or product.shape[3] < 3 or product.shape[4] == 0 or product.shape[4] % 2:
        raise RuntimeError(f"product must have shape [S, B, G, R + 2, D], D even, got {list(product.shape)}")
    require_contiguous("product", product)
    _check_tables(cos, sin, "product", product)


def _check_backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> None:
    require_floating("grad_q", grad_q)
    if grad_q.dim() != 5 or grad_q.shape[3] < 1 or grad_q.shape[4] == 0 or grad_q.shape[4] % 2:
        raise RuntimeError(f"grad_q must have shape [S, B, G, R, D], D even, got {list(grad_q.shape)}")
    for name, grad in (("grad_q", grad_q), ("grad_k", grad_k), ("grad_v", grad_v)):
        if name != "grad_q":
            require_same_kind(name, grad, "grad_q", grad_q)
            require_shape(name, grad, (*grad_q.shape[:3], 1, grad_q.shape[4]))
        if grad.stride(-1) != 1:
            raise RuntimeError(f"{name} must have units next to each other, got strides {list(grad.stride())}")
    _check_tables(cos, sin, "grad_q", grad_q)


def _check_tables(cos: Tensor, sin: Tensor, name: str, x: Tensor) -> None:
    for table_name, table in (("cos", cos), ("sin", sin)):
        require_same_device(table_name, table, name, x)
        require_dtype(table_name, table, accumulate_dtype(x.dtype))
        require_shape(table_name, table, (x.shape[0], 1, 1, x.shape[-1] // 2))
        require_contiguous(table_name, table)


_rotate_op = declare(
    "rotate_queries_and_keys_(Tensor(a!) product, Tensor cos, Tensor sin) -> ()",
    check=_check_product,
    reference=reference_rotate,
    host=HostImplementation(compiled_rotation, host_rotate),
    fake=lambda product, cos, sin: None,
)
_split_rotated_op = declare(
    "split_rotated(Tensor product, Tensor cos, Tensor sin) -> (Tensor q, Tensor k, Tensor v)",
    check=_check_product,
    reference=reference_split_rotated,
    host=HostImplementation(compiled_rotation, host_split_rotated),
    fake=lambda product, cos, sin: tuple(new_heads(product, count) for count in (product.shape[3] - 2, 1, 1)),
)
_rotated_backward_op = declare(
    "rotated_backward(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, Tensor sin) -> Tensor",
    check=_check_backward,
    reference=reference_rotated_backward,
    host=HostImplementation(compiled_rotation, host_rotated_backward),
    fake=lambda grad_q, grad_k, grad_v, cos, sin: new_heads(grad_q, grad_q.shape[3] + 2),
)
