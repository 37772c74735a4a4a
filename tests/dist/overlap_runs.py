"""The same job with overlap on and off: several micro-batches a step, evaluations, a skipped step, a stop and a
restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_states_bitwise
from tests.helpers.training_case import CaseOrders, Poison, make_config
from tests.helpers.waiting import wait_until

STEPS, SKIPPED, STOPPED = 4, 1, 2
COMMON: Tables = {
    "train": {"precision": "fp32", "steps": STEPS},
    "evaluation": {"interval": 2, "num_samples": 4},
}


def assert_overlap_changes_no_bit(jobs: TrainingJobs, tables: Sequence[Tables], directory: Path | None) -> None:
    """Train with overlap on and off, and compare. With a directory, both runs stop halfway and resume."""
    runs = {overlap: _train(jobs, tables, overlap, directory) for overlap in (True, False)}

    for on, off in zip(runs[True], runs[False], strict=True):
        assert on.losses == off.losses
        assert repr(on.grad_norms) == repr(off.grad_norms), "one of them is nan"
        assert [evaluation.loss for evaluation in on.ranks[0].evaluations] == [
            evaluation.loss for evaluation in off.ranks[0].evaluations
        ]
        assert_states_bitwise(on.final_state, off.final_state)
    reports = [report for run in runs[True] for report in run.steps]
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert [report.step - 1 for report in reports if report.is_skipped] == [SKIPPED]
    evaluated = [evaluation.step for run in runs[True] for evaluation in run.ranks[0].evaluations]
    assert evaluated == [2, 4], evaluated


def _train(jobs: TrainingJobs, tables: Sequence[Tables], overlap: bool, directory: Path | None) -> list[Run]:
    place: Tables = {} if directory is None else {"job": {"run_directory": str(directory / str(overlap))}}
    config = make_config(COMMON, *tables, {"parallel": {"overlap": overlap}}, place)
    poison = Poison(rank=0, steps=(SKIPPED,), parameter="embedding.word.weight")
    runs = [jobs.run(config, CaseOrders(stop_at=None if directory is None else (0, STOPPED), poison=poison))]
    if directory is not None:
        wait_until(lambda: not list(directory.glob("*/megatrain-arena*")), "no snapshot left in memory")
        runs.append(jobs.run(config))
    return runs
