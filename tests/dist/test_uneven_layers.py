"""Every split of the layers over stages and chunks computes the same, and resumes from the same files.

The model has four layers. A chunk with an end of the model may have no layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_resume import HALF, STEPS, stop_and_resume
from tests.dist.training_jobs import (
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_parity,
    assert_states_bitwise,
)
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
COUNTED = {"counts_embedding_as_layer": True, "counts_head_as_layer": True}
CASES: dict[str, tuple[Tables, dict[str, Any], list[set[int]], Tables]] = {
    # layout, split, the layers of each stage, other changes
    "pp2-dp2-3+1": (on_layout(1, 2, 2), {"layers_per_chunk": [3, 1]}, [{0, 1, 2}, {3}], {}),
    "tp2-pp2-chunks2-ends-alone": (
        on_layout(2, 2, 1, 2),
        {"layers_per_chunk": [0, 3, 1, 0], "recompute": "full", "offload_layers": 2},
        [{3}, {0, 1, 2}],
        {},
    ),
    "pp4-zero-bubble-ends-alone-untied": (
        on_layout(1, 4, 1, schedule="zero_bubble"),
        {"layers_per_chunk": [0, 1, 3, 0]},
        [set(), {0}, {1, 2, 3}, set()],
        {"model": {"has_tied_head": False}},
    ),
    "pp2-dp2-chunks3-ends-counted-zero2-lamb": (
        on_layout(1, 2, 2, 3),
        {**COUNTED, "zero_stage": 2},
        [{1, 3}, {0, 2}],
        {"optimizer": {"name": "lamb"}},
    ),
    "chunks2-on-one-stage-1+3": (on_layout(1, 1, 2, 2), {"layers_per_chunk": [1, 3]}, [{0, 1, 2, 3}], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_uneven_layers_give_the_numbers_of_one_process(
    case: tuple[Tables, dict[str, Any], list[set[int]], Tables], jobs: TrainingJobs, all_data: Tables
) -> None:
    layout, split, expected, changes = case
    reference = jobs.remembered(make_config(all_data, changes))
    run = jobs.run(make_config(all_data, changes, layout, {"parallel": split}))

    for record in run.ranks:
        names = [piece.name.split(".") for piece in record.initial]
        assert {int(name[1]) for name in names if name[0] == "blocks"} == expected[record.coordinate["pp"]]
    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    assert_close([run.evaluation.loss], [reference.evaluation.loss], BOUND, "evaluation")
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [([], [3, 1]), ([1, 3], [])], ids=["even-to-3+1", "1+3-to-even"])
def test_resume_with_another_split_of_layers(
    first: list[int], second: list[int], jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    common: Tables = {**train_data, "train": {"steps": STEPS}, "parallel": {"layers_per_chunk": first}}
    sizes = (1, 2, 1, 1)
    before, after = stop_and_resume(jobs, common, tmp_path, sizes, sizes, {"parallel": {"layers_per_chunk": second}})
    reference = jobs.remembered(make_config(train_data, {"train": {"steps": STEPS}}))

    assert_states_bitwise(after.initial_state, before.final_state)
    assert_bitwise(after.initial, before.final)
    assert_close(after.losses, reference.losses[HALF:], BOUND, "loss after")
    assert_close(after.grad_norms, reference.grad_norms[HALF:], BOUND, "gradient norm after")
