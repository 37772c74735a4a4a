"""Metrics of a job, computed from rows: of training, of GPUs and links, and of checkpoints that could not be stored."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.host_records import HostSaves
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Values, select
from megatrain_diagnostics.metrics.device_metrics import MAX_GPUS, MAX_LINKS
from megatrain_diagnostics.metrics.job_records import SaveFailures
from megatrain_diagnostics.metrics.readings import DevicesReading, JobReading
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics
from megatrain_job.devices.gpu_readings import DriverReading
from megatrain_job.jobs.etcd_job import EtcdPoll
from tests.helpers.drawn_spans import Drawing
from tests.helpers.launched_job import make_snapshot, make_status
from tests.helpers.metric_readings import DEVICES, GPU, LINK, host_families
from tests.helpers.synthetic_steps import SyntheticJob, step_values


def reading_of(*values: tuple[StepValue, float], step_us: int | None = 500_000) -> JobReading:
    """Return the reading after one step of rank 0 with these values."""
    drawing = Drawing()
    for kind, value in ((StepValue.LOSS, 2.5), *values):
        drawing.value(kind, 0, value, step=7)
    if step_us is not None:
        drawing.total(Op.STEP, 0, step_us, step=7)
    metrics = TrainingMetrics()
    for table in drawing.tables().values():
        metrics.consume(table)
    return metrics.reading("my", "1.0")


def test_mfu_needs_work_time_and_peak() -> None:
    work, peak, tokens = (StepValue.MODEL_FLOPS, 2e14), (StepValue.PEAK_FLOPS, 1e15), (StepValue.TOKENS, 4096.0)
    reading = reading_of(work, peak, tokens)

    assert (reading.step, reading.loss, reading.tokens, reading.step_sum_s) == (7, 2.5, 4096, 0.5)
    assert reading.mfu == pytest.approx(0.4)
    assert reading_of(work).mfu is None
    assert reading_of(peak).mfu is None
    assert reading_of(work, peak, step_us=None).mfu is None


def reading(metrics: TrainingMetrics) -> JobReading:
    return metrics.reading("demo", "1")


def worth(step: int, **others: float) -> Values:
    named = {StepValue[name.upper()]: value for name, value in others.items()}
    return step_values(1, step, {StepValue.LOSS: 3.0, StepValue.GRAD_NORM: 1.0, **named})


def test_steps_are_counted_once_whichever_rank_reports_them() -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=4))
    for step in range(5):
        totals, _ = job.step(step)
        for rank in range(4):
            metrics.consume(select(totals, totals.rank == rank))
        metrics.consume(worth(step, tokens=10.0))
    found = reading(metrics)
    assert (found.step, found.loss, found.tokens) == (4, 3.0, 50)
    assert sum(found.step_buckets) == 5


def test_step_that_a_rank_invents_is_ignored() -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=4))
    metrics.consume(job.ranks())
    totals, _ = job.step(6)
    metrics.consume(totals)
    made_up, _ = job.step(5000)
    metrics.consume(select(made_up, (made_up.operation == Op.STEP.number) & (made_up.rank == 0)))
    metrics.consume(worth(5000))
    assert reading(metrics).step is None
    totals, _ = job.step(7)
    metrics.consume(totals)
    metrics.consume(worth(7))
    assert reading(metrics).step == 7
    assert sum(reading(metrics).step_buckets) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -5.0])
def test_invalid_tokens_and_flops_are_not_counted(bad: float) -> None:
    metrics, job = TrainingMetrics(), SyntheticJob(Layout(dp_size=2))
    totals, _ = job.step(1)
    metrics.consume(totals)
    metrics.consume(worth(1, tokens=bad, model_flops=bad, peak_flops=bad))
    assert reading(metrics).mfu is None
    metrics.consume(worth(2, tokens=8.0, model_flops=1e9, peak_flops=1e12))
    found = reading(metrics)
    assert (found.step, found.tokens) == (2, 8)
    assert found.mfu is not None


def values(name: str, devices: DevicesReading = DEVICES) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric by their labels, without those of job and host."""
    found = host_families(devices=devices)[name].samples
    return {tuple(value for key, value in one.labels.items() if key not in ("job_name", "host")): one.value
            for one in found}  # fmt: skip


def test_device_values_are_exposed_in_base_units() -> None:
    assert values("megatrain_gpu_sm_clock_hertz") == {("3",): 1.05e9}
    assert values("megatrain_gpu_temperature_celsius") == {("3",): 91.0}
    assert values("megatrain_gpu_power_watts") == {("3",): 412.5}
    assert values("megatrain_gpu_reset_pending") == {("3",): 1.0}
    assert values("megatrain_gpu_lost") == {("3",): 0.0, ("4",): 1.0}
    assert values("megatrain_gpu_info") == {("3", "H100", "GPU-c"): 1.0, ("4", "", ""): 1.0}
    assert values("megatrain_gpu_ecc_errors") == {("3", "corrected"): 7.0, ("3", "uncorrected"): 2.0}
    assert values("megatrain_gpu_pcie_replays") == {("3",): 4.0}
    assert values("megatrain_link_speed_bits_per_second") == {("mlx5_0:1",): 4e11}
    assert values("megatrain_link_errors") == {("rx-errors", "mlx5_0:1"): 5.0, ("symbol-errors", "mlx5_0:1"): 6.0}
    assert values("megatrain_gpu_xids") == {("3", "hardware"): 3.0, ("3", "program"): 5.0}
    held = {key for key, value in values("megatrain_gpu_throttled").items() if value}
    assert held == {("3", "power-cap"), ("3", "hardware-thermal-slowdown")}


def test_number_of_device_series_is_bounded() -> None:
    gpus = tuple(replace(GPU, index=number, uuid=f"GPU-{number}") for number in range(500))
    links = tuple(replace(LINK, name=f"eth{number}") for number in range(500))
    xids = {(f"GPU-{gpu}", number): 1 for gpu in range(500) for number in range(1, 200)}
    sample = HostSample(1.0, 0.0, DriverReading("nvml", gpus=gpus), links)
    found = host_families(devices=DevicesReading(sample, xids=xids))
    assert len(found["megatrain_gpu_info"].samples) == MAX_GPUS
    assert len(found["megatrain_link_up"].samples) == MAX_LINKS
    assert len(found["megatrain_gpu_xids"].samples) <= 4 * (MAX_GPUS + 1)
    assert sum(len(family.samples) for family in found.values()) < 1000


def test_unanswered_driver_is_exposed() -> None:
    assert values("megatrain_telemetry_up") == {(): 1.0}
    assert values("megatrain_telemetry_up", replace(DEVICES, problem="no answer")) == {(): 0.0}
    assert values("megatrain_telemetry_up", DevicesReading()) == {(): 0.0}
    assert not [name for name in host_families() if "gpu_" in name or "telemetry" in name]


def poll(failed: tuple[int | None, ...]) -> EtcdPoll:
    """Return a poll of hosts with these numbers of consecutive failures.

    None: a host without a report about saves. No hosts: nothing was read.
    """
    statuses = {
        f"host-{number}": make_status(number, saves=None if count is None else HostSaves(num_failed=count))
        for number, count in enumerate(failed, start=1)
    }
    return EtcdPoll(make_snapshot(statuses=statuses)) if failed else EtcdPoll()


def test_each_failure_is_counted_once() -> None:
    cases: tuple[tuple[tuple[tuple[int | None, ...], ...], int], ...] = (
        (((), (0, 0), (0, 0)), 0),
        (((0,), (1,), (1,), (2,)), 2),
        (((0, 0), (1, 0), (1, 1), (2, 1)), 2),
        (((0, 0), (1, 1)), 1),
        (((2,), (0,), (1,)), 1),
        (((3,), (1,)), 1),
        (((None,), (1,), (None,)), 1),
        (((1,), (), (1,)), 1),
    )
    for polls, count in cases:
        failures = SaveFailures()
        for before, now in pairwise(map(poll, polls)):
            failures.follow(before, now)
        assert failures.count == count, polls
