"""More than 2^31 elements: the end of a large tensor equals the same rows computed alone, bit by bit.

On a GPU (--kernels=cuda) tensors are that large; elsewhere the same tests run on a few thousand elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.ops.activation import bias_gelu, bias_swiglu
from megatrain.ops.cross_entropy import summed_cross_entropy
from megatrain.ops.dropout import residual_dropout
from megatrain.ops.embedding import embedding, embedding_gradient_
from megatrain.ops.normalization import layer_norm, rms_norm
from megatrain.ops.optimizer_step import adamw_, lamb_apply_, lamb_direction_
from megatrain.ops.quantization import E4M3, fp8_quantize, fp8_quantize_columns, fp8_quantize_rows
from megatrain.ops.rotary import split_rotated_
from megatrain.ops.square_sums import square_sum
from tests.helpers.kernels import UNDER_TEST

TAIL = 16
ADAM: dict[str, Any] = {
    "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "num_updates": 3, "gradient_scale": 0.5,
}  # fmt: skip


def num_rows(columns: int) -> int:
    """Return rows of `columns` columns for more than 2^31 elements on a GPU, and for a few thousand elsewhere."""
    elements = (1 << 31) + (1 << 20) if UNDER_TEST.kind == "cuda" else 1 << 13
    return elements // columns // TAIL * TAIL + TAIL


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return numbers that differ from row to row. They are computed on the device under test: the CPU would take
    minutes."""
    generator = torch.Generator(UNDER_TEST.device).manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=UNDER_TEST.device).normal_(generator=generator)


def weights(*shape: int) -> Tensor:
    return numbers(*shape).requires_grad_()


ROW_BY_ROW: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "rms_norm": (1024, lambda x: rms_norm(x, weights(1024), 1e-5)[0]),
    "layer_norm": (1024, lambda x: layer_norm(x, weights(1024), weights(1024), 1e-5)[0]),
    "bias_gelu": (1024, lambda x: bias_gelu(x, weights(1024))),
    "bias_swiglu": (1024, lambda x: bias_swiglu(x.unflatten(1, (2, 512)), weights(2, 512))),
}


@pytest.mark.parametrize(("columns", "operation"), ROW_BY_ROW.values(), ids=ROW_BY_ROW)
def test_row_by_row_operators_of_large_tensors(columns: int, operation: Callable[[Tensor], Tensor]) -> None:
    x = numbers(num_rows(columns), columns)
    found = results_of_the_end(operation, x)
    alone = results_of_the_end(operation, x[-TAIL:].clone())

    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def results_of_the_end(operation: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return the last rows of the result and of x's gradient."""
    x = x.detach().requires_grad_()
    out = operation(x)
    tail = out[-TAIL:].detach().clone()
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    return [tail, x.grad[-TAIL:].clone()]


def test_residual_dropout_of_large_tensors() -> None:
    x, y = numbers(num_rows(1024), 1024), numbers(num_rows(1024), 1024)
    token = torch.arange(len(x), device=x.device)
    found = residual_dropout(x, y, None, 0.3, (5, 7), token)[-TAIL:].clone()

    assert torch.equal(found, residual_dropout(x[-TAIL:], y[-TAIL:], None, 0.3, (5, 7), token[-TAIL:]))


@pytest.mark.parametrize("groups", [1, 2])
def test_rotary_positions_of_large_tensors(groups: int) -> None:
    rows = num_rows(groups * 4 * 128)
    product = numbers(rows, 1, groups, 4, 128)
    cos, sin = (numbers(rows, 1, 1, 64, dtype=torch.float32) for _ in range(2))
    alone = split_rotated_(product[-TAIL:].clone(), cos[-TAIL:].clone(), sin[-TAIL:].clone())
    found = split_rotated_(product, cos, sin)

    assert all(torch.equal(a[-TAIL:], b) for a, b in zip(found, alone, strict=True))


def test_cross_entropy_of_large_tensors() -> None:
    logits = numbers(num_rows(1024), 1024)
    labels = torch.arange(len(logits), device=logits.device) % 1000
    tail, tail_labels = logits[-TAIL:].clone().requires_grad_(), labels[-TAIL:]
    summed_cross_entropy(tail, tail_labels, 1000).backward()
    logits.requires_grad_()
    summed_cross_entropy(logits, labels, 1000).backward()

    assert torch.equal(logits.grad[-TAIL:], tail.grad)


def test_embedding_of_large_tensors() -> None:
    table = numbers(num_rows(512), 512)
    tokens = torch.arange(len(table) - TAIL, len(table), device=table.device)
    assert torch.equal(embedding(tokens, table), table[-TAIL:])

    gradient = torch.zeros_like(table)
    embedding_gradient_(gradient, tokens, table[-TAIL:].clone())
    assert torch.equal(gradient[-TAIL:], table[-TAIL:])
    assert not gradient[:-TAIL].any()


def flat_state(start: int | None = None) -> tuple[list[Tensor], Tensor]:
    """Return gradient, master weights, moments and bf16 weights, and the borders of two runs, or the ends of all."""
    count = num_rows(1)
    tensors = [numbers(count, dtype=torch.float32) for _ in range(3)]
    tensors += [tensors[1].abs(), torch.zeros(count, dtype=torch.bfloat16, device=UNDER_TEST.device)]
    if start is not None:
        tensors = [tensor[start:].clone() for tensor in tensors]
    middle = count - TAIL if start is None else 0
    return tensors, torch.tensor([0, middle, len(tensors[0])], device=UNDER_TEST.device)


def test_adamw_of_large_tensors() -> None:
    is_decayed = torch.tensor([True, False], device=UNDER_TEST.device)
    ends = []
    for start in (None, -TAIL):
        tensors, borders = flat_state(start)
        adamw_(*tensors, borders, is_decayed, lr=0.1, **ADAM)
        ends.append([tensor[-TAIL:].clone() for tensor in tensors])
        del tensors

    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_lamb_of_large_tensors() -> None:
    is_decayed = torch.tensor([True, False], device=UNDER_TEST.device)
    ratios = torch.tensor([1.0, 0.5], dtype=torch.float64, device=UNDER_TEST.device)
    ends, sums = [], []
    for start in (None, -TAIL):
        (gradient, master, exp_avg, exp_avg_sq, published), borders = flat_state(start)
        found = lamb_direction_(gradient, master, exp_avg, exp_avg_sq, borders, is_decayed, **ADAM)
        sums.append(found[1])
        lamb_apply_(gradient, master, published, borders, ratios, lr=0.1)
        ends.append([one[-TAIL:].clone() for one in (master, exp_avg, exp_avg_sq, published)])
        del gradient, master, exp_avg, exp_avg_sq, published

    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    torch.testing.assert_close(*sums, rtol=1e-12, atol=0.0)


def test_square_sum_of_large_tensors() -> None:
    flat = torch.full((num_rows(1) + 3,), 2.0, dtype=torch.bfloat16, device=UNDER_TEST.device)

    assert square_sum(flat).item() == 4.0 * len(flat)


def test_quantization_of_large_tensors() -> None:
    x = numbers(num_rows(1024), 1024)
    scale = torch.full((2,), 16.0, device=x.device)
    plain, transposed, _ = fp8_quantize(x, scale, E4M3, True, True)
    alone, alone_transposed, _ = fp8_quantize(x[-TAIL:].clone(), scale, E4M3, True, True)
    assert torch.equal(as_bytes(plain[-TAIL:]), as_bytes(alone))
    assert torch.equal(as_bytes(transposed[:, -TAIL:]), as_bytes(alone_transposed))
    del plain, transposed

    rows, inverse = fp8_quantize_rows(x, E4M3)
    alone, alone_inverse = fp8_quantize_rows(x[-TAIL:].clone(), E4M3)
    assert torch.equal(as_bytes(rows[-TAIL:]), as_bytes(alone))
    assert torch.equal(inverse[-TAIL:], alone_inverse)
    del rows

    wide = numbers(32, num_rows(32))
    columns, inverse = fp8_quantize_columns(wide, E4M3)
    alone, alone_inverse = fp8_quantize_columns(wide[:, -TAIL:].contiguous(), E4M3)
    assert torch.equal(as_bytes(columns[-TAIL:]), as_bytes(alone))
    assert torch.equal(inverse[-TAIL:], alone_inverse)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
