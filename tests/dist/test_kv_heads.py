"""Fewer key-value heads than tensor-parallel ranks: neighbors share a head, and the results stay the same.

Of eight query heads each rank has its own. The holders of a key-value head add different terms to its gradient, so a
missing sum, or a value that is counted twice, changes the first step's norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_resume import HALF, STEPS, stop_and_resume
from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
    assert_states_bitwise,
    distance,
)
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
SHALLOW = {"num_layers": 2}
"""For layouts with at most two stages: each layer has its own key-value heads, so two layers test as much as four."""
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False}
CASES: dict[str, tuple[Tables, dict[str, Any], Tables]] = {
    # layout, changes of the layout, changes of the model and the rest
    "tp4-kv2-dp2-lamb-zero2": (
        on_layout(4, 1, 2),
        {"zero_stage": 2, "recompute": "selective"},
        {"model": {**SHALLOW, "num_kv_heads": 2}, "optimizer": {"name": "lamb"}},
    ),
    "tp4-kv2-dp2-muon-zero2": (
        on_layout(4, 1, 2),
        {"zero_stage": 2},
        {"model": {**SHALLOW, **LLAMA, "num_kv_heads": 2}, "optimizer": {"name": "muon"}},
    ),
    "tp2-kv1-pp2-dp2-chunks2-lamb": (
        on_layout(2, 2, 2, 2),
        {"recompute": "full", "offload_layers": 1},
        {"model": {"num_kv_heads": 1, "dropout": 0.1}, "optimizer": {"name": "lamb"}},
    ),
    "tp4-kv1-pp2-llama-untied-awaited": (
        on_layout(4, 2, 1),
        {"overlap": False},
        {"model": {**SHALLOW, **LLAMA, "num_kv_heads": 1, "has_tied_head": False}},
    ),
    "tp8-kv4-one-bucket": (on_layout(8, 1, 1), {"bucket_size": 10**6}, {"model": {**SHALLOW, "num_kv_heads": 4}}),
    "tp4-kv2-dp2-sequence-chunks-zero2-awaited": (
        on_layout(4, 1, 2),
        {"num_sequence_chunks": 2, "zero_stage": 2, "overlap": False},
        {"model": {**SHALLOW, **LLAMA, "num_kv_heads": 2}},
    ),
    "tp4-kv2-pp2-zero-bubble": (
        on_layout(4, 2, 1, schedule="zero_bubble"),
        {"bucket_size": 500},
        {"model": {**SHALLOW, "num_kv_heads": 2}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shared_kv_heads_give_the_numbers_of_one_process(
    case: tuple[Tables, dict[str, Any], Tables], jobs: TrainingJobs, all_data: Tables
) -> None:
    layout, options, changes = case
    reference = jobs.remembered(make_config(all_data, TWO_STEPS, changes))
    run = jobs.run(make_config(all_data, TWO_STEPS, changes, layout, {"parallel": options}))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")


@pytest.mark.slow
def test_overlap_with_shared_kv_heads_changes_no_bit(jobs: TrainingJobs, train_data: Tables) -> None:
    common: Tables = {**train_data, **TWO_STEPS, "model": {**SHALLOW, "num_kv_heads": 2}}
    on, off = (
        jobs.run(make_config(common, on_layout(4, 1, 2), {"parallel": {"zero_stage": 2, "overlap": overlap}}))
        for overlap in (True, False)
    )

    assert_bitwise(on.final, off.final)
    assert on.losses == off.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [((4, 1, 2, 1), (1, 1, 1, 1)), ((2, 2, 2, 1), (4, 1, 2, 1)), ((8, 1, 1, 1), (4, 2, 1, 1))],
    ids=["to fewer", "to more", "of more to more"],
)
def test_resume_with_other_holders_of_kv_heads(
    first: tuple[int, int, int, int],
    second: tuple[int, int, int, int],
    jobs: TrainingJobs,
    train_data: Tables,
    tmp_path: Path,
) -> None:
    common: Tables = {
        **train_data,
        "model": {**SHALLOW, "num_kv_heads": 2},
        "train": {"steps": STEPS},
        "optimizer": {"name": "lamb", "eps": 1e-4},
    }
    before, after = stop_and_resume(jobs, common, tmp_path, first, second)
    reference = jobs.remembered(make_config(common))

    assert_states_bitwise(after.initial_state, before.final_state)
    assert_bitwise(after.initial, before.final)
    assert_close(before.losses + after.losses, reference.losses, BOUND, "loss")
    assert_close(after.grad_norms, reference.grad_norms[HALF:], BOUND, "gradient norm after")
    assert max(distance(after.final, reference.final).values()) <= BOUND
