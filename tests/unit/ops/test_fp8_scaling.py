"""Delayed scales: the history that they use, and the values that they reject."""

from __future__ import annotations

import pytest
import torch

from megatrain.ops.fp8_scaling import DelayedScaling
from megatrain.ops.quantization import E4M3, E5M2
from tests.helpers.kernels import UNDER_TEST, draw, on_device


def scaling(history_len: int = 3) -> DelayedScaling:
    return DelayedScaling([E4M3, E5M2], history_len, UNDER_TEST.device)


def step(scales: DelayedScaling, *magnitudes: float) -> None:
    """Let each slot record numbers up to its magnitude, in two micro-batches, and end the step."""
    for number, magnitude in enumerate(magnitudes):
        for part in (0.5, 1.0):
            scales.collect(number, on_device(torch.tensor([0.1, magnitude * part])))
    scales.advance()


def test_the_first_step_scales_by_the_tensor_itself() -> None:
    x = draw(16, 16, dtype=torch.bfloat16)

    assert scaling().slot(0).scale(x, E4M3)[0].item() == pytest.approx(448 / x.abs().max().item())


def test_scales_look_back_history_len_steps_and_no_further() -> None:
    x, scales = draw(16, 16, dtype=torch.bfloat16), scaling(3)
    expected = []
    for magnitude in (2.0, 8.0, 1.0, 1.0, 4.0):
        step(scales, magnitude, 10 * magnitude)
        expected.append([scales.slot(0).scale(x, E4M3).tolist(), scales.slot(1).scale(x, E5M2)[0].item()])

    largest = [2.0, 8.0, 8.0, 8.0, 4.0]
    for (of_first, of_second), one in zip(expected, largest, strict=True):
        assert of_first == pytest.approx([448 / one, one / 448])
        assert of_second == pytest.approx(57344 / (10 * one))


def test_magnitudes_that_are_not_finite_are_ignored() -> None:
    x, scales = draw(16, 16, dtype=torch.bfloat16), scaling(2)
    step(scales, 2.0, 2.0)
    for bad in (float("inf"), float("nan")):
        step(scales, bad, 2.0)
        assert scales.slot(0).scale(x, E4M3)[0].item() == pytest.approx(448 / 2.0)
    assert scales.history_PN.isfinite().all()


def test_a_slot_that_saw_nothing_keeps_its_scale() -> None:
    x, scales = draw(16, 16, dtype=torch.bfloat16), scaling(2)
    step(scales, 2.0, 4.0)
    for _ in range(3):
        step(scales, 3.0)
    assert scales.slot(1).scale(x, E5M2)[0].item() == pytest.approx(57344 / 4.0)


def test_scales_come_back_from_a_history_that_was_loaded() -> None:
    x, scales, other = draw(16, 16, dtype=torch.bfloat16), scaling(), scaling()
    step(scales, 2.0, 4.0)
    other.history_PN.copy_(scales.history_PN)
    other.refresh()

    for number, dtype in ((0, E4M3), (1, E5M2)):
        assert torch.equal(other.slot(number).scale(x, dtype), scales.slot(number).scale(x, dtype))


def test_small_magnitudes_have_a_finite_scale() -> None:
    x, scales = draw(16, 16, dtype=torch.bfloat16), scaling()
    for number in range(2):
        scales.collect(number, on_device(torch.tensor([1e-37])))
    scales.advance()
    scale, inverse = scales.slot(0).scale(x, E4M3).tolist()

    assert scale == 2.0**126
    assert inverse == 2.0**-126
