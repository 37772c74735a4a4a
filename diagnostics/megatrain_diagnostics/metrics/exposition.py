"""Converts readings to Prometheus metrics; names and units follow Prometheus' rules (one prefix, base units, _total).

The number of label values is bounded: rank is a label only of the gauges of a rank and of `megatrain_rank_info`, which
other metrics are joined with (GPUs by gpu_uuid); step, round, process and error text are not labels. An unknown value
has no sample; NaN is exported only if the value itself is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from megatrain_diagnostics.metrics.device_metrics import device_metrics
from megatrain_diagnostics.metrics.producer_metrics import producer_metrics
from megatrain_diagnostics.metrics.readings import (
    MAX_SCORES,
    STEP_BUCKETS_S,
    HostReading,
    JobReading,
    RankReading,
)
from megatrain_job.jobs.health import HealthLevel


@dataclass(frozen=True, slots=True)
class _RankGauge:
    name: str
    text: str
    value: Callable[[RankReading], float | None]


_RANK_GAUGES = (
    _RankGauge("megatrain_rank_step", "Steps that the rank has completed.", lambda rank: rank.step),
    _RankGauge(
        "megatrain_rank_last_step_timestamp_seconds",
        "When the rank completed its last step.",
        lambda rank: rank.last_step_unix_s,
    ),
    _RankGauge(
        "megatrain_rank_last_sign_timestamp_seconds",
        "When the rank last began or completed a step or entered a phase.",
        lambda rank: rank.last_sign_unix_s,
    ),
    _RankGauge("megatrain_rank_step_duration_seconds", "Duration of the last step.", lambda rank: rank.step_s),
    _RankGauge(
        "megatrain_rank_compute_seconds",
        "Compute in the last step, from forward to optimizer.",
        lambda rank: rank.compute_s,
    ),
    _RankGauge(
        "megatrain_rank_communication_seconds",
        "Collectives, sends and receives in the last step, including the time they wait.",
        lambda rank: rank.collective_s,
    ),
    _RankGauge(
        "megatrain_rank_data_wait_seconds", "Time the last step waited for data.", lambda rank: rank.data_wait_s
    ),
    _RankGauge("megatrain_rank_gc_seconds", "Python's garbage collection in the last step.", lambda rank: rank.gc_s),
    _RankGauge(
        "megatrain_rank_label_tokens",
        "Tokens of the rank's samples in the last step that contribute to the loss.",
        lambda rank: rank.label_tokens,
    ),
    _RankGauge(
        "megatrain_rank_documents", "Documents of the rank's samples in the last step.", lambda rank: rank.documents
    ),
    _RankGauge(
        "megatrain_rank_squared_lengths",
        "Sum of the squared lengths of these documents, which the cost of attention follows.",
        lambda rank: rank.squared_lengths,
    ),
    _RankGauge(
        "megatrain_rank_replaced_samples",
        "Samples of the rank that cannot be used and were replaced since its process began.",
        lambda rank: rank.replaced_samples,
    ),
    _RankGauge(
        "megatrain_rank_data_steps_ready",
        "Steps that the host's data loader had ready when the rank requested the last step; 0: the rank waited.",
        lambda rank: rank.steps_ready,
    ),
    _RankGauge(
        "megatrain_rank_data_read_seconds",
        "Reads of the host's data loader in the last step, of the first rank of each replica.",
        lambda rank: rank.read_s,
    ),
    _RankGauge("megatrain_rank_data_read_bytes", "Bytes of these reads.", lambda rank: rank.read_bytes),
    _RankGauge(
        "megatrain_rank_data_loader_starts",
        "How often the host's data loader was started in this round, of the same ranks.",
        lambda rank: rank.loader_starts,
    ),
    _RankGauge(
        "megatrain_rank_picture_wait_seconds",
        "Time in which reads that ended in the last step waited for producers of pictures, of the same ranks.",
        lambda rank: rank.picture_wait_s,
    ),
)


def _info(version: str) -> Metric:
    info = InfoMetricFamily("megatrain_build", "Version of megatrain.")
    info.add_metric([], {"version": version})
    return info


def _gauge(name: str, text: str, labels: dict[str, str], value: float | None) -> Iterator[Metric]:
    """Yield a gauge with one sample; nothing if the value is None."""
    if value is not None:
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family


def _health(job: JobReading) -> Iterator[Metric]:
    """Yield the health level of a job, and the number of reasons by level and code."""
    if job.health is None:
        return
    levels = GaugeMetricFamily(
        "megatrain_job_health", "1: the job is at this level of health.", labels=["job_name", "level"]
    )
    for level in HealthLevel:
        levels.add_metric([job.job, level], level is job.health.level)
    yield levels
    reasons = GaugeMetricFamily(
        "megatrain_job_health_reasons", "Reasons why the job is not green.", labels=["job_name", "level", "code"]
    )
    for (level, code), count in sorted(Counter((reason.level, reason.code) for reason in job.health.reasons).items()):
        reasons.add_metric([job.job, level, code], count)
    yield reasons


def _counter(name: str, text: str, labels: dict[str, str], by: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, *([by] if by else [])])
    for key, value in sorted(values.items()):
        family.add_metric([*labels.values(), *([key] if by else [])], value)
    return family


class HostCollector(Collector):
    """The metrics of a host. `read` returns the newest reading; it is called at each scrape."""

    def __init__(self, read: Callable[[], HostReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        host = self._read()
        labels = {"job_name": host.job, "host": host.host}
        yield _info(host.version)
        yield self._rank_info(host)
        for gauge in _RANK_GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.text, labels=[*labels, "rank"])
            for rank in host.ranks:
                value = gauge.value(rank)
                if value is not None:
                    family.add_metric([*labels.values(), str(rank.rank)], value)
            yield family
        yield from producer_metrics(host.ranks, labels)
        yield from _gauge(
            "megatrain_host_median_step_seconds", "Median duration of a step.", labels, host.median_step_s
        )
        yield from _gauge(
            "megatrain_host_silent_ranks",
            "Ranks without progress for longer than their phase may take.",
            labels,
            host.silent_ranks,
        )
        yield from self._cache(host, labels)
        yield _counter("megatrain_events_sent", "Rows sent to the daemon.", labels, "table", dict(host.rows_sent))
        yield _counter(
            "megatrain_events_dropped",
            "Rows lost on this host before they were sent.",
            labels,
            "reason",
            dict(host.rows_dropped),
        )
        yield from _gauge("megatrain_spool_bytes", "Events that wait on disk for the daemon.", labels, host.spool_bytes)
        yield from _gauge(
            "megatrain_streamer_connected", "1: the daemon receives this host's events.", labels, host.is_connected
        )
        yield from _gauge(
            "megatrain_clock_offset_seconds", "This host's clock minus the daemon's.", labels, host.clock_offset_s
        )
        yield from _gauge(
            "megatrain_clock_error_seconds", "Error bound of the clock offset.", labels, host.clock_error_s
        )
        if host.devices is not None:
            yield from device_metrics(host.devices, labels)

    def _cache(self, host: HostReading, labels: dict[str, str]) -> Iterator[Metric]:
        num_bytes, not_stored = Counter[str](), 0
        for rank in host.ranks:
            num_bytes.update(rank.cache_bytes)
            not_stored += rank.cache_not_stored
        if num_bytes:
            yield _counter(
                "megatrain_data_cache_bytes",
                "Data in object storage, in this round: read from the host's cache, fetched from the storage, evicted "
                "to make room.",
                labels,
                "kind",
                num_bytes,
            )
            yield _counter(
                "megatrain_data_cache_not_stored",
                "Blocks and files that could not be written to the cache in this round, for example to a full disk.",
                labels,
                "",
                {"": not_stored},
            )

    def _rank_info(self, host: HostReading) -> Metric:
        axes = list(host.ranks[0].place) if host.ranks else []
        names = ["job_name", "host", "rank", *axes, "gpu_uuid"]
        family = GaugeMetricFamily(
            "megatrain_rank_info", "Place, host and GPU of a rank; always 1, for joins.", labels=names
        )
        for rank in host.ranks:
            place = [str(rank.place[axis]) for axis in axes]
            family.add_metric([host.job, host.host, str(rank.rank), *place, rank.gpu_uuid], 1)
        return family


class JobCollector(Collector):
    """The metrics of a job. `read` returns the newest reading; it is called at each scrape."""

    def __init__(self, read: Callable[[], JobReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        job = self._read()
        labels = {"job_name": job.job}
        yield _info(job.version)
        for name, text, value in (
            ("megatrain_step", "Newest step that all ranks have completed.", job.step),
            ("megatrain_loss", "Loss of the newest step; may be NaN.", job.loss),
            ("megatrain_grad_norm", "Gradient norm of the newest step, before clipping.", job.grad_norm),
            ("megatrain_last_step_timestamp_seconds", "When the newest step was completed.", job.last_step_unix_s),
            ("megatrain_mfu_ratio", "Model FLOPs utilization of the newest step.", job.mfu),
            (
                "megatrain_effective_time_ratio",
                "Time in steps that were not repeated later, divided by all time.",
                job.effective_time_ratio,
            ),
            (
                "megatrain_checkpoint_last_success_timestamp_seconds",
                "When the newest checkpoint reached storage.",
                job.saved_unix_s,
            ),
            ("megatrain_checkpoint_step", "Step of the newest checkpoint in storage.", job.saved_step),
            ("megatrain_streamers_connected", "Hosts that are connected to the daemon.", job.connected_hosts),
            ("megatrain_silent_ranks", "Ranks that sent no events for the newest steps.", job.silent_ranks),
            ("megatrain_straggler_least_score", "Score from which a host is a straggler.", job.least_straggler_score),
            ("megatrain_events_segment_bytes", "Size of all segments on disk.", job.segment_bytes),
        ):
            yield from _gauge(name, text, labels, value)
        yield from _health(job)
        yield self._step_durations(job)
        yield self._scores(job)
        for name, text, count in (
            ("megatrain_tokens", "Tokens trained on since the daemon started.", job.tokens),
            ("megatrain_rounds", "Rounds that have begun.", job.rounds),
            ("megatrain_checkpoint_failures", "Checkpoints that could not be saved to storage.", job.save_failures),
            ("megatrain_events_lost", "Rows that hosts reported as lost.", job.rows_dropped),
            ("megatrain_events_received_bytes", "Size of the received batches of rows.", job.bytes_received),
            ("megatrain_events_failed_commits", "Failed attempts to store rows.", job.failed_commits),
        ):
            if count is not None:
                yield _counter(name, text, labels, "", {"": count})
        yield _counter("megatrain_incidents", "Incidents.", labels, "kind", dict(job.incidents))
        for name, text, values in (
            ("megatrain_notifications_sent", "Messages that a receiver accepted.", job.notices_sent),
            ("megatrain_notifications_failed", "Failed attempts to send a message to a receiver.", job.notices_failed),
            (
                "megatrain_notifications_given_up",
                "Topics that were not sent because they ended too long ago.",
                job.notices_given_up,
            ),
        ):
            yield _counter(name, text, labels, "receiver", dict(values))
        for name, text, by, values in (
            ("megatrain_events_batches", "Received batches of rows.", "kind", job.batches),
            ("megatrain_events_stored", "Rows stored on disk.", "table", job.rows_stored),
            ("megatrain_events_not_analyzed", "Stored rows that were not analyzed.", "reason", job.rows_not_analyzed),
            ("megatrain_events_rejected", "Rows that the daemon rejected.", "reason", job.rows_rejected),
        ):
            yield _counter(name, text, labels, by, dict(values))
        yield self._verdicts(job)

    def _step_durations(self, job: JobReading) -> Metric:
        bounds = [*(f"{bound:g}" for bound in STEP_BUCKETS_S), "+Inf"]
        family = HistogramMetricFamily(
            "megatrain_step_duration_seconds", "Durations of the job's steps.", labels=["job_name"]
        )
        family.add_metric(
            [job.job], list(zip(bounds, accumulate(job.step_buckets), strict=True)), sum_value=job.step_sum_s
        )
        return family

    def _scores(self, job: JobReading) -> Metric:
        family = GaugeMetricFamily(
            "megatrain_straggler_score",
            "How far the slowest hosts are above their peers, in spreads.",
            labels=["job_name", "host"],
        )
        worst = sorted(job.straggler_scores.items(), key=lambda entry: -entry[1])[:MAX_SCORES]
        for host, score in worst:
            family.add_metric([job.job, host], score)
        return family

    def _verdicts(self, job: JobReading) -> Metric:
        names = ["job_name", "kind", "cause", "confidence"]
        family = CounterMetricFamily("megatrain_verdicts", "Verdicts of the diagnosis.", labels=names)
        for (kind, cause, confidence), count in sorted(job.verdicts.items()):
            family.add_metric([job.job, kind, cause, confidence], count)
        return family


def registry_of(collector: Collector) -> CollectorRegistry:
    """Return a separate registry with only this collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
