"""Readings of an invented job of two hosts with two ranks each, and the metrics that show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.metrics.exposition import HostCollector, JobCollector, registry_of
from megatrain_diagnostics.metrics.readings import DevicesReading, HostReading, JobReading, ProducerReading, RankReading
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_job.devices.links import LinkReading
from megatrain_job.jobs.health import Reason, ReasonCode, health_of

JOB = "demo"
NOW_S = 1_800_000_000.0
GPU = GpuReading(
    3, "GPU-c", "H100", uncorrected_errors=2, corrected_errors=7, temperature_c=91.0, sm_clock_mhz=1050.0,
    throttle_reasons=0x44, power_w=412.5, memory_used_bytes=10, utilization=0.5, corrected_rows=1, uncorrected_rows=0,
    pcie_replays=4, is_row_remap_pending=True,
)  # fmt: skip
LINK = LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, 2, rx_errors=5, symbol_errors=6)
DEVICES = DevicesReading(
    HostSample(1.0, 0.0, DriverReading("nvml", gpus=(GPU, GpuReading(4, error="GPU is lost"))), (LINK,)),
    xids={("GPU-c", 79): 1, ("GPU-c", 119): 2, ("GPU-c", 31): 5},
)


def families_of(collector: Collector) -> dict[str, Metric]:
    """Return what a scrape gets, by the names of the metrics."""
    text = generate_latest(registry_of(collector)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def host_families(**changes: Any) -> dict[str, Metric]:
    """Return the metrics of a host whose reading has these fields."""
    return families_of(HostCollector(lambda: replace(make_host_reading(), **changes)))


def job_families(**changes: Any) -> dict[str, Metric]:
    """Return the metrics of a job whose reading has these fields."""
    return families_of(JobCollector(lambda: replace(make_job_reading(), **changes)))


def make_rank_reading(rank: int, now_s: float = NOW_S) -> RankReading:
    return RankReading(
        rank=rank, place={"pp": 0, "dp": rank // 2, "tp": rank % 2}, gpu_uuid=f"GPU-{rank}", step=120,
        last_step_unix_s=now_s - 1.0, last_sign_unix_s=now_s - 0.5, step_s=0.5, compute_s=0.4, collective_s=0.08,
        data_wait_s=0.001, gc_s=0.0, label_tokens=8000.0, documents=20.0, squared_lengths=4e6, replaced_samples=3.0,
        steps_ready=2.0, read_s=0.02, read_bytes=64000.0, loader_starts=1.0, picture_wait_s=0.015,
        producers=(ProducerReading(24.0, 0.01 * (rank + 1), 3.0, 0.0), ProducerReading(8.0, 0.02, float(rank), 1.0)),
        cache_bytes={"hit": 9_000_000, "fetched": 3_000_000, "evicted": 1_000_000}, cache_not_stored=2,
    )  # fmt: skip


def make_host_reading(number: int = 1, now_s: float = NOW_S) -> HostReading:
    ranks = tuple(make_rank_reading(rank, now_s) for rank in (2 * number - 2, 2 * number - 1))
    return HostReading(
        job=JOB, host=f"host-{number}", version="0.1.0", ranks=ranks, median_step_s=0.5,
        rows_sent={"totals": 3200, "spans": 900}, rows_dropped={"spool-full": 0, "overwritten": 2}, spool_bytes=0,
        is_connected=True, clock_offset_s=0.0002, clock_error_s=0.0001,
    )  # fmt: skip


def make_job_reading(now_s: float = NOW_S) -> JobReading:
    return JobReading(
        job=JOB, version="0.1.0", step=120, loss=2.5, grad_norm=1.25, tokens=1_000_000, last_step_unix_s=now_s - 1.0,
        mfu=0.45, step_buckets=(0, 0, 1, 90, 20, 9, 0, 0, 0, 0, 0, 0, 1), step_sum_s=80.0, rounds=2,
        incidents={"failure": 1}, effective_time_ratio=0.97, saved_step=110, saved_unix_s=now_s - 60.0,
        straggler_scores={"host-1": 0.4, "host-2": 5.0}, least_straggler_score=3.5,
        verdicts={("straggler", "compute", "high"): 1},
        health=health_of([Reason(ReasonCode.RECOVERING, "an incident")]),
        rows_stored={"totals": 6400}, rows_rejected={"future": 0}, connected_hosts=2, segment_bytes=1_000_000,
        rows_not_analyzed={"ended-round": 7}, batches={"new": 90, "repeated": 3}, bytes_received=5_000_000,
        failed_commits=2,
    )  # fmt: skip
