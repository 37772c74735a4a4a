"""What the recorded spans of a real job say is hidden: with overlap off nothing is, with overlap on something is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_diagnostics.analysis.explain import explain_step
from megatrain_diagnostics.analysis.overlap import Overlap
from megatrain_diagnostics.analysis.step_windows import read_step_events
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.black_boxes import recording_in
from tests.helpers.recorded_events import recorded_events
from tests.helpers.training_case import make_config, on_layout

STEPS = (1, 2)
JOB: Tables = {"train": {"precision": "fp32", "steps": 4}, "model": {"hidden_size": 64}}
DATA_PARALLEL = {"grads-reduce-scatter", "params-all-gather"}


def explained(directory: Path) -> dict[str, list[Overlap]]:
    """Return the communication of some steps, by kind."""
    found: dict[str, list[Overlap]] = {}
    for step in STEPS:
        explanation = explain_step(read_step_events(recorded_events(directory), 0, step, step), step)
        assert explanation.is_full
        assert explanation.num_missing == 0
        assert not explanation.notes
        for one in explanation.overlaps:
            found.setdefault(one.operation, []).append(one)
            assert one.elsewhere_ns >= 0
    return found


@pytest.mark.parametrize("overlap", [True, False], ids=["on", "off"])
def test_chunks_of_data_parallelism_are_hidden_with_overlap_only(
    overlap: bool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    switch: Tables = {"parallel": {**on_layout(1, 1, 2, 4)["parallel"], "overlap": overlap}}
    jobs.run(make_config(train_data, JOB, on_layout(1, 1, 2, 4), switch, recording_in(tmp_path)))

    found = explained(tmp_path)

    assert found.keys() >= DATA_PARALLEL
    for kind in DATA_PARALLEL:
        assert all(one.total_ns > 0 for one in found[kind])
        if overlap:
            assert all(one.hidden_ns > 0 for one in found[kind]), kind
            assert not any(one.is_at_most for one in found[kind]), "lanes know when an exchange is over"
        else:
            assert [one.hidden_ns for one in found[kind]] == [0, 0], kind
            assert all(one.exposed_ns > 0.5 * one.total_ns for one in found[kind]), kind


def test_tensor_parallel_exchanges_that_are_awaited_at_once_hide_nothing_worth_mentioning(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    jobs.run(make_config(train_data, JOB, on_layout(2, 1, 1), recording_in(tmp_path)))

    found = explained(tmp_path)

    for kind in ("tp-all-gather", "tp-reduce-scatter"):
        for one in found[kind]:
            assert one.exposed_ns > 0.8 * one.total_ns
            assert one.hidden_ns + one.elsewhere_ns < 0.2 * one.total_ns
