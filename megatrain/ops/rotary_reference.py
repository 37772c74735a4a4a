"""The operators of rotary.py in torch operations, on every device without a kernel.

Shapes: as in rotary.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write the rotated x to `out`, which is x or other memory. Shapes: x and out [S, B, G, heads, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    if out is not x and out.dtype == cos.dtype:  # nothing is overwritten before its use, and nothing rounded twice
        torch.mul(first, cos, out=out_first).sub_(second * sin)
        torch.mul(second, cos, out=out_second).add_(first * sin)
        return
    turned_first = (first * cos).sub_(second * sin)
    out_second.copy_((second * cos).add_(first * sin))
    out_first.copy_(turned_first)


def reference_rotate(product: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate in place, as `split_rotated_` for views."""
    heads = product[..., :-1, :]
    _rotate_heads(heads, cos, sin, heads)


def reference_split_rotated(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return new queries, keys and values, as `split_rotated_` for copies."""
    q, k, v = product.split((product.shape[3] - 2, 1, 1), dim=3)
    turned_q, turned_k = new_heads(product, q.shape[3]), new_heads(product, 1)
    _rotate_heads(q, cos, sin, turned_q)
    _rotate_heads(k, cos, sin, turned_k)
    return turned_q, turned_k, v.clone(memory_format=torch.contiguous_format)


def reference_rotated_backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the product."""
    queries, negative_sin = grad_q.shape[3], -sin
    grad = new_heads(grad_q, queries + 2)
    _rotate_heads(grad_q, cos, negative_sin, grad[..., :queries, :])
    _rotate_heads(grad_k, cos, negative_sin, grad[..., queries : queries + 1, :])
    grad[..., queries + 1 :, :].copy_(grad_v)
    return grad


def new_heads(product: Tensor, count: int) -> Tensor:
    """Return memory for `count` heads of each group of `product`."""
    return product.new_empty((*product.shape[:3], count, product.shape[4]))
