"""Readings of an invented job of two hosts with two ranks each."""

from __future__ import annotations

from megatrain_diagnostics.metrics.readings import HostReading, JobReading, ProducerReading, RankReading
from megatrain_job.jobs.health import Reason, ReasonCode, health_of

JOB = "demo"
NOW_S = 1_800_000_000.0


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
