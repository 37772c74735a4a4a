"""The two passes of cross entropy, over a vocabulary in one or several parts, compared with torch's cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.ops import cross_entropy
from megatrain.ops.cross_entropy import (
    CROSS_ENTROPY_ALONE,
    LossTerms,
    local_statistics,
    logits_gradient_,
    summed_cross_entropy,
    token_losses,
)
from tests.helpers.kernels import UNDER_TEST, draw, on_device
from tests.helpers.operator_contract import assert_contract, assert_refused

T, PADDED = 9, 24
OPS = torch.ops.megatrain
TERMS = [
    CROSS_ENTROPY_ALONE,
    LossTerms(z_loss=0.01),
    LossTerms(label_smoothing=0.1),
    LossTerms(z_loss=0.3, label_smoothing=0.7),
]
BOTH = LossTerms(z_loss=0.01, label_smoothing=0.1)
all_terms = pytest.mark.parametrize("terms", TERMS, ids=["alone", "z_loss", "smoothing", "strong"])
some_terms = pytest.mark.parametrize("terms", [TERMS[0], BOTH], ids=["alone", "both"])

# (rows, columns, real columns): less than a pack; packs and a tail; what a block reads in one iteration, and in
# several; more padding than a block has threads
SHAPES = [(1, 1, 1), (3, 7, 5), (T, PADDED, 21), (2, 123, 123), (2, 8191, 8190), (1, 9224, 9221), (2, 5128, 5120)]
SHAPES += [(2, 1000, 301)]


def draw_logits(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return draw(*shape, dtype=dtype, seed=seed, scale=4.0)


def draw_labels(vocab_size: int, num: int = T) -> Tensor:
    labels = torch.randint(0, vocab_size, (num,), generator=torch.Generator().manual_seed(5))
    labels[:2] = torch.tensor([0, vocab_size - 1])[:num]  # both ends of the vocabulary
    return on_device(labels)


def in_parts(
    logits: Tensor, labels: Tensor, vocab_size: int, num_parts: int, grad_T: Tensor, terms: LossTerms = TERMS[0]
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and the gradient of the logits, combined explicitly as ranks would."""
    width = logits.shape[1] // num_parts
    parts = [part.clone(memory_format=torch.contiguous_format) for part in logits.split(width, dim=1)]
    firsts = [number * width for number in range(num_parts)]
    found = torch.stack([
        local_statistics(part, labels, first, vocab_size, has_sum=terms.label_smoothing > 0.0)
        for part, first in zip(parts, firsts, strict=True)
    ])  # fmt: skip
    whole_KT = torch.cat([torch.logsumexp(found[:, :1], 0), found[:, 1:].sum(0)])
    grads = [
        logits_gradient_(part, labels, whole_KT[0].contiguous(), grad_T, first, vocab_size, terms)
        for part, first in zip(parts, firsts, strict=True)
    ]
    assert all(grad is part for grad, part in zip(grads, parts, strict=True)), "pass 2 works in place"
    return token_losses(whole_KT, labels, vocab_size, terms), torch.cat(grads, 1)


def by_torch(
    logits: Tensor, labels: Tensor, vocab_size: int, grad_T: Tensor, terms: LossTerms = TERMS[0]
) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    real = leaf[:, :vocab_size]
    loss_T = functional.cross_entropy(
        real, labels, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=terms.label_smoothing
    )
    if terms.z_loss:
        loss_T = loss_T + terms.z_loss * torch.logsumexp(real, -1).square() * (labels != IGNORED_LABEL)
    return loss_T.detach(), torch.autograd.grad(loss_T, leaf, grad_T.to(loss_T.dtype))[0]


def assert_all_close(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-12, case: object = ""
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, check_dtype=False, msg=lambda text: f"{case} {text}"
        )


@all_terms
def test_parts_combine_to_the_whole(terms: LossTerms) -> None:
    logits, grad_T = draw_logits(T, PADDED), draw(T, seed=2)
    for vocab_size in (PADDED, 21, 18, 13, 6, 1):
        labels = draw_labels(vocab_size)
        expected = by_torch(logits, labels, vocab_size, grad_T, terms)
        for num_parts in (1, 2, 4):
            case = f"vocabulary of {vocab_size} in {num_parts} parts"
            found = in_parts(logits, labels, vocab_size, num_parts, grad_T, terms)
            assert_all_close(found, expected, case=case)
            assert (found[1][:, vocab_size:] == 0).all(), case


@all_terms
def test_cross_entropy_of_rows_of_all_lengths(terms: LossTerms) -> None:
    for rows, columns, vocab_size in SHAPES:
        logits, labels, grad_T = draw_logits(rows, columns), draw_labels(vocab_size, rows), draw(rows, seed=2)
        found = in_parts(logits, labels, vocab_size, 1, grad_T, terms)
        expected = by_torch(logits, labels, vocab_size, grad_T, terms)
        assert_all_close(found, expected, case=(rows, columns, vocab_size))


def test_largest_logit_may_be_at_any_place() -> None:
    """Far above the others, so that values relative to another number overflow or are lost."""
    logits, labels, grad_T = draw_logits(34, 2051, dtype=torch.float32), draw_labels(2051, 34), draw(34, seed=2)
    places = on_device(torch.tensor([*range(0, 2048, 64), 2047, 2050]))  # of each warp, and in a tail
    logits.scatter_(1, places[:, None], 200.0)

    expected = by_torch(logits.double(), labels, 2051, grad_T)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        found = in_parts(logits.to(dtype), labels, 2051, 1, grad_T.to(dtype))
        assert_all_close(tuple(one.double() for one in found), expected, tolerance)


@some_terms
def test_ignored_labels_have_no_loss_and_no_gradient(terms: LossTerms) -> None:
    logits, labels, grad_T = draw_logits(T, PADDED), draw_labels(20), draw(T, seed=2)
    labels[[1, 4, 8]] = IGNORED_LABEL
    for num_parts in (1, 2, 4):
        loss, grad = in_parts(logits, labels, 20, num_parts, grad_T, terms)
        assert_all_close((loss, grad), by_torch(logits, labels, 20, grad_T, terms), case=f"{num_parts} parts")
        assert (loss[[1, 4, 8]] == 0).all(), num_parts
        assert (grad[[1, 4, 8]] == 0).all(), num_parts


def test_logits_of_ignored_tokens_have_no_effect() -> None:
    logits, labels = draw_logits(3, PADDED, dtype=torch.bfloat16), draw_labels(20, 3)
    logits[1], labels[1] = float("nan"), IGNORED_LABEL
    loss, grad = in_parts(logits, labels, 20, 1, on_device(torch.ones(3)), BOTH)

    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()
    assert (grad[1] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_is_reported(value: float) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = draw_logits(2, 123, dtype=dtype)
        logits[1, 120] = value
        loss = token_losses(local_statistics(logits, draw_labels(123, 2), 0, 123), draw_labels(123, 2), 123, TERMS[0])

        assert torch.isfinite(loss[0])
        assert not torch.isfinite(loss[1])


@some_terms
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_summed_loss_of_each_part_is_that_of_the_whole(num_parts: int, terms: LossTerms) -> None:
    logits, labels = draw_logits(T, PADDED), draw_labels(20)
    labels[[1, 4, 8]] = IGNORED_LABEL
    expected_loss, expected_grad = by_torch(logits, labels, 20, on_device(torch.full((T,), 0.5)), terms)
    whole = local_statistics(logits, labels, 0, 20, has_sum=terms.label_smoothing > 0.0)
    width, grads = PADDED // num_parts, []
    for number in range(num_parts):
        part = logits[:, number * width : (number + 1) * width].clone().requires_grad_()
        loss = summed_cross_entropy(
            # a product, because backward overwrites its input
            *(part * 1.0, labels, 20),
            first_column=number * width,
            combine=None if num_parts == 1 else lambda _: whole,
            terms=terms,
        )
        torch.testing.assert_close(loss.detach(), expected_loss.sum(), rtol=1e-12, atol=0)
        grads += torch.autograd.grad(0.5 * loss, part)

    torch.testing.assert_close(torch.cat(grads, 1), expected_grad, rtol=1e-12, atol=1e-12)


@all_terms
def test_gradients_are_the_slopes(terms: LossTerms) -> None:
    logits, labels = draw_logits(4, 9), on_device(torch.tensor([0, 6, IGNORED_LABEL, 3]))

    def loss_of(logits: Tensor) -> Tensor:
        return summed_cross_entropy(logits * 1.0, labels, 7, terms=terms)

    leaf = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(leaf), leaf)
    for row in range(4):
        for column in range(9):
            step = torch.zeros_like(logits)
            step[row, column] = 1e-5
            slope = (loss_of(logits + step) - loss_of(logits - step)) / 2e-5
            torch.testing.assert_close(found[row, column], slope, rtol=1e-7, atol=1e-8)


def test_logits_in_another_order_of_memory() -> None:
    logits, labels, ones_T = draw_logits(PADDED, T).t(), draw_labels(20), on_device(torch.ones(T))
    leaf = logits.detach().requires_grad_()
    loss = summed_cross_entropy(leaf * 1.0, labels, 20, terms=BOTH)
    (grad,) = torch.autograd.grad(loss, leaf)
    expected_loss, expected_grad = by_torch(logits, labels, 20, ones_T, BOTH)

    assert not (leaf * 1.0).is_contiguous()
    assert_all_close((loss.detach(), grad), (expected_loss.sum(), expected_grad))


def test_part_of_padding_only() -> None:
    logits, labels = draw_logits(T, 6), draw_labels(13)
    lse, target, total = local_statistics(logits, labels, 18, 13, has_sum=True)

    assert (lse == float("-inf")).all()
    assert (target == 0).all()
    assert (total == 0).all()
    assert not logits_gradient_(logits, labels, torch.zeros_like(lse), draw(T), 18, 13, BOTH).any()


def test_padding_has_no_effect_even_if_it_is_largest() -> None:
    for value in (1e6, float("nan")):
        logits = draw_logits(T, PADDED)
        logits[:, 20:] = value
        loss, grad = in_parts(logits, draw_labels(20), 20, 2, on_device(torch.ones(T).double()), BOTH)

        assert torch.isfinite(loss).all()
        assert (loss < 100).all()
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_logits_do_not_overflow(shift: float) -> None:
    logits, labels = draw_logits(T, PADDED, dtype=torch.float32) + shift, draw_labels(PADDED)
    grad_T = on_device(torch.ones(T))
    expected = by_torch(logits.double(), labels, PADDED, grad_T)

    for num_parts in (1, 4):
        loss, grad = in_parts(logits, labels, PADDED, num_parts, grad_T)
        torch.testing.assert_close(loss.double(), expected[0], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(grad.double(), expected[1], rtol=1e-3, atol=2e-3)


def test_logits_of_minus_infinity_are_probability_zero() -> None:
    logits, labels = draw_logits(T, PADDED), draw_labels(20)
    logits[:, 1:18] = float("-inf")  # whole packs of them, before the first number
    logits[:, 0] = 50.0
    labels[2:] = 0
    found = in_parts(logits, labels, 20, 2, draw(T, seed=2))

    assert_all_close(found, by_torch(logits, labels, 20, draw(T, seed=2)))
    assert (found[1][:, 1:18] == 0).all()


@some_terms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_loses_no_more_than_plain_torch(dtype: torch.dtype, terms: LossTerms) -> None:
    logits = draw_logits(T, 512, dtype=dtype)
    labels = draw_labels(500)
    grad_T = draw(T, seed=2, dtype=torch.float32) / T
    exact = by_torch(logits.double(), labels, 500, grad_T.double(), terms)
    plain = by_torch(logits, labels, 500, grad_T, terms)
    for num_parts in (1, 2, 4):
        found = in_parts(logits, labels, 500, num_parts, grad_T, terms)
        assert found[0].dtype == torch.float32
        assert found[1].dtype == dtype
        for mine, other, truth, times in zip(found, plain, exact, (2, 3), strict=True):
            tiny = 3e-7 * truth.abs().max().item()
            for norm in (torch.amax, torch.mean):
                mine_error, other_error = (norm((x.double() - truth).abs()).item() for x in (mine, other))
                assert mine_error <= times * other_error + tiny, (num_parts, norm)


def test_gradient_in_bf16_is_rounded_once() -> None:
    logits, labels, ones_T = draw_logits(T, 512, dtype=torch.bfloat16), draw_labels(500), on_device(torch.ones(T))
    exact = by_torch(logits.double(), labels, 500, ones_T.double(), BOTH)[1].to(torch.bfloat16)
    found = in_parts(logits, labels, 500, 1, ones_T, BOTH)[1]

    # Equal to the rounded result of fp64, except where fp32 arithmetic is on the other side of a tie.
    assert (found != exact).double().mean().item() < 2e-3


def test_going_backward_twice_is_refused() -> None:
    logits = draw_logits(T, PADDED).requires_grad_()
    loss = summed_cross_entropy(logits * 1.0, draw_labels(20), 20)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_blocks_of_tokens_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, grad_T = draw_logits(T, PADDED), draw_labels(20), draw(T, seed=2)
    whole = in_parts(logits, labels, 20, 2, grad_T, BOTH)
    for rows in (1, 2, 4, T):
        monkeypatch.setattr(cross_entropy, "LOSS_BLOCK_ELEMENTS", rows * PADDED // 2)
        parts = in_parts(logits, labels, 20, 2, grad_T, BOTH)

        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])


def test_no_second_tensor_of_the_logits_size_is_made() -> None:
    """The largest new tensor of both passes is a block of 2**20 elements, for any number of logits."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != storage:
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    num_tokens, vocab_size = 96, 1 << 16
    for dtype in (torch.float32, torch.bfloat16):
        logits = draw(1, 1).to(dtype).expand(num_tokens, vocab_size).contiguous()
        storage = logits.untyped_storage().data_ptr()
        labels, grad_T = on_device(torch.zeros(num_tokens, dtype=torch.int64)), on_device(torch.ones(num_tokens))
        with Watch():
            # for the references themselves: temporaries inside an operator are not visible from outside
            lse_T = cross_entropy._reference_statistics(logits, labels, 0, vocab_size, True)[0]
            cross_entropy._reference_gradient_(logits, labels, lse_T, grad_T, 0, vocab_size, 0.1, 0.1)

        assert largest <= 1 << 20


def test_kernels_need_no_memory_beside_the_logits() -> None:
    if UNDER_TEST.kind != "cuda":
        return  # only the allocator of a GPU knows
    logits = draw_logits(64, 1 << 16, dtype=torch.bfloat16).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (grad,) = torch.autograd.grad(summed_cross_entropy(logits, draw_labels(1 << 16, 64), 1 << 16, terms=BOTH), logits)

    assert grad.data_ptr() == logits.data_ptr()
    assert torch.cuda.max_memory_allocated() - before <= 0.1 * grad.numel() * grad.element_size()


@pytest.mark.slow(kept=["(9, 24, 21)-dtype0", "(9, 24, 21)-dtype3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16, 16), (4, 0, 16)], ids=str)
def test_operators_keep_the_contract(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, vocab_size = shape
    logits, labels = draw_logits(rows, columns, dtype=dtype), draw_labels(vocab_size, rows)
    labels[1:2] = IGNORED_LABEL
    statistics = local_statistics(logits, labels, 0, vocab_size)
    grad_T = draw(rows, dtype=statistics.dtype, seed=2)

    for has_sum in (False, True):
        assert_contract(OPS.cross_entropy_statistics.default, logits, labels, 0, vocab_size, has_sum)
    for terms in (TERMS[0], BOTH):
        assert_contract(
            OPS.cross_entropy_gradient_.default,
            *(logits, labels, statistics[0], grad_T, 0, vocab_size, terms.z_loss, terms.label_smoothing),
        )


def test_operators_refuse_wrong_inputs() -> None:
    logits, labels = draw_logits(4, 8, dtype=torch.bfloat16), draw_labels(8, 4)
    lse, grad = draw(4, dtype=torch.float32), draw(4, dtype=torch.float32)

    def refuse_statistics(message: str, *arguments: Tensor) -> None:
        assert_refused(OPS.cross_entropy_statistics.default, (*arguments, 0, 8, False), message)

    def refuse_gradient(message: str, *arguments: Tensor) -> None:
        assert_refused(OPS.cross_entropy_gradient_.default, (*arguments, 0, 8, 0.0, 0.0), message)

    refuse_statistics("logits must be bf16, fp16, fp32 or fp64, got int64", labels[:, None], labels)
    refuse_statistics(r"logits must have two dims, got \[4\]", logits[:, 0].contiguous(), labels)
    refuse_statistics(
        r"logits must have less than 2\^31 rows, got \[2147483648, 0\]", logits.new_empty(1 << 31, 0), labels
    )
    refuse_statistics("logits must be contiguous", draw_logits(8, 4).t(), labels)
    refuse_statistics("labels must be int64, got int32", logits, labels.int())
    refuse_statistics(r"labels must have shape \[4\], got \[3\]", logits, labels[:3])
    refuse_gradient("logits must be bf16, fp16, fp32 or fp64, got int64", labels[:, None], labels, lse, grad)
    refuse_gradient(r"logits must have two dims, got \[4\]", logits[:, 0].contiguous(), labels, lse, grad)
    refuse_gradient("logits must be contiguous", draw_logits(8, 4).t(), labels, lse.double(), grad.double())
    refuse_gradient("labels must be int64, got int32", logits, labels.int(), lse, grad)
    refuse_gradient("lse must be float32, got bfloat16", logits, labels, lse.bfloat16(), grad)
    refuse_gradient(r"lse must have shape \[4\], got \[4, 1\]", logits, labels, lse[:, None], grad)
    refuse_gradient("grad must be float64, got float32", logits.double(), labels, lse.double(), grad)
    # No fake: on the meta device a copy of these would be contiguous.
    with pytest.raises(RuntimeError, match="labels must be contiguous"):
        OPS.cross_entropy_statistics(logits, labels.repeat(2)[::2], 0, 8, False)
    with pytest.raises(RuntimeError, match="grad must be contiguous"):
        OPS.cross_entropy_gradient_(logits, labels, lse, grad[:1].expand(4), 0, 8, 0.0, 0.0)
