"""The recorded spans of a real job show overlapped communication with overlap on, and none with overlap off."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import distributed as dist

from megatrain.comm.exchange import Exchange, ExchangeRunner
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.training.observers.overlap_watch import LEFT_OUT_STEPS, WATCHED_STEPS
from megatrain_diagnostics.analysis.explain import explain_step
from megatrain_diagnostics.analysis.overlap import Overlap
from megatrain_diagnostics.analysis.step_windows import read_step_events
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.black_boxes import recording_in
from tests.helpers.memory_events import recorded_events
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import CaseOrders, RankRecord, make_config, on_layout, train_on_rank

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
        for overlap in explanation.overlaps:
            found.setdefault(overlap.operation, []).append(overlap)
            assert overlap.elsewhere_ns >= 0
    return found


@pytest.mark.parametrize("overlap", [True, False], ids=["on", "off"])
def test_data_parallel_collectives_overlap_only_where_configured(
    overlap: bool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    switch: Tables = {"parallel": {**on_layout(1, 1, 2, 4)["parallel"], "overlap": overlap}}
    jobs.run(make_config(train_data, JOB, on_layout(1, 1, 2, 4), switch, recording_in(tmp_path)))

    found = explained(tmp_path)

    assert found.keys() >= DATA_PARALLEL
    for kind in DATA_PARALLEL:
        assert all(one.total_ns > 0 for one in found[kind])
        if overlap:
            assert all(one.overlapped_ns > 0 for one in found[kind]), kind
            assert not any(one.is_at_most for one in found[kind]), "lanes know when an exchange is over"
        else:
            assert [one.overlapped_ns for one in found[kind]] == [0, 0], kind
            assert all(one.exposed_ns > 0.5 * one.total_ns for one in found[kind]), kind


@pytest.mark.slow
def test_tensor_parallel_collectives_awaited_at_once_are_exposed(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    jobs.run(make_config(train_data, JOB, on_layout(2, 1, 1), recording_in(tmp_path)))

    found = explained(tmp_path)

    for kind in ("tp-all-gather", "tp-reduce-scatter"):
        for one in found[kind]:
            assert one.exposed_ns > 0.8 * one.total_ns
            assert one.overlapped_ns + one.elsewhere_ns < 0.2 * one.total_ns


def test_no_receive_of_a_pipeline_is_overlapped_with_overlap_off(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    layout = on_layout(1, 2, 1)
    off: Tables = {"parallel": {**layout["parallel"], "overlap": False}}
    jobs.run(make_config(train_data, JOB, layout, off, recording_in(tmp_path)))

    found = explained(tmp_path)

    for kind in ("forward-recv", "backward-recv"):
        assert [one.overlapped_ns for one in found[kind]] == [0, 0], kind
        assert all(one.exposed_ns > 0 for one in found[kind]), kind


def train_with_long_reductions(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    """Run as a worker of a job whose reductions of gradients take a while."""
    finish = ExchangeRunner.finish

    def finish_late(runner: ExchangeRunner, exchange: Exchange, work: dist.Work, token: int) -> None:
        if exchange.operation is Operation.GRADS_REDUCE_SCATTER:
            threading.Event().wait(0.1)  # as long as a larger exchange would take
        finish(runner, exchange, work, token)

    with patch.object(ExchangeRunner, "finish", finish_late):
        return train_on_rank(context, config, orders)


@pytest.mark.slow
def test_job_without_overlapped_reductions_warns_once(jobs: TrainingJobs, train_data: Tables) -> None:
    long: Tables = {"train": {"steps": LEFT_OUT_STEPS + WATCHED_STEPS + 3}, "parallel": {"bucket_size": 10**6}}
    run = jobs.run(make_config(train_data, on_layout(1, 1, 2), long), worker=train_with_long_reductions)

    for record in run.ranks:  # here every rank has a reporter
        (text,) = [note for note in record.notes if note.startswith("warning: parallel.overlap=true")]
        assert "grads-reduce-scatter: waited for" in text
