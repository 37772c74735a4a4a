"""Rotary positions compared with transformers' Llama."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.ops.rotary import inverse_frequencies, rotary_table, split_partly_rotated, split_rotated_
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.operator_contract import assert_contract, assert_refused, misaligned, with_gaps
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same
from tests.helpers.require import lazy_module

transformers = lazy_module("transformers")
modeling_llama = lazy_module("transformers.models.llama.modeling_llama")

CPU = torch.device("cpu")


OPS = torch.ops.megatrain

# S, B, G, R, D. One query per key, and one group: in place. Then several of both. Halves that are no multiple of a
# pack, that are more packs than a block has threads, and tokens with more heads than it processes at once.
IN_PLACE = [
    (1, 1, 1, 1, 2),
    (7, 2, 3, 1, 6),
    (5, 2, 1, 3, 64),
    (3, 1, 40, 1, 16),
    (2, 2, 1, 70, 32),
    (2, 1, 1, 2, 1024),
]
SPLIT = [(7, 2, 2, 3, 6), (5, 1, 4, 4, 64), (2, 1, 3, 9, 246), (9, 2, 2, 2, 16)]
SHAPES = IN_PLACE + SPLIT


def llama_config(head_dim: int, theta: float) -> Any:
    rope = {"rope_type": "default", "rope_theta": theta}
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_plain_frequencies_are_llamas(theta: float) -> None:
    for head_dim in (2, 6, 64, 128):
        expected, _ = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(llama_config(head_dim, theta))
        assert torch.allclose(inverse_frequencies(head_dim, theta).float(), expected, rtol=2e-6, atol=0), head_dim


def test_rotary_table_is_exact_at_large_positions() -> None:
    cos, sin = rotary_table(131073, inverse_frequencies(4, 500000.0), CPU, torch.float32)

    for unit, frequency in enumerate((1.0, 500000.0**-0.5)):
        assert cos[131072, 0, 0, unit].item() == pytest.approx(math.cos(131072 * frequency), abs=1e-6)
        assert sin[131072, 0, 0, unit].item() == pytest.approx(math.sin(131072 * frequency), abs=1e-6)


def tables(seq_len: int, head_dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return rotary_table(seq_len, inverse_frequencies(head_dim, 100.0), UNDER_TEST.device, dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def drawn_product(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    S, B, G, R, D = shape
    return draw(S, B, G, R + 2, D, dtype=dtype, seed=seed)


def turned_by_llama(x_SBGRD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    full = [torch.cat([table, table], -1)[:, 0, 0][None] for table in (cos, sin)]
    x_BNSD = x_SBGRD.flatten(2, 3).permute(1, 2, 0, 3)
    return modeling_llama.apply_rotary_pos_emb(x_BNSD, x_BNSD, *full)[0].permute(2, 0, 1, 3).reshape(x_SBGRD.shape)


def joined(cos: Tensor, sin: Tensor):
    """The operator under test as a function of the product, which it does not change, with all results in one
    tensor."""
    return lambda product: torch.cat(split_rotated_(product.clone(), cos, sin), dim=3)


def joined_by_llama(cos: Tensor, sin: Tensor):
    return lambda product: torch.cat([turned_by_llama(product[..., :-1, :], cos, sin), product[..., -1:, :]], dim=3)


@pytest.mark.slow(kept=["shape0", "shape1", "shape6", "shape8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_is_llamas(shape: tuple[int, ...]) -> None:
    cos, sin = tables(shape[0], shape[-1])

    inputs, grad = [drawn_product(shape)], drawn_product(shape, seed=1)
    assert_same(joined(cos, sin), joined_by_llama(cos, sin), inputs, grad, 1e-13)


def test_rotation_agrees_with_llamas_own_table() -> None:
    config = llama_config(16, 500000.0)
    product = drawn_product((40, 2, 3, 1, 16), torch.float32)
    q, k = (product[..., row, :].permute(1, 2, 0, 3).cpu() for row in (0, 1))
    expected = modeling_llama.apply_rotary_pos_emb(
        q, k, *modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(40)[None])
    )

    frequency = inverse_frequencies(16, 500000.0)
    found = split_rotated_(product, *rotary_table(40, frequency, UNDER_TEST.device, torch.float32))
    for mine, theirs in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(mine[..., 0, :].cpu(), theirs.permute(2, 0, 1, 3), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(5, 2, 2, 1, 6), (3, 1, 2, 2, 4)])
def test_rotary_gradient_is_the_slope(shape: tuple[int, ...]) -> None:
    cos, sin = tables(shape[0], shape[-1])

    assert torch.autograd.gradcheck(joined(cos, sin), [drawn_product(shape).requires_grad_()])


@pytest.mark.slow(kept=["shape0-dtype0", "shape1-dtype0", "shape1-dtype2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 2, 4, 1, 32), (33, 2, 2, 3, 22)])
def test_rotation_loses_no_more_than_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cos, sin = tables(shape[0], shape[-1])

    def plain(product: Tensor) -> Tensor:
        return joined_by_llama(cos.to(product.dtype), sin.to(product.dtype))(product)

    inputs, grad = [drawn_product(shape, dtype)], drawn_product(shape, dtype, seed=1)
    assert_no_worse_than_eager(joined(cos.float(), sin.float()), plain, inputs, grad)


@pytest.mark.parametrize("shape", [(32, 2, 4, 1, 32), (33, 2, 2, 3, 22)])
def test_rotation_in_bf16_is_rounded_once(shape: tuple[int, ...]) -> None:
    product, (cos, sin) = drawn_product(shape, torch.bfloat16), tables(shape[0], shape[-1], torch.float32)
    exact = joined_by_llama(cos.double(), sin.double())(product.double()).to(torch.bfloat16)

    # Equal to the rounded result of fp64, except where fp32 arithmetic is on the other side of a tie.
    assert (joined(cos, sin)(product) != exact).double().mean().item() < 2e-3


def test_evenly_spaced_heads_stay_in_the_product() -> None:
    for shape in IN_PLACE:
        product = drawn_product(shape).requires_grad_()
        before = product.detach().clone()
        values = split_rotated_(product, *tables(shape[0], shape[-1]))[2]
        for head, row in zip(
            split_rotated_(product, *tables(shape[0], shape[-1])), (0, shape[3], shape[3] + 1), strict=True
        ):
            assert head.data_ptr() == product[..., row, :].data_ptr(), shape
            assert head.flatten(2, 3).data_ptr() == head.data_ptr(), shape
        assert torch.equal(values, before[..., -1:, :]), shape


def test_unevenly_spaced_heads_are_copied_out_of_the_product() -> None:
    for shape in SPLIT:
        product = drawn_product(shape)
        before = product.clone()
        q, k, v = split_rotated_(product, *tables(shape[0], shape[-1]))
        assert all(one.is_contiguous() for one in (q, k, v)), shape
        assert torch.equal(v, before[..., -1:, :]), shape
        assert torch.equal(product, before), shape


def test_rotation_saves_no_input_for_backward() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        for shape in (IN_PLACE[1], SPLIT[0]):
            split_rotated_(drawn_product(shape).requires_grad_(), *tables(shape[0], shape[-1]))

    assert saved == []


def test_overwritten_product_cannot_be_used_in_backward() -> None:
    product = drawn_product((4, 2, 3, 1, 8)).requires_grad_().exp()  # exp saves its result
    q, _, _ = split_rotated_(product, *tables(4, 8))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


@pytest.mark.parametrize("shape", [(6, 2, 3, 1, 4), (6, 2, 2, 3, 4)])
def test_product_of_a_projection(shape: tuple[int, ...]) -> None:
    """As attention uses it: the product is a view of the output of a linear layer."""
    cos, sin = tables(6, 4)
    heads = (shape[2], shape[3] + 2, shape[4])
    x, weight = draw(6, 2, 9), draw(math.prod(heads), 9, seed=1)

    def projected(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight).unflatten(-1, heads)

    assert_same(
        lambda x, weight: torch.cat(split_rotated_(projected(x, weight), cos, sin), dim=3),
        lambda x, weight: joined_by_llama(cos, sin)(projected(x, weight)),
        [x, weight],
        drawn_product(shape, seed=2),
        1e-12,
    )


@pytest.mark.parametrize("shape", [(7, 2, 3, 1, 10), (5, 2, 2, 3, 8)])
def test_only_the_first_units_are_rotated(shape: tuple[int, ...]) -> None:
    cos, sin = tables(shape[0], 6)

    def by_llama(product: Tensor) -> Tensor:
        turned = torch.cat([turned_by_llama(product[..., :-1, :6], cos, sin), product[..., :-1, 6:]], dim=-1)
        return torch.cat([turned, product[..., -1:, :]], dim=3)

    assert_same(
        lambda product: torch.cat(split_partly_rotated(product, cos, sin), dim=3),
        by_llama,
        [drawn_product(shape)],
        drawn_product(shape, seed=1),
        1e-13,
    )


def test_strided_products_and_gradients() -> None:
    cos, sin = tables(7, 4)

    def strided(operation):
        return lambda base: operation(base.permute(4, 1, 2, 3, 0))

    for heads in (3, 4):
        base, grad = draw(4, 2, 3, heads, 7), draw(3, 7, heads, 4, 2, seed=1).permute(1, 4, 0, 2, 3)
        assert_same(strided(joined(cos, sin)), strided(joined_by_llama(cos, sin)), [base], grad, 1e-13)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = draw(1, 1, 1, 16).expand(50, 1, 1, 16), draw(1, 1, 1, 16, seed=1).expand(50, 1, 1, 16)
    q, k, _ = split_rotated_(torch.stack([q, k, k], dim=3), *tables(50, 16))
    scores = q[:, 0, 0, 0] @ k[:, 0, 0, 0].t()

    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


@pytest.mark.slow(kept=["shape6-dtype0", "shape6-dtype3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 2, 3, 1, 8), (3, 0, 2, 2, 8), (3, 2, 0, 1, 8)])
def test_rotary_operators_keep_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    product, (cos, sin) = drawn_product(shape, dtype), tables(shape[0], shape[-1], wide(dtype))
    grads = drawn_product(shape, dtype, seed=1).split((shape[3], 1, 1), dim=3)
    moved = [grad.transpose(0, 2).contiguous().transpose(0, 2) for grad in grads]  # as attention may return them

    assert_contract(OPS.rotate_queries_and_keys_.default, product, cos, sin)
    assert_contract(OPS.split_rotated.default, product, cos, sin)
    assert_contract(OPS.rotated_backward.default, *grads, cos, sin)
    assert_contract(OPS.rotated_backward.default, *moved, cos, sin)
    assert torch.equal(OPS.rotated_backward(*moved, cos, sin), OPS.rotated_backward(*grads, cos, sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rotation_with_a_tensor_at_an_odd_address(dtype: torch.dtype) -> None:
    product, (cos, sin) = drawn_product((5, 2, 2, 3, 32), dtype), tables(5, 32, wide(dtype))
    inputs = [*(one.contiguous() for one in product.split((3, 1, 1), dim=3)), cos, sin]
    expected = OPS.rotated_backward(*inputs)
    for odd in range(5):
        moved = [misaligned(one) if number == odd else one for number, one in enumerate(inputs)]
        torch.testing.assert_close(OPS.rotated_backward(*moved), expected)
    # heads that are an odd number of elements apart
    inputs[0] = torch.cat([inputs[0], inputs[0][..., :1]], dim=-1)[..., :-1]
    torch.testing.assert_close(OPS.rotated_backward(*inputs), expected)


def test_rotation_with_an_odd_stride() -> None:
    product, (cos, sin) = drawn_product((5, 2, 2, 3, 32), torch.bfloat16), tables(5, 32, torch.float32)
    q, k, v = (one.contiguous() for one in product.split((3, 1, 1), dim=3))
    expected = OPS.rotated_backward(q, k, v, cos, sin)
    for dim in range(4):
        strides = [stride * 2 if outer < dim else stride for outer, stride in enumerate(q.stride())]
        strides[dim] += 1
        odd_q = q.new_empty(2 * q.numel() + 8).as_strided(q.shape, strides).copy_(q)
        found = OPS.rotated_backward(odd_q, k, v, cos, sin)
        torch.testing.assert_close(found, expected, msg=f"odd stride of dim {dim}")


def test_rotary_operators_refuse_wrong_inputs() -> None:
    product, (cos, sin) = drawn_product((4, 2, 3, 2, 8), torch.float32), tables(4, 8, torch.float32)
    q, k, v = (one.contiguous() for one in product.split((2, 1, 1), dim=3))
    for operator in (OPS.rotate_queries_and_keys_.default, OPS.split_rotated.default):
        shape = r"product must have shape \[S, B, G, R \+ 2, D\], D even, got "
        assert_refused(operator, (product[..., :7].contiguous(), cos, sin), shape + r"\[4, 2, 3, 4, 7\]")
        assert_refused(operator, (product[..., :2, :].contiguous(), cos, sin), shape + r"\[4, 2, 3, 2, 8\]")
        assert_refused(operator, (product[0], cos, sin), shape + r"\[2, 3, 4, 8\]")
        assert_refused(operator, (product.transpose(0, 1), cos, sin), "product must be contiguous")
        assert_refused(operator, (product, cos[1:], sin), r"cos must have shape \[4, 1, 1, 4\], got \[3, 1, 1, 4\]")
        assert_refused(operator, (product, cos, sin.double()), "sin must be float32, got float64")
        for tables_with_gaps in ((with_gaps(cos), sin), (cos, with_gaps(sin))):
            with pytest.raises(RuntimeError, match=r"(cos|sin) must be contiguous"):
                operator(product, *tables_with_gaps)
        assert_refused(operator, (product.long(), cos, sin), "product must be bf16, fp16, fp32 or fp64, got int64")
    backward = OPS.rotated_backward.default
    assert_refused(
        backward, (q[0], k, v, cos, sin), r"grad_q must have shape \[S, B, G, R, D\], D even, got \[2, 3, 2, 8\]"
    )
    assert_refused(backward, (q, q, v, cos, sin), r"grad_k must have shape \[4, 2, 3, 1, 8\], got \[4, 2, 3, 2, 8\]")
    assert_refused(backward, (q, k, v.half(), cos, sin), "grad_v must be float32, got float16")
    spread, spread_q = (one.transpose(0, 4).contiguous().transpose(0, 4) for one in (v, q))
    assert_refused(backward, (spread_q, k, v, cos, sin), "grad_q must have units next to each other")
    assert_refused(backward, (q, k, spread, cos, sin), "grad_v must have units next to each other")
    assert_refused(backward, (q, k, v, cos, sin[..., :3].contiguous()), r"sin must have shape \[4, 1, 1, 4\], got")


def test_more_tokens_or_heads_than_a_kernel_counts_are_refused() -> None:
    if UNDER_TEST.kind == "reference":
        return  # Plain torch accepts them.
    cos, sin = tables(1 << 16, 2, torch.float32)
    for shape in ((1 << 16, 1 << 15, 0, 3, 2), (1 << 16, 0, 1, (1 << 23) + 1, 2)):
        with pytest.raises(RuntimeError, match=r"product must have less than 2\^31 tokens, less than 2\^23 heads"):
            OPS.rotate_queries_and_keys_(cos.new_empty(shape), cos, sin)
