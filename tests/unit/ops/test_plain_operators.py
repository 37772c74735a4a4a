"""Operators without their own kernel: each compared with torch's autograd of its formula, in fp64 and in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.activation import bias_geglu, bias_gelu_exact
from megatrain.ops.capped_attention import CappedScores, capped_attention
from megatrain.ops.documents import pack_documents
from megatrain.ops.normalization import zero_centered_rms_norm
from megatrain.ops.softcap import softcap_
from tests.helpers.relative_error import assert_same, forward_and_backward


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_gelu_exact(x: Tensor, bias: Tensor | None = None) -> Tensor:
    x = (x if bias is None else x + bias).squeeze(-2)
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def plain_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).unbind(-2)
    return functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize(
    ("operator", "formula", "num_parts"), [(bias_gelu_exact, plain_gelu_exact, 1), (bias_geglu, plain_geglu, 2)]
)
def test_activations_without_kernels_are_their_formulas(
    operator: Callable[..., Tensor], formula: Callable[..., Tensor], num_parts: int
) -> None:
    x, bias, grad = drawn(3, 2, num_parts, 10), drawn(num_parts, 10, seed=1), drawn(3, 2, 10, seed=2)
    assert_same(operator, formula, [x, bias], grad, 1e-12)
    assert_same(lambda x: operator(x, None), formula, [x], grad, 1e-12)
    # The bias is added in fp32: one step of bf16, where a bias added in bf16 costs up to 13. 1 + tanh cancels in fp32.
    low = operator(x.bfloat16(), bias.bfloat16())
    exact = formula(x.bfloat16().double(), bias.bfloat16().double())
    torch.testing.assert_close(low.double(), exact, rtol=2**-8, atol=1e-6)


def test_an_activation_keeps_its_input_only() -> None:
    x = drawn(4, 2, 2, 8).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.numel()), one)[1], lambda one: one):
        bias_geglu(x, None)

    assert kept == [x.numel()]


def test_softcap_is_its_formula() -> None:
    assert_same(
        lambda x: softcap_(x.clone(), 2.5), lambda x: 2.5 * torch.tanh(x / 2.5), [9 * drawn(5, 7)], drawn(5, 7), 1e-12
    )


@pytest.mark.parametrize("added", [False, True])
def test_zero_centered_norm_is_its_formula(added: bool) -> None:
    x, weight, residual, grad = (
        drawn(4, 3, 16),
        0.3 * drawn(16, seed=1),
        drawn(4, 3, 16, seed=2),
        drawn(4, 3, 16, seed=3),
    )

    def formula(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        total = sum(others, x)
        return functional.rms_norm(total, (16,), 1 + weight, 1e-5) + total

    def operator(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        normed, total = zero_centered_rms_norm(x, weight, 1e-5, *others)
        return normed + total

    assert_same(operator, formula, [x, weight, *([residual] if added else [])], grad, 1e-12)


def test_small_zero_centered_weight_is_not_rounded_away() -> None:
    """1 + 2**-9 is 1 in bf16, so it must not be rounded before it is applied: 192 of 256 results would differ."""
    x, weight = drawn(256, 1, dtype=torch.bfloat16).expand(256, 16).contiguous(), torch.full((16,), 2.0**-9)
    found, _ = zero_centered_rms_norm(256 * x, weight.bfloat16(), 1e-12)
    expected = (256 * x).float() * (256 * x).float().square().mean(-1, keepdim=True).rsqrt() * (1 + weight)

    assert torch.equal(found, expected.bfloat16())


def plain_capped_attention(q: Tensor, k: Tensor, v: Tensor, scores: CappedScores) -> Tensor:
    """Compute all scores explicitly. Shapes: as in capped_attention()."""
    length, repeats = q.shape[0], q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)))
    capped = scores.cap * torch.tanh(scores.scale * (q @ k.transpose(-1, -2)) / scores.cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (scores.window_size or length))
    if scores.documents is not None:
        number = scores.documents.number_SB.t()
        hidden = (hidden | (number[:, :, None] != number[:, None, :]))[:, None]
    return (capped.masked_fill(hidden, float("-inf")).softmax(-1) @ v).permute(2, 0, 1, 3)


# lengths within a block, of several blocks, and with a rest
@pytest.mark.slow(kept=["False-0-7", "False-5-256", "True-5-600", "True-300-256"])
@pytest.mark.parametrize("length", [7, 256, 600])
@pytest.mark.parametrize("window_size", [0, 5, 300])
@pytest.mark.parametrize("has_documents", [False, True])
def test_capped_attention_is_its_formula(length: int, window_size: int, has_documents: bool) -> None:
    q, k, v = drawn(length, 2, 4, 6), drawn(length, 2, 2, 6, seed=1), drawn(length, 2, 2, 6, seed=2)
    document_SB = (torch.arange(length)[:, None] * torch.tensor([3, 5]) // length).expand(length, 2)
    documents = pack_documents(document_SB) if has_documents else None
    scores = CappedScores(0.7, 1.5, window_size, documents)
    assert_same(
        lambda q, k, v: capped_attention(q, k, v, scores),
        lambda q, k, v: plain_capped_attention(q, k, v, scores),
        [q, k, v],
        drawn(length, 2, 4, 6, seed=3),
        1e-11,
    )


def test_half_precision_capped_attention_is_as_exact_as_inputs() -> None:
    q, k, v, grad = (drawn(300, 1, 2, 8, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    scores = CappedScores(0.5, 2.0, 0, None)
    found = forward_and_backward(lambda q, k, v: capped_attention(q, k, v, scores), [q, k, v], grad)
    wide = [x.double() for x in (q, k, v)]
    expected = forward_and_backward(lambda q, k, v: plain_capped_attention(q, k, v, scores), wide, grad.double())

    for one, truth in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - truth).norm() < 2**-7 * truth.norm()
