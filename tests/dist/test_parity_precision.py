"""fp32 and bf16 in parallel compared with one process in the same precision."""

from __future__ import annotations

import pytest

from tests.dist.training_jobs import (
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
    assert_states_bitwise,
    distance,
)
from tests.helpers.training_case import make_config, on_layout

LAYOUTS = {
    "tp4-sequence-chunks2": on_layout(4, 1, 1),
    "pp2-chunks2": on_layout(1, 2, 1, 2),
    "dp4": on_layout(1, 1, 4),
    "tp2-pp2-dp2-chunks2": on_layout(2, 2, 2, 2),
}
LAYOUTS["tp4-sequence-chunks2"]["parallel"]["num_sequence_chunks"] = 2

OPTIMIZER: Tables = {"optimizer": {"lr": 1e-3, "eps": 1e-4}}
"""Adam divides a gradient by its own size plus eps. If the exact gradient is zero (the keys' bias: softmax ignores a
constant), the computed one is rounding, 1e-9 in fp32, and eps = 1e-8 would amplify it to a step of a tenth of lr: the
bias would differ by 3e-5. With eps = 1e-4 rounding moves a weight by at most lr * 1e-9 / 1e-4 = 1e-8 a step."""

FP32_BOUND = 1e-5
"""Measured: loss 4e-8, gradient norm 1e-7, weights 6e-7. fp32's rounding is 6e-8."""

BF16_ROUNDING = 2.0**-8
BF16_LOSS_BOUND = BF16_ROUNDING / 32
BF16_BIAS_BOUND = BF16_ROUNDING * 8
"""Gradients are computed in bf16, with 8 bits, and their errors are independent. The error of the gradient norm is less
than one rounding (measured 1.1e-3, of 3.9e-3); that of the loss, a mean over 128 tokens, is much less (measured 2.6e-5;
bf16 and fp64 in one process differ by 5e-5). The change of a weight in 5 steps is smaller than the weight (measured
1.8e-3); a bias starts at zero and consists of its changes only, with few terms to average over (measured 1.9e-2)."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp4-sequence-chunks2", "tp2-pp2-dp2-chunks2"])
def test_fp32_gives_the_numbers_of_one_process(layout: str, jobs: TrainingJobs, train_data: Tables) -> None:
    common: Tables = {"train": {"precision": "fp32"}}
    reference = jobs.remembered(make_config(train_data, common, OPTIMIZER))
    run = jobs.run(make_config(train_data, common, OPTIMIZER, LAYOUTS[layout]))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, FP32_BOUND)


@pytest.mark.slow(kept=["pp2-chunks2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_stays_within_its_rounding_of_one_process(layout: str, jobs: TrainingJobs, train_data: Tables) -> None:
    common: Tables = {"train": {"precision": "bf16"}}
    reference = jobs.remembered(make_config(train_data, common, OPTIMIZER))
    run = jobs.run(make_config(train_data, common, OPTIMIZER, LAYOUTS[layout]))

    assert_bitwise(run.initial, reference.initial)
    assert_states_bitwise(run.initial_state, reference.initial_state)
    assert_close(run.losses, reference.losses, BF16_LOSS_BOUND, "loss")
    assert_close(run.grad_norms, reference.grad_norms, BF16_ROUNDING, "gradient norm")
    errors = distance(run.final_state["master"], reference.final_state["master"])
    wrong = {
        name: error
        for name, error in errors.items()
        if not error <= (BF16_BIAS_BOUND if name.endswith("bias") else BF16_ROUNDING)
    }
    assert not wrong, f"final master weights off by {wrong}"
    for name, master in run.final_state["master"].items():
        assert master.dtype == "float32"
        # The model's weights are the master weights, rounded once.
        assert (abs(run.final[name] - master) <= BF16_ROUNDING * abs(master)).all(), name
        if not name.endswith(("bias", "norm.weight")):
            assert (run.final[name] != master).any(), f"{name} was rounded before the optimizer kept it"
