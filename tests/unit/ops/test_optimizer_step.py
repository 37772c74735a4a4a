"""AdamW and LAMB on flat shards, compared with torch.optim and the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.ops.optimizer_step import lamb_apply_
from tests.helpers.kernels import UNDER_TEST, draw
from tests.helpers.operator_contract import assert_contract, assert_identical, assert_refused, misaligned, with_gaps
from tests.helpers.optimizer_shards import (
    LAYOUTS,
    OPS,
    Shard,
    decay_of_elements,
    lamb_update,
    make_shard,
    start_shard,
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
@pytest.mark.parametrize("layout", ["123", "8191", "packs"])
def test_twenty_steps_of_adamw_are_torchs(layout: str, dtype: torch.dtype, tolerance: float) -> None:
    shard = start_shard(LAYOUTS[layout], dtype)
    weights = [shard.master[run].clone().requires_grad_() for run in shard.runs]
    groups = [
        {"params": [weight], "weight_decay": 0.1 * decays}
        for weight, decays in zip(weights, shard.is_decayed.tolist(), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    for step in range(20):
        grad = draw(shard.master.numel(), dtype=dtype, seed=100 + step)
        for weight, run in zip(weights, shard.runs, strict=True):
            weight.grad = grad[run] * 0.25
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()
        shard.adamw(grad, lr=0.1 / (step + 1), num_updates=step + 1, gradient_scale=0.25)

    for weight, run in zip(weights, shard.runs, strict=True):
        torch.testing.assert_close(shard.master[run], weight.detach(), rtol=tolerance, atol=tolerance)


def test_fp32_moments_are_rounded_where_torch_rounds_on_the_cpu() -> None:
    shard = start_shard([4096, 0], torch.float32)
    weight = shard.master.cpu().clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95), fused=False, foreach=False)
    for step in range(3):
        grad = draw(4096, dtype=torch.float32, seed=100 + step)
        weight.grad = grad.cpu()
        optimizer.step()
        shard.adamw(grad, num_updates=step + 1, gradient_scale=1.0)

    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(shard, name).cpu(), optimizer.state[weight][name]), name


@pytest.mark.parametrize("beta1", [0.9, 0.2])
def test_adamw_is_its_formula(beta1: float) -> None:
    for lengths in LAYOUTS.values():
        shard = make_shard(lengths)
        before, grad = shard.copy(), draw(sum(lengths), seed=7)
        shard.adamw(grad, weight_decay=0.5, beta1=beta1, eps=1e-3)

        scaled = grad * 0.7
        exp_avg = beta1 * before.exp_avg + (1 - beta1) * scaled
        exp_avg_sq = 0.95 * before.exp_avg_sq + 0.05 * scaled**2
        denominator = (exp_avg_sq / (1 - 0.95**3)).sqrt() + 1e-3
        kept = 1 - 0.1 * 0.5 * decay_of_elements(shard)
        expected = before.master * kept - 0.1 * exp_avg / (1 - beta1**3) / denominator
        for found, truth in zip(shard.tensors, (expected, exp_avg, exp_avg_sq), strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-13, atol=1e-13)


def test_without_memory_the_first_moment_is_the_gradient() -> None:
    shard = make_shard(LAYOUTS["packs"], torch.float32)
    grad = draw(shard.master.numel(), dtype=torch.float32, seed=7)
    shard.adamw(grad, beta1=0.0, gradient_scale=1.0)

    assert torch.equal(shard.exp_avg, grad)


@pytest.mark.parametrize("update", [Shard.adamw, lamb_update], ids=["adamw", "lamb"])
def test_published_weights_are_the_rounded_masters(update: Callable[[Shard, Tensor], Any]) -> None:
    for layout, lengths in LAYOUTS.items():
        grad = draw(sum(lengths), dtype=torch.float32, seed=7)
        plain, published = make_shard(lengths, torch.float32), make_shard(lengths, torch.float32, is_published=True)
        update(plain, grad.clone())
        update(published, grad.clone())
        assert published.published is not None
        assert torch.equal(published.published, published.master.bfloat16()), layout
        assert_identical(published.tensors[:3], plain.tensors)


@pytest.mark.parametrize("layout", ["123", "packs"])
def test_a_gradient_in_bf16_is_that_gradient_in_fp32(layout: str) -> None:
    grad = draw(sum(LAYOUTS[layout]), dtype=torch.bfloat16, seed=7)
    narrow, wide = (make_shard(LAYOUTS[layout], torch.float32, is_published=True) for _ in range(2))
    narrow.adamw(grad)
    wide.adamw(grad.float())

    assert_identical(narrow.tensors, wide.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuts_and_addresses_do_not_change_a_bit(dtype: torch.dtype) -> None:
    whole = make_shard(LAYOUTS["packs"], dtype)
    grad = draw(whole.master.numel(), dtype=dtype, seed=7)
    cut, moved = whole.copy(), whole.copy()
    whole.adamw(grad)
    for start, stop in ((0, 128), (128, 8192 + 128), (8192 + 128, grad.numel())):
        cut.part(start, stop).adamw(grad[start:stop])
    moved = Shard(*map(misaligned, moved.tensors), moved.run_borders, moved.is_decayed)
    moved.adamw(misaligned(grad))

    assert_identical(cut.tensors, whole.tensors)
    assert_identical(moved.tensors, whole.tensors)


def test_lamb_is_bitwise_independent_of_cuts_and_addresses() -> None:
    whole = make_shard(LAYOUTS["packs"], torch.float32)
    grad = draw(whole.master.numel(), dtype=torch.float32, seed=7)
    cut, moved, moved_grad = whole.copy(), whole.copy(), misaligned(grad)
    cut_grad = grad.clone()
    whole.lamb_direction(grad)
    for start, stop in ((0, 128), (128, 8192 + 128), (8192 + 128, grad.numel())):
        cut.part(start, stop).lamb_direction(cut_grad[start:stop])
    moved = Shard(*map(misaligned, moved.tensors), moved.run_borders, moved.is_decayed)
    moved.lamb_direction(moved_grad)

    assert_identical([*cut.tensors, cut_grad], [*whole.tensors, grad])
    assert_identical([*moved.tensors, moved_grad], [*whole.tensors, grad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_optimizer_step_with_a_tensor_at_an_odd_address(dtype: torch.dtype) -> None:
    shard = make_shard([40, 20, 4], dtype, is_published=dtype == torch.float32)
    grad, ratios = draw(64, dtype=dtype, seed=7), draw(2, seed=9).exp()
    state, table = [shard.master, shard.exp_avg, shard.exp_avg_sq], [shard.run_borders, shard.is_decayed]
    for operator, tensors, rest in (
        (OPS.adamw_, [grad, *state, shard.published], [*table, 0.1, *SCALARS]),
        (OPS.lamb_direction_, [grad, *state], [*table, *SCALARS]),
        (OPS.lamb_apply_, [grad, shard.master, shard.published], [shard.run_borders, ratios, 0.1]),
    ):
        results = []
        for odd in range(-1, len(tensors)):
            copies = [
                tensor if tensor is None else misaligned(tensor) if number == odd else tensor.clone()
                for number, tensor in enumerate(tensors)
            ]
            operator(*copies, *rest)
            results.append([copy for copy in copies if copy is not None])
        for result in results[1:]:
            assert_identical(result, results[0])


def test_an_element_that_is_not_finite_stays_alone() -> None:
    shard = make_shard(LAYOUTS["packs"], torch.float32)
    grad = draw(shard.master.numel(), dtype=torch.float32, seed=7)
    grad[12289] = torch.nan
    shard.adamw(grad)

    for tensor in shard.tensors:
        assert tensor.isnan().nonzero().flatten().tolist() == [12289]


@pytest.mark.slow(kept=["123-dtype0-1e-13", "packs-dtype0-1e-13", "packs-dtype1-1e-05", "short-dtype1-1e-05"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lamb_is_its_formula(layout: str, dtype: torch.dtype, tolerance: float) -> None:
    shard = make_shard(LAYOUTS[layout], dtype, is_published=dtype == torch.float32)
    before, grad = shard.copy(), draw(sum(LAYOUTS[layout]), dtype=dtype, seed=7)
    scaled = 0.7 * grad.double()
    exp_avg = 0.9 * before.exp_avg.double() + 0.1 * scaled
    exp_avg_sq = 0.95 * before.exp_avg_sq.double() + 0.05 * scaled**2
    expected = (exp_avg / (1 - 0.9**3)) / ((exp_avg_sq / (1 - 0.95**3)).sqrt() + 1e-8)
    expected += 0.1 * decay_of_elements(shard) * before.master.double()
    sums = shard.lamb_direction(grad)

    for found, truth in ((grad, expected), (shard.exp_avg, exp_avg), (shard.exp_avg_sq, exp_avg_sq)):
        torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)
    assert sums.dtype == torch.float64
    assert sums.shape == (len(shard.runs), 2)
    for of_run, run in zip(sums.tolist(), shard.runs, strict=True):
        # of the rounded numbers, all of whose digits fit in fp32
        exact = [one[run].double().square().sum().item() for one in (before.master, grad)]
        assert of_run == pytest.approx(exact, rel=1e-13)

    ratios = draw(len(shard.runs), seed=9).exp()
    moved = before.master.double()
    for run, ratio in zip(shard.runs, ratios.tolist(), strict=True):
        moved[run] -= 0.05 * ratio * grad[run].double()
    padding = slice(int(shard.run_borders[-1]), None)
    moved[padding] -= 0.05 * grad[padding].double()
    lamb_apply_(grad, shard.master, shard.published, shard.run_borders, ratios, lr=0.05)
    torch.testing.assert_close(shard.master.double(), moved, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_squares_of_a_run_of_more_tiles_than_a_block_has_threads() -> None:
    shard = make_shard([5, 8192 * 300, 0], torch.float32)
    grad = draw(shard.master.numel(), dtype=torch.float32, seed=7)
    sums = shard.lamb_direction(grad)

    for of_run, run in zip(sums.tolist(), shard.runs, strict=True):
        assert of_run == pytest.approx(
            [one[run].double().square().sum().item() for one in (shard.master, grad)], rel=1e-13
        )


def plain_lamb(weights: list[Tensor], grads: list[list[Tensor]], decayed: list[bool], lr: float) -> list[Tensor]:
    """Algorithm 2 of arXiv:1904.00962 for whole parameters, with a trust ratio for decayed ones only."""
    weights = [weight.clone() for weight in weights]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for number, step in enumerate(grads, start=1):
        for index, grad in enumerate(step):
            first[index] = 0.9 * first[index] + 0.1 * grad
            second[index] = 0.95 * second[index] + 0.05 * grad**2
            update = (first[index] / (1 - 0.9**number)) / ((second[index] / (1 - 0.95**number)).sqrt() + 1e-8)
            ratio: Tensor | float = 1.0
            if decayed[index]:
                update = update + 0.1 * weights[index]
                ratio = weights[index].norm() / update.norm()
            weights[index] = weights[index] - lr * ratio * update
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("layout", ["123", "packs"])
def test_six_steps_of_lamb_are_the_papers(layout: str, dtype: torch.dtype, tolerance: float) -> None:
    shard = start_shard(LAYOUTS[layout], dtype)
    numbers = [number for number, run in enumerate(shard.runs) if run.start < run.stop]
    runs, decayed = [shard.runs[number] for number in numbers], shard.is_decayed.tolist()
    grads = [draw(shard.master.numel(), dtype=dtype, seed=100 + step) for step in range(6)]
    expected = plain_lamb(
        [shard.master[run] for run in runs],
        [[grad[run] for run in runs] for grad in grads],
        [decayed[number] for number in numbers],
        0.01,
    )
    for number, grad in enumerate(grads, start=1):
        weight, update = shard.lamb_direction(grad, num_updates=number, gradient_scale=1.0).sqrt().unbind(1)
        ratios = torch.where(shard.is_decayed & (update > 0), weight / update, torch.ones_like(weight))
        lamb_apply_(grad, shard.master, None, shard.run_borders, ratios, lr=0.01)

    for run, truth in zip(runs, expected, strict=True):
        torch.testing.assert_close(shard.master[run], truth, rtol=tolerance, atol=tolerance)


def test_autograd_notices_the_in_place_changes() -> None:
    shard = make_shard([4, 0], torch.float32, is_published=True)
    weight = torch.nn.Parameter(shard.published)
    x = draw(4, dtype=torch.bfloat16).requires_grad_()
    loss = (x * weight).sum()
    shard.adamw(draw(4, dtype=torch.float32))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SCALARS = (0.9, 0.95, 1e-8, 0.1, 0.3, 0.2, 0.7)


@pytest.mark.slow(kept=["packs-dtype0", "packs-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "lengths", [*LAYOUTS.values(), [0, 0], [0], [5]], ids=[*LAYOUTS, "empty", "nothing", "padding"]
)
def test_optimizer_operators_keep_the_contract(lengths: list[int], dtype: torch.dtype) -> None:
    shard = make_shard(lengths, dtype, is_published=dtype == torch.float32)
    grad = draw(sum(lengths), dtype=dtype, seed=7)
    state, table = (shard.master, shard.exp_avg, shard.exp_avg_sq), (shard.run_borders, shard.is_decayed)
    ratios = draw(len(shard.runs), seed=9).exp()

    assert_contract(OPS.adamw_.default, grad, *state, shard.published, *table, 0.1, *SCALARS)
    assert_contract(OPS.adamw_.default, grad, *state, None, *table, 0.1, *SCALARS)
    assert_contract(OPS.lamb_direction_.default, grad, *state, *table, *SCALARS)
    assert_contract(OPS.lamb_apply_.default, grad, shard.master, shard.published, shard.run_borders, ratios, 0.1)
    if dtype == torch.float32:
        assert_contract(OPS.adamw_.default, grad.bfloat16(), *state, shard.published, *table, 0.1, *SCALARS)


def test_adamw_refuses_wrong_inputs() -> None:
    shard = make_shard([3, 5, 0], torch.float32, is_published=True)
    names = ("grad", "master", "exp_avg", "exp_avg_sq", "published", "run_borders", "is_decayed")
    state = (shard.master, shard.exp_avg, shard.exp_avg_sq, shard.published)
    good = dict(zip(names, (draw(8, dtype=torch.float32), *state, shard.run_borders, shard.is_decayed), strict=True))

    def refuse(message: str, **changes: Any) -> None:
        assert_refused(OPS.adamw_.default, (*(good | changes).values(), 0.1, *SCALARS), message)

    refuse("master must be float32 or float64, got bfloat16", master=shard.master.bfloat16())
    refuse(r"master must have one dim, got \[2, 4\]", master=shard.master.view(2, 4))
    refuse("grad must be float32, got float16", grad=good["grad"].half())
    refuse(r"grad must have the shape of master, \[8\], got \[7\]", grad=good["grad"][:7])
    refuse("exp_avg must be float32, got float64", exp_avg=shard.exp_avg.double())
    refuse(r"exp_avg_sq must have the shape of master, \[8\], got \[4\]", exp_avg_sq=shard.exp_avg_sq[:4])
    refuse("published must be bfloat16, got float16", published=shard.master.half())
    refuse(r"published must have the shape of master, \[8\], got \[4, 2\]", published=state[3].view(4, 2))
    refuse("run_borders must be int64, got int32", run_borders=shard.run_borders.int())
    refuse(r"run_borders must have shape \[runs \+ 1\], got \[0\]", run_borders=shard.run_borders[:0])
    refuse("is_decayed must be bool, got float32", is_decayed=shard.is_decayed.float())
    refuse(r"is_decayed must have shape \[2\], got \[1\]", is_decayed=shard.is_decayed[:1])
    wide = {name: good[name].double() for name in names[:4]}
    refuse("master must be float32 where weights are published, got float64", **wide)
    refuse("grad must be float64, got bfloat16", **(wide | {"grad": good["grad"].bfloat16()}))


def test_a_shard_with_gaps_is_refused() -> None:
    shard = make_shard([3, 5, 0], torch.float32, is_published=True)
    state = (shard.master, shard.exp_avg, shard.exp_avg_sq, shard.published)
    good = [draw(8, dtype=torch.float32), *state, shard.run_borders, shard.is_decayed]
    names = ("grad", "master", "exp_avg", "exp_avg_sq", "published", "run_borders", "is_decayed")
    for number, name in enumerate(names):
        arguments = [with_gaps(one) if index == number else one for index, one in enumerate(good)]
        with pytest.raises(RuntimeError, match=f"{name} must be contiguous"):
            OPS.adamw_.default(*arguments, 0.1, *SCALARS)


def test_lamb_refuses_wrong_inputs() -> None:
    shard = make_shard([3, 5, 0], torch.float32, is_published=True)
    grad, ratios = draw(8, dtype=torch.float32), torch.ones(2, dtype=torch.float64, device=UNDER_TEST.device)
    state, table = (shard.master, shard.exp_avg, shard.exp_avg_sq), (shard.run_borders, shard.is_decayed)
    direction, apply = OPS.lamb_direction_.default, OPS.lamb_apply_.default

    for operator, good, scalars in (
        (direction, (grad, *state, *table), SCALARS),
        (apply, (grad, shard.master, shard.published, table[0], ratios), (0.1,)),
    ):
        for gap in range(len(good)):
            arguments = [with_gaps(one) if number == gap else one for number, one in enumerate(good)]
            with pytest.raises(RuntimeError, match="must be contiguous"):
                operator(*arguments, *scalars)

    assert_refused(direction, (grad.bfloat16(), *state, *table, *SCALARS), "grad must be float32, got bfloat16")
    for wrong, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
        changed = [one.half() if number == wrong else one for number, one in enumerate(state)]
        message = f"{name} must be float32.*, got float16"
        assert_refused(direction, (grad, *changed, *table, *SCALARS), message)
    assert_refused(
        apply, (grad, shard.master, None, table[0].int(), ratios, 0.1), "run_borders must be int64, got int32"
    )
    assert_refused(
        direction,
        (grad, *state, table[0], table[1][:1], *SCALARS),
        r"is_decayed must have shape \[2\], got \[1\]",
    )
    assert_refused(
        apply,
        (grad[:4], shard.master, None, table[0], ratios, 0.1),
        r"direction must have the shape of master, \[8\], got \[4\]",
    )
    assert_refused(apply, (grad, shard.master, grad, table[0], ratios, 0.1), "published must be bfloat16, got float32")
    assert_refused(
        apply, (grad, shard.master, None, table[0], ratios.float(), 0.1), "ratios must be float64, got float32"
    )
    assert_refused(
        apply, (grad, shard.master, None, table[0], ratios[:1], 0.1), r"ratios must have shape \[2\], got \[1\]"
    )
