"""Rows by token, and the embedding's gradient compared with torch's and an fp64 sum."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.embedding import embedding, embedding_gradient_
from tests.helpers.forked_program import run_forked
from tests.helpers.kernels import UNDER_TEST, draw, on_device
from tests.helpers.operator_contract import assert_contract, assert_refused, misaligned, with_gaps
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same

OPS = torch.ops.megatrain
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

# (tokens, rows, hidden): one and many parts of 32 tokens; rows within one thread, one block, several blocks
SHAPES = [(1, 1, 1), (31, 5, 7), (32, 3, 16), (33, 40, 8), (200, 6, 123), (70, 9, 1032), (40, 4, 8191)]


def draw_tokens(num: int, num_rows: int, *, has_absent: bool = True) -> Tensor:
    """Return tokens; every third one is of the last row, so that its run spans many parts."""
    tokens = torch.randint(-1 if has_absent else 0, num_rows, (num,), generator=torch.Generator().manual_seed(3))
    tokens[::3] = num_rows - 1
    return on_device(tokens)


def plain_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding(tokens.clamp(min=0), weight) * (tokens >= 0).unsqueeze(-1)


def summed_rows(table: Tensor, tokens: Tensor, grad: Tensor) -> Tensor:
    """Return table + the rows of `grad` by token in fp64."""
    is_row = tokens >= 0
    return table.double().index_add(0, tokens[is_row], grad[is_row].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_takes_rows(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        num_tokens, num_rows, hidden = shape
        weight, tokens = draw(num_rows, hidden, dtype=dtype), draw_tokens(num_tokens, num_rows)
        assert torch.equal(embedding(tokens, weight), plain_embedding(tokens, weight)), shape
        in_3d = tokens.view(1, -1, 1)
        assert torch.equal(embedding(in_3d, weight), plain_embedding(in_3d, weight)), shape


@pytest.mark.slow(kept=["(1, 1, 1)", "(33, 40, 8)", "(70, 9, 1032)"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding_is_torchs(shape: tuple[int, int, int]) -> None:
    num_tokens, num_rows, hidden = shape
    weight, grad = draw(num_rows, hidden), draw(num_tokens, hidden, seed=1)
    for has_absent in (True, False):
        tokens = draw_tokens(num_tokens, num_rows, has_absent=has_absent)

        assert_same(
            lambda weight, tokens=tokens: embedding(tokens, weight),
            lambda weight, tokens=tokens: plain_embedding(tokens, weight),
            *([weight], grad, 1e-12),
        )


def test_gradient_is_the_slope() -> None:
    tokens, weight = draw_tokens(40, 4).view(20, 2), draw(4, 3).requires_grad_()

    assert torch.autograd.gradcheck(lambda weight: embedding(tokens, weight), [weight])


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_embedding_loses_no_more_than_plain_torch(dtype: torch.dtype) -> None:
    tokens, weight, grad = draw_tokens(200, 6), draw(6, 24, dtype=dtype), draw(200, 24, dtype=dtype, seed=1)

    assert_no_worse_than_eager(lambda w: embedding(tokens, w), lambda w: plain_embedding(tokens, w), [weight], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_frequent_token_is_summed_in_fp32(dtype: torch.dtype) -> None:
    tokens = on_device(torch.zeros(3000, 1, dtype=torch.int64))
    tokens[1500] = 2
    weight = draw(4, 8, dtype=dtype).requires_grad_()
    grad = draw(3000, 1, 8, dtype=dtype, seed=1) + 1
    embedding(tokens, weight).backward(grad)
    assert weight.grad is not None
    # one rounding to the type: half a unit in the last place, plus the error of fp32
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    expected = summed_rows(torch.zeros_like(weight), tokens[:, 0], grad[:, 0])
    assert torch.allclose(weight.grad.double(), expected, rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_are_added_to_what_is_there(dtype: torch.dtype, is_wide: bool) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of_table = wide if is_wide else dtype
    table, tokens, grad = draw(7, 40, dtype=of_table), draw_tokens(100, 6), draw(100, 40, dtype=dtype, seed=1)
    expected = summed_rows(table, tokens, grad)
    untouched = table[6].clone()
    found = table.clone()
    embedding_gradient_(found, tokens.view(50, 2), grad.view(50, 2, 40))

    rounding = {torch.float64: 1e-13, torch.float32: 1e-5}.get(of_table, torch.finfo(of_table).eps)
    assert torch.allclose(found.double(), expected, rtol=rounding, atol=rounding)
    assert torch.equal(found[6], untouched)


def test_gradient_of_a_bf16_table_is_rounded_once() -> None:
    table, tokens = draw(40, 64, dtype=torch.bfloat16), draw_tokens(200, 40)
    grad = draw(200, 64, dtype=torch.bfloat16, seed=1)
    exact = summed_rows(table, tokens, grad).to(torch.bfloat16)
    embedding_gradient_(table, tokens, grad)

    # Equal to the rounded result of fp64, except where fp32 arithmetic is on the other side of a tie.
    assert (table != exact).double().mean().item() < 2e-3


def test_gradient_of_microbatches_equals_that_of_one_batch() -> None:
    tokens, grad = draw_tokens(128, 6), draw(128, 16, dtype=torch.bfloat16)
    once, in_steps = (torch.zeros(6, 16, device=UNDER_TEST.device) for _ in range(2))
    embedding_gradient_(once, tokens, grad)
    for part in range(4):
        embedding_gradient_(in_steps, tokens[32 * part : 32 * part + 32], grad[32 * part : 32 * part + 32])

    torch.testing.assert_close(in_steps, once, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_absent", [0, 1, 32, 40])
def test_runs_that_meet_the_borders_of_parts(num_absent: int) -> None:
    for runs in ([96], [1, 95], [32, 32, 32], [31, 1, 64], [64, 1, 31], [33, 62, 1], [95, 1]):
        counts = torch.tensor([num_absent, *runs])
        tokens = torch.repeat_interleave(torch.arange(-1, len(runs)), counts)
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
        tokens, grad = on_device(tokens[order]), draw(len(tokens), 12)
        found = torch.zeros(len(runs), 12, dtype=torch.float64, device=UNDER_TEST.device)
        embedding_gradient_(found, tokens, grad)
        expected = summed_rows(torch.zeros_like(found), tokens, grad)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), runs


def test_tokens_without_a_row_have_no_effect() -> None:
    tokens, grad = on_device(torch.full((70,), -1)), draw(70, 8)
    grad[3] = float("nan")
    table = draw(4, 8, seed=1)
    found = table.clone()
    embedding_gradient_(found, tokens, grad)

    assert torch.equal(found, table)
    assert not embedding(tokens, table).any()


def test_permuted_gradients_and_strided_tokens() -> None:
    base = draw(16, 6, 10, seed=1)
    tokens, weight = draw_tokens(120, 5)[::2].view(6, 10), draw(5, 16)

    assert not tokens.is_contiguous()
    assert_same(
        lambda weight: embedding(tokens, weight),
        lambda weight: plain_embedding(tokens, weight),
        *([weight], base.permute(1, 2, 0), 1e-12),
    )


@pytest.mark.slow(kept=["(70, 9, 1032)-dtype0", "(70, 9, 1032)-dtype3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 4, 8), (4, 3, 0), (4, 1, 16)], ids=str)
def test_operators_keep_the_contract(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_rows, hidden = shape
    weight, tokens = draw(num_rows, hidden, dtype=dtype), draw_tokens(num_tokens, num_rows)
    grad = draw(num_tokens, hidden, dtype=dtype, seed=1)

    assert_contract(OPS.embedding.default, tokens, weight)
    assert_contract(OPS.embedding_gradient_.default, weight, tokens, grad)
    if dtype in (torch.bfloat16, torch.float16):
        assert_contract(OPS.embedding_gradient_.default, weight.float(), tokens, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradient_or_table_at_an_odd_address(dtype: torch.dtype) -> None:
    tokens, table, grad = draw_tokens(70, 5), draw(5, 16, dtype=dtype), draw(70, 16, dtype=dtype, seed=1)
    expected = table.clone()
    embedding_gradient_(expected, tokens, grad)
    for found, from_grad in ((misaligned(table), grad), (table.clone(), misaligned(grad))):
        embedding_gradient_(found, tokens, from_grad)
        torch.testing.assert_close(found, expected)


def test_wrong_tokens_are_refused() -> None:
    if UNDER_TEST.kind != "reference":
        return  # A kernel's own check ends the process.
    for token in (-2, 4):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, token]), draw(4, 3))


WRONG_TOKEN = """
import torch
from megatrain.ops.embedding import embedding, embedding_gradient_
from tests.emulated_cuda.build import load_emulated_kernels

load_emulated_kernels()
tokens, rows = torch.tensor([0, {token}]), torch.ones(4, 3)
{call}
"""


def test_wrong_token_ends_the_process_of_a_kernel() -> None:
    if UNDER_TEST.kind != "emulated":
        return  # Plain torch raises; on a GPU no process could continue after such an error.
    for call in ("embedding(tokens, rows)", "embedding_gradient_(rows, tokens, rows[:2])"):
        for token in (-2, 4):
            done = run_forked(["-c", WRONG_TOKEN.format(call=call, token=token)])
            assert done.returncode == -signal.SIGABRT, (call, token)
            assert "Assertion" in done.stderr, (call, token)


def test_operators_refuse_wrong_inputs() -> None:
    weight, tokens, grad = draw(4, 8, dtype=torch.float32), draw_tokens(6, 4), draw(6, 8, dtype=torch.float32)

    def refuse(message: str, *arguments: Tensor) -> None:
        operator = OPS.embedding if len(arguments) == 2 else OPS.embedding_gradient_
        assert_refused(operator.default, arguments, message)

    refuse("weight must be bf16, fp16, fp32 or fp64, got int64", tokens, weight.long())
    refuse(r"weight must have two dims, got \[4\]", tokens, weight[:, 0].contiguous())
    refuse("weight must be contiguous", tokens, weight.t())
    refuse("tokens must be int64, got int32", tokens.int(), weight)
    long_rows = r"weight must have less than 2\^31 rows of less than 2\^30 elements, got \[0, 1073741824\]"
    refuse(long_rows, tokens, weight.new_empty(0, 1 << 30))
    refuse("tokens must be int64, got int32", weight, tokens.int(), grad)
    refuse(r"grad_weight must have two dims, got \[4\]", weight[:, 0].contiguous(), tokens, grad)
    refuse("grad_weight must be contiguous", weight.t(), tokens, grad)
    refuse(r"tokens must have one dim, got \[2, 3\]", weight, tokens.view(2, 3), grad)
    refuse(r"grad must have shape \[6, 8\], got \[5, 8\]", weight, tokens, grad[:5])
    refuse("grad must be contiguous", weight, tokens, grad.t().contiguous().t())
    refuse("grad must be bf16, fp16, fp32 or fp64, got int64", weight, tokens, grad.long())
    refuse("grad_weight must be float32, got float64", weight.double(), tokens, grad)
    refuse("grad_weight must be float32, got float16", weight.half(), tokens, grad.bfloat16())
    # No fake: on the meta device a copy of these would be contiguous.
    with pytest.raises(RuntimeError, match="tokens must be contiguous"):
        OPS.embedding(tokens.repeat(2)[::2], weight)
    with pytest.raises(RuntimeError, match="tokens must be contiguous"):
        OPS.embedding_gradient_(weight, with_gaps(tokens), grad)
