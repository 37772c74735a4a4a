"""Converts readings to Prometheus metrics; names and units follow Prometheus' rules (one prefix, base units, _total).

The number of label values is bounded: rank is a label only of the gauges of a rank and of `megatrain_rank_info`, which
other metrics are joined with (GPUs by gpu_uuid); step, round, process and error text are not labels. An unknown value
has no sample; NaN is exported only if the value itself is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from megatrain_diagnostics.metrics.device_metrics import device_metrics
from megatrain_diagnostics.metrics.families import counter, counts, gauge, single_gauges
from megatrain_diagnostics.metrics.producer_metrics import producer_metrics
from megatrain_diagnostics.metrics.readings import (
    MAX_SCORES,
    STEP_BUCKETS_S,
    HostReading,
    JobReading,
    RankReading,
)
from megatrain_job.jobs.health import HealthLevel

_RANK_GAUGES: tuple[tuple[str, str, Callable[[RankReading], float | None]], ...] = (
    ("megatrain_rank_step", "Steps that the rank has completed.", lambda rank: rank.step),
    ("megatrain_rank_last_step_timestamp_seconds", "When the rank completed its last step.",
     lambda rank: rank.last_step_unix_s),
    ("megatrain_rank_last_sign_timestamp_seconds", "When the rank last began or completed a step or entered a phase.",
     lambda rank: rank.last_sign_unix_s),
    ("megatrain_rank_step_duration_seconds", "Duration of the last step.", lambda rank: rank.step_s),
    ("megatrain_rank_compute_seconds", "Compute in the last step, from forward to optimizer.",
     lambda rank: rank.compute_s),
    ("megatrain_rank_communication_seconds",
     "Collectives, sends and receives in the last step, including the time they wait.", lambda rank: rank.collective_s),
    ("megatrain_rank_data_wait_seconds", "Time the last step waited for data.", lambda rank: rank.data_wait_s),
    ("megatrain_rank_gc_seconds", "Python's garbage collection in the last step.", lambda rank: rank.gc_s),
    ("megatrain_rank_label_tokens", "Tokens of the rank's samples in the last step that contribute to the loss.",
     lambda rank: rank.label_tokens),
    ("megatrain_rank_documents", "Documents of the rank's samples in the last step.", lambda rank: rank.documents),
    ("megatrain_rank_squared_lengths",
     "Sum of the squared lengths of the documents of the rank's samples in the last step: the cost of attention.",
     lambda rank: rank.squared_lengths),
    ("megatrain_rank_replaced_samples",
     "Samples of the rank that cannot be used and were replaced since its process began.",
     lambda rank: rank.replaced_samples),
    ("megatrain_rank_data_steps_ready",
     "Steps that the host's data loader had ready when the rank requested the last step; 0: the rank waited.",
     lambda rank: rank.steps_ready),
    ("megatrain_rank_data_read_seconds",
     "Reads of the host's data loader in the last step, of the first rank of each replica.", lambda rank: rank.read_s),
    ("megatrain_rank_data_read_bytes",
     "Bytes read by the host's data loader in the last step, of the first rank of each replica.",
     lambda rank: rank.read_bytes),
    ("megatrain_rank_data_loader_starts",
     "How often the host's data loader was started in this round, of the first rank of each replica.",
     lambda rank: rank.loader_starts),
    ("megatrain_rank_picture_wait_seconds",
     "Time that reads that ended in the last step waited for producers of pictures, of the ranks that record reads.",
     lambda rank: rank.picture_wait_s),
)  # fmt: skip


def _info(version: str) -> Metric:
    info = InfoMetricFamily("megatrain_build", "Version of megatrain.")
    info.add_metric([], {"version": version})
    return info


class HostCollector(Collector):
    """The metrics of a host. `read` returns the newest reading; it is called at each scrape."""

    def __init__(self, read: Callable[[], HostReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        host = self._read()
        labels = {"job_name": host.job, "host": host.host}
        yield _info(host.version)
        yield _rank_info(host, labels)
        for name, text, value in _RANK_GAUGES:
            yield gauge(name, text, labels, [((str(rank.rank),), value(rank)) for rank in host.ranks], ["rank"])
        yield from producer_metrics(host.ranks, labels)
        yield from single_gauges(labels, (
            ("megatrain_host_median_step_seconds", "Median duration of a step.", host.median_step_s),
            ("megatrain_host_silent_ranks", "Ranks without progress for longer than their phase may take.",
             host.silent_ranks),
            ("megatrain_spool_bytes", "Events that wait on disk for the daemon.", host.spool_bytes),
            ("megatrain_streamer_connected", "1: the daemon receives this host's events.", host.is_connected),
            ("megatrain_clock_offset_seconds", "This host's clock minus the daemon's.", host.clock_offset_s),
            ("megatrain_clock_error_seconds", "Error bound of the clock offset.", host.clock_error_s),
        ))  # fmt: skip
        yield from _cache(host, labels)
        yield counts("megatrain_events_sent", "Rows sent to the daemon.", labels, "table", host.rows_sent)
        text = "Rows lost on this host before they were sent."
        yield counts("megatrain_events_dropped", text, labels, "reason", host.rows_dropped)
        if host.devices is not None:
            yield from device_metrics(host.devices, labels)


def _rank_info(host: HostReading, labels: Mapping[str, str]) -> Metric:
    axes = list(host.ranks[0].place) if host.ranks else []
    samples = [((str(rank.rank), *(str(rank.place[axis]) for axis in axes), rank.gpu_uuid), 1) for rank in host.ranks]
    text = "Place, host and GPU of a rank; always 1, for joins."
    return gauge("megatrain_rank_info", text, labels, samples, ["rank", *axes, "gpu_uuid"])


def _cache(host: HostReading, labels: Mapping[str, str]) -> Iterator[Metric]:
    num_bytes, not_stored = Counter[str](), 0
    for rank in host.ranks:
        num_bytes.update(rank.cache_bytes)
        not_stored += rank.cache_not_stored
    if num_bytes:
        text = (
            "Data in object storage, in this round: read from the host's cache, fetched from the storage, evicted to "
            "make room."
        )
        yield counts("megatrain_data_cache_bytes", text, labels, "kind", num_bytes)
        text = "Blocks and files that could not be written to the cache in this round, for example to a full disk."
        yield counter("megatrain_data_cache_not_stored", text, labels, [((), not_stored)])


class JobCollector(Collector):
    """The metrics of a job. `read` returns the newest reading; it is called at each scrape."""

    def __init__(self, read: Callable[[], JobReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        job = self._read()
        labels = {"job_name": job.job}
        yield _info(job.version)
        yield from single_gauges(labels, (
            ("megatrain_step", "Newest step that all ranks have completed.", job.step),
            ("megatrain_loss", "Loss of the newest step; may be NaN.", job.loss),
            ("megatrain_grad_norm", "Gradient norm of the newest step, before clipping.", job.grad_norm),
            ("megatrain_last_step_timestamp_seconds", "When the newest step was completed.", job.last_step_unix_s),
            ("megatrain_mfu_ratio", "Model FLOPs utilization of the newest step.", job.mfu),
            ("megatrain_effective_time_ratio", "Time in steps that were not repeated later, divided by all time.",
             job.effective_time_ratio),
            ("megatrain_checkpoint_last_success_timestamp_seconds", "When the newest checkpoint reached storage.",
             job.saved_unix_s),
            ("megatrain_checkpoint_step", "Step of the newest checkpoint in storage.", job.saved_step),
            ("megatrain_streamers_connected", "Hosts that are connected to the daemon.", job.connected_hosts),
            ("megatrain_silent_ranks", "Ranks that sent no events for the newest steps.", job.silent_ranks),
            ("megatrain_straggler_least_score", "Score from which a host is a straggler.", job.least_straggler_score),
            ("megatrain_events_segment_bytes", "Size of all segments on disk.", job.segment_bytes),
        ))  # fmt: skip
        yield from _health(job, labels)
        yield _step_durations(job)
        worst = sorted(job.straggler_scores.items(), key=lambda entry: -entry[1])[:MAX_SCORES]
        text = "How far the slowest hosts are above their peers, in spreads."
        yield gauge("megatrain_straggler_score", text, labels, [((host,), score) for host, score in worst], ["host"])
        for name, text, count in (
            ("megatrain_tokens", "Tokens trained on since the daemon started.", job.tokens),
            ("megatrain_rounds", "Rounds that have begun.", job.rounds),
            ("megatrain_checkpoint_failures", "Checkpoints that could not be saved to storage.", job.save_failures),
            ("megatrain_events_lost", "Rows that hosts reported as lost.", job.rows_dropped),
            ("megatrain_events_received_bytes", "Size of the received batches of rows.", job.bytes_received),
            ("megatrain_events_failed_commits", "Failed attempts to store rows.", job.failed_commits),
        ):
            if count is not None:
                yield counter(name, text, labels, [((), count)])
        for name, text, by, values in (
            ("megatrain_incidents", "Incidents.", "kind", job.incidents),
            ("megatrain_notifications_sent", "Messages that a receiver accepted.", "receiver", job.notices_sent),
            ("megatrain_notifications_failed", "Failed attempts to send a message to a receiver.", "receiver",
             job.notices_failed),
            ("megatrain_notifications_given_up", "Topics that were not sent because they ended too long ago.",
             "receiver", job.notices_given_up),
            ("megatrain_events_batches", "Received batches of rows.", "kind", job.batches),
            ("megatrain_events_stored", "Rows stored on disk.", "table", job.rows_stored),
            ("megatrain_events_not_analyzed", "Stored rows that were not analyzed.", "reason", job.rows_not_analyzed),
            ("megatrain_events_rejected", "Rows that the daemon rejected.", "reason", job.rows_rejected),
        ):  # fmt: skip
            yield counts(name, text, labels, by, values)
        names = ["kind", "cause", "confidence"]
        yield counter("megatrain_verdicts", "Verdicts of the diagnosis.", labels, sorted(job.verdicts.items()), names)


def _health(job: JobReading, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the health level of a job, and the number of reasons by level and code."""
    if job.health is None:
        return
    levels = [((level,), level is job.health.level) for level in HealthLevel]
    yield gauge("megatrain_job_health", "1: the job is at this level of health.", labels, levels, ["level"])
    reasons = sorted(Counter((reason.level, reason.code) for reason in job.health.reasons).items())
    text = "Reasons why the job is not green."
    yield gauge("megatrain_job_health_reasons", text, labels, reasons, ["level", "code"])


def _step_durations(job: JobReading) -> Metric:
    bounds = [*(f"{bound:g}" for bound in STEP_BUCKETS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(job.step_buckets), strict=True))
    text = "Durations of the job's steps."
    family = HistogramMetricFamily("megatrain_step_duration_seconds", text, labels=["job_name"])
    family.add_metric([job.job], buckets, sum_value=job.step_sum_s)
    return family


def registry_of(collector: Collector) -> CollectorRegistry:
    """Return a separate registry with only this collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
