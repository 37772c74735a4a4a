"""Replicas with unequal numbers of micro-batches compute what equal replicas compute on the same samples, in fp64.

TINY has 8 micro-batches a step: 7 replicas have 2, 1, 1, 1, 1, 1 and 1 of them, 3 replicas 3, 3 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_bitwise, assert_close, distance
from tests.helpers.mixed_data import write_mixture
from tests.helpers.training_case import make_config

OF_LOSSES, OF_WEIGHTS = 1e-13, 1e-12


def layout(dp_size: int, **options: object) -> Tables:
    """Return the tables of a layout in which micro-batches have the size of TINY's."""
    return {"parallel": {"bucket_size": 3000, "dp_size": dp_size, **options}}


@dataclass(frozen=True)
class Case:
    """A layout of unequal replicas, and its other differences from TINY. Gradients below `eps` have little effect.

    idle: the reported percentage of time in which replicas wait for the fullest one; not checked if empty.
    """

    layout: Tables
    changes: Tables = field(default_factory=dict)
    idle: str = ""


TWO_CHUNKS = {"pp_size": 2, "num_chunks": 2, "schedule": "interleaved"}
FIVE: Tables = {"batch": {"global_batch_size": 5}}
CASES = {
    "dp7": Case(layout(7), idle="42.9"),
    "dp3": Case(layout(3), idle="11.1"),
    "dp3-no-overlap": Case(layout(3, overlap=False)),
    "dp3-tp2": Case(layout(3, tp_size=2), {"model": {"dropout": 0.1}}),
    "dp3-two-chunks": Case(layout(3, **TWO_CHUNKS)),
    # An empty micro-batch in each step: the other replicas have a micro-batch between theirs and the reduction, or
    # reduce it.
    "dp3-two-chunks-empty": Case(layout(3, **TWO_CHUNKS), FIVE),
    "dp3-zero-bubble-empty": Case(layout(3, pp_size=2, schedule="zero_bubble"), FIVE),
    "dp5-zero2-empty": Case(layout(5, zero_stage=2), {"model": {"dropout": 0.1}}),
    "dp3-pp2-zero2-empty": Case(layout(3, pp_size=2, zero_stage=2), {"model": {"has_tied_head": True}}),
    "dp8-of-5-empty": Case(layout(8), FIVE | {"data": {"has_document_mask": True}}),
    "dp3-lamb-rampup": Case(
        layout(3),
        {
            "optimizer": {"name": "lamb", "eps": 1e-4},
            "batch": {"rampup_start": 4, "rampup_increment": 1, "rampup_samples": 12},
        },
    ),
}


def assert_same_numbers(run: Run, reference: Run) -> None:
    assert run.samples_by_step() == reference.samples_by_step()
    assert_close(run.losses, reference.losses, OF_LOSSES, "loss")
    assert_close(run.grad_norms, reference.grad_norms, OF_WEIGHTS, "gradient norm")
    wrong = {name: error for name, error in distance(run.final, reference.final).items() if not error <= OF_WEIGHTS}
    assert not wrong, f"final weights off by {wrong}"
    # Training moved the weights that were compared.
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow(kept=["dp3-two-chunks-empty"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_uneven_replicas_compute_as_one_does(case: Case, jobs: TrainingJobs, all_data: Tables) -> None:
    data = {"data": all_data["data"] | case.changes.get("data", {})}
    sizes = case.layout["parallel"]
    # as few layers as the layout has chunks, and at least two
    depth = {"num_layers": max(2, sizes.get("pp_size", 1) * sizes.get("num_chunks", 1))}
    changes = {name: table for name, table in case.changes.items() if name != "data"}
    changes["model"] = depth | changes.get("model", {})
    reference = jobs.remembered(make_config(data, changes))
    run = jobs.run(make_config(data, changes, case.layout))

    assert_bitwise(run.initial, reference.initial)
    assert_same_numbers(run, reference)
    assert run.evaluation.num_tokens == reference.evaluation.num_tokens
    assert_close([run.evaluation.loss], [reference.evaluation.loss], OF_LOSSES, "evaluation")
    notes = [note.partition("%")[0] for note in run.ranks[0].notes if "idle" in note]
    assert case.idle in ("", *notes)


@pytest.mark.slow
def test_uneven_replicas_report_the_losses_of_sources(jobs: TrainingJobs, tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path)
    reference = jobs.run(make_config(mixture))
    run = jobs.run(make_config(mixture, layout(3, zero_stage=2)))

    assert_same_numbers(run, reference)
    for found, expected in zip(run.steps, reference.steps, strict=True):
        assert [(one.name, one.num_tokens) for one in found.sources] == [
            (one.name, one.num_tokens) for one in expected.sources
        ]
        assert_close(
            [one.loss for one in found.sources], [one.loss for one in expected.sources], OF_WEIGHTS, "loss of a source"
        )
