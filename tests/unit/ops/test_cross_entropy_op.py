"""The two passes of cross entropy, over a vocabulary in one or several parts, against torch's cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops import cross_entropy
from megatrain.ops.cross_entropy import IGNORED_LABEL, local_statistics, logits_gradient_, summed_cross_entropy

T, PADDED = 9, 24


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def labels_below(vocab_size: int) -> Tensor:
    labels = torch.randint(0, vocab_size, (T,), generator=torch.Generator().manual_seed(5))
    labels[:2] = torch.tensor([0, vocab_size - 1])  # both ends of the vocabulary
    return labels


def in_parts(logits: Tensor, labels: Tensor, vocab_size: int, num_parts: int, grad_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and the gradient of the logits, combined by hand as ranks would."""
    width = logits.shape[1] // num_parts
    parts = [part.clone() for part in logits.split(width, dim=1)]
    firsts = [number * width for number in range(num_parts)]
    pairs = [local_statistics(part, labels, first, vocab_size) for part, first in zip(parts, firsts, strict=True)]
    lse_T = torch.logsumexp(torch.stack([lse for lse, _ in pairs]), 0)
    target_T = torch.stack([target for _, target in pairs]).sum(0)
    is_counted_T = labels != IGNORED_LABEL
    grads = [
        logits_gradient_(part, labels, lse_T, grad_T * is_counted_T, first)
        for part, first in zip(parts, firsts, strict=True)
    ]
    assert all(grad is part for grad, part in zip(grads, parts, strict=True)), "pass 2 works in place"
    return (lse_T - target_T) * is_counted_T, torch.cat(grads, 1)


def by_torch(logits: Tensor, labels: Tensor, vocab_size: int, grad_T: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss_T = functional.cross_entropy(leaf[:, :vocab_size], labels, ignore_index=IGNORED_LABEL, reduction="none")
    return loss_T.detach(), torch.autograd.grad(loss_T, leaf, grad_T.to(loss_T.dtype))[0]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [PADDED, 21, 18, 13, 6, 1])
def test_parts_combine_to_the_whole(vocab_size: int, num_parts: int) -> None:
    logits, labels, grad_T = draw(T, PADDED), labels_below(vocab_size), draw(T, seed=2)
    expected_loss, expected_grad = by_torch(logits, labels, vocab_size, grad_T)
    loss, grad = in_parts(logits, labels, vocab_size, num_parts, grad_T)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert (grad[:, vocab_size:] == 0).all()


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_ignored_labels_count_for_nothing(num_parts: int) -> None:
    logits, labels, grad_T = draw(T, PADDED), labels_below(20), draw(T, seed=2)
    labels[[1, 4, 8]] = IGNORED_LABEL
    expected_loss, expected_grad = by_torch(logits, labels, 20, grad_T)
    loss, grad = in_parts(logits, labels, 20, num_parts, grad_T)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert (grad[[1, 4, 8]] == 0).all()


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_summed_loss_of_each_part_is_that_of_the_whole(num_parts: int) -> None:
    logits, labels = draw(T, PADDED), labels_below(20)
    labels[[1, 4, 8]] = IGNORED_LABEL
    expected_loss, expected_grad = by_torch(logits, labels, 20, torch.ones(T, dtype=torch.float64))
    whole = local_statistics(logits.clone(), labels, 0, 20)
    width, grads = PADDED // num_parts, []
    for number in range(num_parts):
        part = logits[:, number * width : (number + 1) * width].clone().requires_grad_()
        loss = summed_cross_entropy(
            # a product, because backward overwrites what it is given
            *(part * 1.0, labels, 20),
            first_column=number * width,
            combine=None if num_parts == 1 else lambda *_: whole,
        )
        torch.testing.assert_close(loss.detach(), expected_loss.sum(), rtol=1e-12, atol=0)
        grads += torch.autograd.grad(loss, part)

    torch.testing.assert_close(torch.cat(grads, 1), expected_grad, rtol=1e-12, atol=1e-12)


def test_part_of_padding_only() -> None:
    logits = draw(T, 6)
    lse, target = local_statistics(logits, labels_below(13), 18, 13)

    assert (lse == float("-inf")).all()
    assert (target == 0).all()
    assert not logits_gradient_(logits, labels_below(13), torch.zeros(T, dtype=torch.float64), draw(T), 18).any()


def test_padding_has_no_say_even_where_it_is_largest() -> None:
    logits = draw(T, PADDED)
    logits[:, 20:] = 1e6

    loss, grad = in_parts(logits, labels_below(20), 20, 2, torch.ones(T, dtype=torch.float64))
    assert torch.isfinite(loss).all()
    assert (loss < 100).all()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_logits_do_not_overflow(shift: float) -> None:
    logits, labels = draw(T, PADDED, dtype=torch.float32) + shift, labels_below(PADDED)
    grad_T = torch.ones(T)
    expected_loss, expected_grad = by_torch(logits.double(), labels, PADDED, grad_T)

    for num_parts in (1, 4):
        loss, grad = in_parts(logits, labels, PADDED, num_parts, grad_T)
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_loses_no_more_than_plain_torch(dtype: torch.dtype, num_parts: int) -> None:
    logits = draw(T, 512, dtype=dtype)
    labels = torch.randint(0, 500, (T,), generator=torch.Generator().manual_seed(1))
    grad_T = (draw(T, seed=2) / T).to(torch.float32)
    exact_loss, exact_grad = by_torch(logits.double(), labels, 500, grad_T.double())
    plain_loss, plain_grad = by_torch(logits, labels, 500, grad_T)
    loss, grad = in_parts(logits, labels, 500, num_parts, grad_T)

    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    for found, plain, exact, times in ((loss, plain_loss, exact_loss, 2), (grad, plain_grad, exact_grad, 3)):
        tiny = 3e-7 * exact.abs().max().item()
        bound = times * (plain.double() - exact).abs().max().item() + tiny
        assert (found.double() - exact).abs().max().item() <= bound


def test_blocks_of_tokens_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, grad_T = draw(T, PADDED), labels_below(20), draw(T, seed=2)
    whole = in_parts(logits, labels, 20, 2, grad_T)
    for rows in (1, 2, 4, T):
        monkeypatch.setattr(cross_entropy, "_rows", lambda _, rows=rows: rows)
        parts = in_parts(logits, labels, 20, 2, grad_T)

        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])


def test_no_second_tensor_of_the_logits_size_is_made() -> None:
    """The largest new tensor of both passes is a block of 2**20 elements, however many logits there are."""
    from torch.utils._python_dispatch import TorchDispatchMode

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
        labels, grad_T = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
        with Watch():
            lse_T, _ = local_statistics(logits, labels, 0, vocab_size)
            logits_gradient_(logits, labels, lse_T, grad_T, 0)

        assert largest <= 1 << 20
