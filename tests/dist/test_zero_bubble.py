"""The zero-bubble schedule gives the bits of 1f1b and the numbers of one process, and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.schedule import ActionKind, build_schedule
from tests.dist.test_resume import HALF, STEPS, stop_and_resume
from tests.dist.training_jobs import (
    SHALLOW,
    TWO_STEPS,
    Run,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
    assert_states_bitwise,
)
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans
from tests.helpers.training_case import CaseOrders, Poison, make_config, on_layout

BOUND = 1e-10
OPERATIONS = {
    ActionKind.FORWARD: Operation.FORWARD_COMPUTE,
    ActionKind.DGRAD: Operation.BACKWARD_COMPUTE,
    ActionKind.WGRAD: Operation.BACKWARD_WEIGHT_COMPUTE,
}
ZERO_BUBBLE: Tables = {"parallel": {"schedule": "zero_bubble"}}

CASES: dict[str, tuple[dict[str, Any], Tables]] = {
    # two layers a stage, where the other cases have one; twice as many micro-batches as stages
    "pp2-selective": (
        on_layout(1, 2, 1),
        {"model": {"num_layers": 4}, "parallel": {"recompute": "selective"}, "batch": {"micro_batch_size": 2}},
    ),
    "pp4": (on_layout(1, 4, 1), {}),
    "tp2-pp2-parallel-block-selective": (
        on_layout(2, 2, 1),
        {
            "model": {"block": "parallel", "dropout": 0.1},
            "parallel": {"recompute": "selective"},
            "batch": {"micro_batch_size": 1},
        },
    ),
    "tp2-pp2-swiglu-full-untied": (
        on_layout(2, 2, 1),
        {"model": {"mlp": "swiglu", "has_tied_head": False}, "parallel": {"recompute": "full"}},
    ),
    "tp2-pp2-qk-norm-qkv-bias-selective": (
        on_layout(2, 2, 1),
        {
            "model": {
                "qk_norm": "head",
                "has_bias": False,
                "has_qkv_bias": True,
                "num_kv_heads": 1,
                "positions": "rope",
            },
            "parallel": {"recompute": "selective"},
        },
    ),
    "tp2-pp2-capped-windows-two-norms": (
        on_layout(2, 2, 1),
        {
            "model": {
                "norm": "rmsnorm_zero_centered",
                "branch_norm": "both",
                "mlp": "geglu",
                "has_scaled_embedding": True,
                "window_size": 5,
                "full_attention_every": 2,
                "attention_softcap": 1.5,
                "head_softcap": 2.0,
                "qk_norm": "all_heads",
                "num_kv_heads": 1,
            },
        },
    ),
    "pp2-one-input-selective": (
        on_layout(1, 2, 1),
        {
            "model": {"block": "parallel_two_norms", "mlp": "gelu_exact", "positions": "rope", "rope_fraction": 0.5},
            "parallel": {"recompute": "selective"},
        },
    ),
    "tp2-pp2-muon-swiglu": (
        on_layout(2, 2, 1),
        {"model": {"mlp": "swiglu", "num_kv_heads": 2}, "optimizer": {"name": "muon"}},
    ),
    "dp2-pp2-offload-no-overlap": (
        on_layout(1, 2, 2),
        {"model": {"num_layers": 4}, "parallel": {"offload_layers": 1, "overlap": False}},
    ),
}


def merged(*several: Tables) -> Tables:
    """Return tables in which the later tables add keys to the same sections of the earlier ones."""
    found: Tables = {}
    for tables in several:
        for section, keys in tables.items():
            found[section] = found.get(section, {}) | keys
    return found


def assert_same_bits(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    assert [record.digests for record in found.ranks] == [record.digests for record in expected.ranks]
    assert_states_bitwise(found.final_state, expected.final_state)


@pytest.mark.slow(kept=["pp4"])
@pytest.mark.parametrize("case", CASES)
def test_zero_bubble_has_the_bits_of_1f1b(case: str, jobs: TrainingJobs, all_data: Tables) -> None:
    layout, options = CASES[case]
    # an evaluation after every step: its forwards come between deferred wgrads and the next ones
    every: Tables = {"evaluation": {"interval": 1, "num_samples": 3}}
    shallow: Tables = {"model": {"num_layers": layout["parallel"]["pp_size"]}}
    common = merged(all_data, TWO_STEPS, every, shallow, options)
    run = jobs.run(make_config(merged(layout, common, ZERO_BUBBLE)))
    same = jobs.run(make_config(merged(layout, common)))
    alone: Tables = {section: keys for section, keys in options.items() if section in ("model", "optimizer")}
    reference = jobs.remembered(make_config(merged(all_data, TWO_STEPS, every, shallow, alone)))

    assert_same_bits(run, same)
    assert [evaluation.loss for evaluation in run.ranks[0].evaluations] == [
        evaluation.loss for evaluation in same.ranks[0].evaluations
    ]
    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")


@pytest.mark.slow
def test_zero_bubble_in_fp8_has_the_bits_of_1f1b(jobs: TrainingJobs, train_data: Tables) -> None:
    fp8 = {"recipe": "tensorwise", "scaling": "delayed", "history_len": 2}
    common: Tables = {"train": {"precision": "bf16", "steps": 3}, "fp8": fp8, "model": {"num_layers": 2}}
    tables = merged(train_data, common, on_layout(1, 2, 1))

    assert_same_bits(jobs.run(make_config(merged(tables, ZERO_BUBBLE))), jobs.run(make_config(tables)))


@pytest.mark.slow
def test_skipped_step_leaves_no_deferred_wgrad(jobs: TrainingJobs, train_data: Tables) -> None:
    tables = merged(train_data, SHALLOW, on_layout(1, 2, 2), {"train": {"steps": 4}})
    # The wgrads of this weight are deferred: the sum is corrupted before the first of them is added.
    poison = Poison(rank=3, steps=(2,), parameter="blocks.1.mlp_branch.mlp.up.weight", microbatch=1)
    run, same = (
        jobs.run(make_config(merged(tables, schedule)), CaseOrders(poison=poison)) for schedule in (ZERO_BUBBLE, {})
    )

    for record in run.ranks:
        assert [report.is_skipped for report in record.steps] == [step == 2 for step in range(4)]
    assert [record.digests for record in run.ranks] == [record.digests for record in same.ranks]
    assert_states_bitwise(run.final_state, same.final_state)


@pytest.mark.slow
def test_checkpoint_of_1f1b_is_resumed_by_zero_bubble(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    sizes = (1, 2, 2, 1)
    common = {**train_data, **SHALLOW, "train": {"steps": STEPS, "precision": "fp64"}}
    changes = merged(on_layout(*sizes), ZERO_BUBBLE)
    before, after = stop_and_resume(jobs, common, tmp_path, sizes, sizes, changes)
    straight = jobs.run(make_config(common, on_layout(*sizes)))

    assert_states_bitwise(after.initial_state, before.final_state)
    assert after.losses == straight.losses[HALF:]
    assert_states_bitwise(after.final_state, straight.final_state)


@pytest.mark.slow
def test_dgrads_and_wgrads_are_separate_spans(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    four: Tables = {"batch": {"micro_batch_size": 2}}
    jobs.run(make_config(merged(train_data, SHALLOW, on_layout(1, 2, 1), four, ZERO_BUBBLE, recording_in(tmp_path))))
    schedule = build_schedule("zero_bubble", 2, 1, 4)
    for box in boxes_by_rank(tmp_path).values():
        actions = schedule.stages[box.identity.coordinate["pp"]]
        expected = [(OPERATIONS[action.kind], action.microbatch) for action in actions if action.kind in OPERATIONS]
        found = sorted(
            (span for operation in OPERATIONS.values() for span in spans(box, operation) if span.step == 1),
            key=lambda span: span.start_ns,
        )
        assert [(Operation(span.operation), span.microbatch) for span in found] == expected
